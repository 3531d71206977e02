"""An interrupt at any moment of a call leaves sequences as they were or further on, and nothing is busy or lost."""

from __future__ import annotations

import dis
import os
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType

import pytest

from embed.frames import PROMPT, Frame, generated, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from interrupts import Interrupt

Get = Callable[[str], Artifact]
COUNT = 2


@cache
def moments(code: CodeType) -> frozenset[int]:
    """Offsets at which the interpreter looks for signals: before and after calls, at functions' and loops' beginnings.

    A call of `__exit__` is none: the last look is inside of its block.
    """
    found, names = set[int](), [""] * 3
    for at in dis.get_instructions(code):
        if at.opname in ("PRECALL", "CACHE", "PUSH_NULL"):
            continue
        if at.opname.startswith(("CALL", "RESUME", "JUMP_BACKWARD")):
            if names != ["LOAD_CONST None"] * 3:
                found.add(at.offset)
        elif names[-1].startswith("CALL") and at.opname.startswith(("STORE", "POP_TOP")):
            found.add(at.offset)
        names = [*names[1:], f"{at.opname} {at.argval}"]
    return frozenset(found)


class CallInterrupt(Interrupt):
    """At the moments of headrace's calls and pools at which a signal could come."""

    PLACES = (os.path.join("headrace", "embed", ""), os.path.join("engine", "pages.py"))
    OPCODES = True

    def counts(self, frame: FrameType) -> bool:
        return frame.f_lasti in moments(frame.f_code)


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Whether the call was interrupted, at its `at`-th moment."""
    try:
        with CallInterrupt(at):
            call()
    except KeyboardInterrupt:
        return True
    return False


def started(frame: Frame, schema: embed.Schema | None, length: int = 63) -> embed.Sequence:
    """Next to the end of a block, so that a step takes one."""
    sequence = frame.new()
    sequence.set_schema(schema)
    embed.prefill(sequence, PROMPT[:length], frame.space)
    return sequence


@pytest.mark.parametrize("regex", [None, "[a-f]{40}"])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_steps(tiny_artifact: Get, family: str, regex: str | None) -> None:
    with opened(tiny_artifact(family)) as frame:
        schema = None if regex is None else frame.model.compile_schema(regex=regex)
        with started(frame, schema) as plain:
            generated(frame, plain, COUNT, 1)
            wanted, saved = plain.tokens, plain.save()
        hits = 0
        for at in (*range(1, 40, 3), *range(40, 1200, 31)):
            sequence = started(frame, schema)

            def steps(sequence: embed.Sequence = sequence) -> None:
                while len(sequence.tokens) < len(wanted):
                    step(frame, sequence, 1)

            hits += interrupted(steps, at)
            steps()
            assert (sequence.tokens, sequence.save()) == (wanted, saved), at
            sequence.release()
            assert (frame.pool.blocks_used, frame.pool.num_sequences) == (0, 0), at
        assert hits > 20


@pytest.mark.parametrize("content", [False, True])
def test_prefill(tiny_artifact: Get, content: bool) -> None:
    with opened(tiny_artifact("llama"), max_chunk=16) as frame:
        schema = frame.model.compile_schema(regex="[a-f]{100}")
        span = (frame.model.tokenize("abcdef") * 9)[:50] if content else PROMPT[:50]
        with started(frame, schema, 40) as plain:
            embed.prefill(plain, span, frame.space, content=content)
            saved = plain.save()
            wanted = generated(frame, plain, 2)
        hits = 0
        for at in (*range(1, 40, 5), *range(40, 1600, 31)):
            sequence = started(frame, schema, 40)

            def rest(sequence: embed.Sequence = sequence) -> None:
                left = span[len(sequence.tokens) - 40 :]
                embed.prefill(sequence, left, frame.space, content=content)

            if interrupted(rest, at):
                hits += 1
                if len(sequence.tokens) == 90:  # all was read, and the hidden state was not told
                    assert generated(frame, sequence, 2) == wanted, at
                    sequence.release()
                    continue
                rest()
            assert sequence.save() == saved, at
            assert generated(frame, sequence, 2) == wanted, at
            sequence.release()
            assert frame.pool.blocks_used == 0, at
        assert hits > 20


def test_adoption_and_release(tiny_artifact: Get) -> None:
    """Blocks that are shared stay the prefix's, whatever an interrupted adoption had of them."""
    with opened(tiny_artifact("llama")) as frame, embed.Prefix(frame.pool) as prefix:
        prefix.prefill(PROMPT[:70], frame.space)
        prefix.freeze()
        before = frame.new()
        before.adopt_prefix(prefix)
        wanted = generated(frame, before, 2)
        before.release()
        for at in range(1, 200, 5):
            sequence = frame.new()
            interrupted(lambda line=sequence: line.adopt_prefix(prefix), at)  # type: ignore[misc]
            sequence.reset()
            embed.prefill(sequence, PROMPT[::-1], frame.space)
            sequence.reset()
            sequence.adopt_prefix(prefix)
            assert generated(frame, sequence, 2) == wanted, at
            interrupted(sequence.release, 1 + at // 4)
            sequence.release()
            assert (frame.pool.blocks_used, frame.pool.num_sequences) == (2, 1), at
