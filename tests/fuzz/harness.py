"""Coverage-guided fuzzing of the readers: python tests/fuzz/harness.py gguf -max_total_time=60

Needs `pip install atheris`. New inputs go to tests/fuzz/corpus/TARGET, which test_corpus.py replays.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["headrace"]):
    from targets import TARGETS


def main() -> None:
    name, *options = sys.argv[1:]
    corpus = Path(__file__).parent / "corpus" / name
    atheris.Setup([sys.argv[0], str(corpus), *options], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
