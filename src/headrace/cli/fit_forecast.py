"""`headrace fit-forecast`: makes the lookahead of a mixture guess better, from the model's own states."""

from __future__ import annotations

import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from headrace import config, locate
from headrace.artifact.forecast import FORECAST_NAME, write_forecast
from headrace.artifact.manifest import MANIFEST_NAME, read_manifest
from headrace.cli import progress
from headrace.cli.memory_options import DEFAULT_MEMORY, MemoryOptions
from headrace.cli.whole import WHOLE
from headrace.engine.forecast import fit, fit_bytes, guessed_layers
from headrace.errors import FileError, InputError, SettingError
from headrace.llm import LLM
from headrace.memory.facts import plan_model
from headrace.memory.inputs import PlanOptions
from headrace.memory.ledger import Plan, Refusal
from headrace.memory.machine import read_machine
from headrace.models.config import DecoderConfig
from headrace.serve.process.lock import beside

MIN_TOKENS = 256
PIECE = 512  # tokens of one sequence: states of every position up to it
MAX_TOKENS = 1 << 24
TOKEN_BYTES = 16  # of a token that is kept
TEXT_PIECE = 64 << 10  # bytes of a file at once
POOL_SHARE = 2  # half of what the pool would get may go to layers that are fitted at once
STARTS = (
    "Write a short story about a lighthouse.",
    "Explain how a compiler works.",
    "def parse(line):",
    "List the causes of the French Revolution.",
    "What should I cook tonight with rice and eggs?",
    "The committee met on Tuesday to discuss",
    "Prove that the square root of two is irrational.",
    "Translate into Spanish: the weather is nice today.",
)


def fit_forecast(
    model: str,
    *,
    tokens: Annotated[int, WHOLE] = 8192,
    text: Path | None = None,
    threads: Annotated[int | None, WHOLE] = None,
    memory: MemoryOptions = DEFAULT_MEMORY,
) -> int:
    """Fit the guesses of a mixture's lookahead on its own states, and keep them beside the model.

    Changes what is read early, never an answer. Prints for each layer how many of its experts are guessed
    without and with the fit, on states that were not fitted on.

    Parameters
    ----------
    model
        A name, an artifact, a GGUF file or a model directory.
    tokens
        How many positions to fit on.
    text
        A text file to read; without it the model reads what it writes itself.
    threads
        Threads of the kernels; every usable processor if not set.
    """
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        raise SettingError(f"tokens is {tokens}; it must be {MIN_TOKENS} to {MAX_TOKENS}")
    with progress.shown() as report:
        path = locate.locate(model, progress=report)
    options = _short(path, memory.options())
    layers, nbytes = _share(path, options, threads, tokens, writes=text is None)
    with (
        beside(config.load().home),
        LLM(path, threads=threads, memory=options, beside_bytes=nbytes, with_forecast=False) as llm,
    ):
        pieces = _read(llm, text, tokens) if text is not None else _write(llm, tokens)
        llm.forget()
        fits = []
        for one in fit(llm.engine, pieces, layers_at_once=layers):
            fits.append(one)
            print(
                f"layer {one.layer}: {one.plain:.1%} guessed, {one.fitted:.1%} with rank {one.rank}",
                flush=True,
            )
        write_forecast(llm.artifact, {one.layer: one.router for one in fits})
        plain, fitted = (sum(getattr(f, n) for f in fits) / len(fits) for n in ("plain", "fitted"))
        print(
            f"all layers: {plain:.1%} guessed, {fitted:.1%} with {llm.artifact.path / FORECAST_NAME}"
        )
    return 0


def _short(path: Path, options: PlanOptions) -> PlanOptions:
    """An automatic context is one piece: longer ones are not read."""
    if options.max_context != "auto":
        return options
    return replace(options, max_context=min(PIECE, _config(path).context))


def _config(path: Path) -> DecoderConfig:
    return DecoderConfig.from_json(read_manifest(path / MANIFEST_NAME).config)


def _share(
    path: Path, options: PlanOptions, threads: int | None, tokens: int, *, writes: bool
) -> tuple[int, int]:
    """How many layers are fitted at once, and the bytes for it. Every further group of layers reads all tokens again;
    the pool gives up to half for that where the model `writes`, and all of it where passes only sweep.

    Raises InputError for a model without layers to guess for, MemoryBudgetError if not one layer fits.
    """
    config = _config(path)
    count = len(guessed_layers(config))
    if not count:
        layers = sum(map(config.has_experts, range(config.num_layers)))
        cause = "one layer with experts" if layers else "the model has no experts"
        raise InputError(f"nothing to guess: {cause}")
    threads, _ = locate.compute_settings(threads, None)

    def nbytes(layers: int) -> int:
        return fit_bytes(config, layers) + TOKEN_BYTES * tokens

    def planned(layers: int) -> Plan | Refusal:
        beside = nbytes(layers)
        return plan_model(path, options, machine, threads=threads, beside_bytes=beside)

    machine = read_machine()
    least = planned(1).for_loading()
    room = least.ledger.pool // (POOL_SHARE if writes else 1)
    layers = max(n for n in range(1, count + 1) if n == 1 or nbytes(n) - nbytes(1) <= room)
    while layers > 1 and isinstance(planned(layers), Refusal):
        layers //= 2  # beside a pool of fixed size, or the least one
    return layers, nbytes(layers)


def _read(llm: LLM, path: Path, tokens: int) -> list[array[int]]:
    """The first tokens of a file, of which no more is read than they need."""
    ids = array("i")
    try:
        with path.open("rb") as file:
            while len(ids) < tokens and (part := file.read(TEXT_PIECE)):
                part += file.readline(TEXT_PIECE)  # to the end of a line, so that no word is cut
                ids.extend(llm.tokenize(part))
    except OSError as error:
        raise FileError(path, "read", error.strerror or str(error)) from None
    if len(ids) < MIN_TOKENS:
        raise InputError(f"{path} has {len(ids)} tokens; at least {MIN_TOKENS} are needed")
    ids, size = ids[:tokens], min(PIECE, llm.engine.context)
    return [ids[at : at + size] for at in range(0, len(ids), size)]


def _write(llm: LLM, tokens: int) -> list[array[int]]:
    """What the model writes after a few starts: prompts and answers."""
    pieces: list[array[int]] = []
    done, number = 0, 0
    while done < tokens:
        prompt = llm.prompt_ids(STARTS[number % len(STARTS)], raw=not llm.can_chat)
        room = min(PIECE, llm.engine.context - 1) - len(prompt)
        answer = llm.generate_ids(prompt, temperature=1.0, seed=number, max_tokens=max(1, room))
        pieces.append(array("i", [*prompt, *answer.tokens]))
        done, number = done + len(pieces[-1]), number + 1
        print(
            f"\rwrote {min(done, tokens):,} of {tokens:,} tokens",
            end="",
            file=sys.stderr,
            flush=True,
        )
    print(file=sys.stderr)
    return pieces
