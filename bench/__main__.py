"""`python -m bench`: measure, record, report. See docs/benchmarks.md for the peers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import report, run
from bench.run import Contender


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("what", nargs="*", default=["speed", "quality", "load", "report"])
    parser.add_argument("--gguf", help="the pinned GGUF, for the peers")
    parser.add_argument("--q4-0", help="the same, requantised to Q4_0 by llama.cpp's own tool")
    parser.add_argument("--artifact", default=str(Path.home() / ".headrace/models/smollm2-135m"))
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python")
    parser.add_argument("--torch-python", help="a Python with transformers, torch and gguf")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    args = parser.parse_args()

    ours = Contender("headrace", "headrace", sys.executable, args.artifact)
    peers, exact, variants = [], None, [ours]
    if args.llama_python and args.gguf:
        peers.append(Contender("llama.cpp Q4_1", "llama.cpp", args.llama_python, args.gguf))
        variants += [
            peers[-1],
            Contender("llama.cpp Q4_1, KV q8_0", "llama.cpp", args.llama_python, args.gguf, "q8_0"),
        ]
        if args.q4_0:
            peers.append(Contender("llama.cpp Q4_0", "llama.cpp", args.llama_python, args.q4_0))
            variants.append(peers[-1])
    if args.torch_python and args.gguf:
        exact = Contender("float32", "transformers", args.torch_python, args.gguf)
        peers.append(
            Contender("transformers float32", "transformers", args.torch_python, args.gguf)
        )
        peers.append(
            Contender(
                "transformers bfloat16", "transformers", args.torch_python, args.gguf, "bfloat16"
            )
        )
    if "speed" in args.what:
        run.bandwidth()
        run.speed([ours, *peers], args.threads, args.rounds)
    if "tiers" in args.what:
        run.speed(
            [
                Contender(f"headrace, {t}", "headrace", sys.executable, args.artifact, t)
                for t in ("avx512", "avx2")
            ],
            args.threads,
            3,
        )
    if "quality" in args.what and exact is not None:
        run.quality(exact, variants, args.artifact)
    if "load" in args.what:
        run.load(args.artifact, args.rounds)
        run.share(args.artifact)
        if args.gguf:
            run.conversion(args.gguf)
    report.write()


if __name__ == "__main__":
    main()
