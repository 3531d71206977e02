"""`headrace fit-forecast`: makes the lookahead of a mixture guess better, from the model's own states."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from headrace import locate
from headrace.artifact.forecast import FORECAST_NAME, write_forecast
from headrace.cli import progress
from headrace.cli.memory_options import DEFAULT_MEMORY, MemoryOptions
from headrace.cli.whole import WHOLE
from headrace.engine.forecast import fit
from headrace.errors import FileError, InputError, SettingError
from headrace.llm import LLM

MIN_TOKENS = 256
PIECE = 512  # tokens of one sequence: states of every position up to it
MAX_TEXT_BYTES = 64 << 20
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
    if tokens < MIN_TOKENS:
        raise SettingError(f"tokens is {tokens}; it must be at least {MIN_TOKENS}")
    with progress.shown() as report:
        path = locate.locate(model, progress=report)
    with LLM(path, threads=threads, memory=memory.options()) as llm:
        if not llm.artifact.records:
            raise InputError("the model has no experts, so there is nothing to guess")
        pieces = _read(llm, text, tokens) if text is not None else _write(llm, tokens)
        fits = []
        for one in fit(llm.engine, pieces):
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


def _read(llm: LLM, path: Path, tokens: int) -> list[list[int]]:
    try:
        with path.open("rb") as file:
            ids = llm.tokenize(file.read(MAX_TEXT_BYTES))[:tokens]
    except OSError as error:
        raise FileError(path, "read", error.strerror or str(error)) from None
    if len(ids) < MIN_TOKENS:
        raise InputError(f"{path} has {len(ids)} tokens; at least {MIN_TOKENS} are needed")
    size = min(PIECE, llm.engine.context)
    return [ids[at : at + size] for at in range(0, len(ids), size)]


def _write(llm: LLM, tokens: int) -> list[list[int]]:
    """What the model writes after a few starts: prompts and answers."""
    pieces: list[list[int]] = []
    done, number = 0, 0
    while done < tokens:
        prompt = llm.prompt_ids(STARTS[number % len(STARTS)], raw=not llm.can_chat)
        room = min(PIECE, llm.engine.context - 1) - len(prompt)
        answer = llm.generate_ids(prompt, temperature=1.0, seed=number, max_tokens=max(1, room))
        pieces.append([*prompt, *answer.tokens])
        done, number = done + len(pieces[-1]), number + 1
        print(
            f"\rwrote {min(done, tokens):,} of {tokens:,} tokens",
            end="",
            file=sys.stderr,
            flush=True,
        )
    print(file=sys.stderr)
    return pieces
