"""Rules of a conversation that every dialect shares: instructions first, and results in the order of their calls."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from headrace.serve.failure import RequestError, at
from headrace.serve.request import Part, Text, Turn

JOINT = "\n\n"  # between instructions, and between messages that become one
# A line of some clients in front of the instructions, new in every conversation: no prefix would ever be reused. In
# any case, and behind any blanks.
VOLATILE = "x-anthropic-billing-header:"


def with_instructions(turns: Sequence[Turn], *, before: str = "") -> tuple[Turn, ...]:
    """The system turns in front of a conversation as one, behind `before`; a later one becomes the user's.

    A first line that changes with every conversation is left out (`steady`).
    """
    head = 0
    while head < len(turns) and turns[head].role == "system":
        head += 1
    said = [steady(before), *map(_instructions, turns[:head])]
    system = JOINT.join(text for text in said if text)
    rest = [replace(turn, role="user") if turn.role == "system" else turn for turn in turns[head:]]
    return (*([Turn("system", (Text(system),))] if system else []), *rest)


def _instructions(turn: Turn) -> str:
    return "".join(steady(part.text) for part in turn.parts if isinstance(part, Text))


def steady(instructions: str) -> str:
    """Without a first line that changes with every conversation."""
    said = instructions.lstrip()
    if said[: len(VOLATILE)].lower() != VOLATILE:
        return instructions
    return said.partition("\n")[2].lstrip("\n")


def joined(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Neighbours of one role as one turn; results of tools stay apart."""
    out: list[Turn] = []
    for role, group in groupby(turns, key=lambda turn: turn.role):
        neighbours = list(group)
        out += [_one(neighbours)] if role in ("user", "assistant") else neighbours
    return tuple(out)


def _one(turns: Sequence[Turn]) -> Turn:
    parts: list[Part] = []
    said = False
    for turn in turns:
        says = bool(turn.text)
        parts += [Text(JOINT), *turn.parts] if said and says else turn.parts
        said = said or says
    reasoning = JOINT.join(turn.reasoning for turn in turns if turn.reasoning)
    calls = tuple(call for turn in turns for call in turn.calls)
    return replace(turns[0], parts=tuple(parts), reasoning=reasoning, calls=calls)


def arranged(turns: Sequence[Turn], place: str) -> tuple[Turn, ...]:
    """The turns with results of tools in the order of their calls, matched by id.

    place: of the conversation in the body. Raises RequestError unless every call has exactly one result before the
    next message, no result lacks its call, and the conversation ends with something to answer.
    """
    with at(place):
        return _arranged(turns)


def _arranged(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    out: list[Turn] = []
    open_ids: dict[str, None] = {}
    results: dict[str, Turn] = {}
    for turn in turns:
        if turn.role == "tool":
            _take(turn, open_ids, results)
            continue
        out += _closed(open_ids, results)
        open_ids, results = dict.fromkeys(call.id for call in turn.calls), {}
        if len(open_ids) < len(turn.calls):
            raise RequestError("two tool calls of one message have the same id")
        out.append(turn)
    out += _closed(open_ids, results)
    if not out:
        raise RequestError("the conversation is empty")
    if out[-1].role == "assistant":
        raise RequestError("the conversation ends with the assistant's message: nothing is asked")
    return tuple(out)


def _take(turn: Turn, open_ids: Container[str], results: dict[str, Turn]) -> None:
    call_id = turn.call_id or ""
    if call_id not in open_ids:
        raise RequestError(
            f"the tool result {call_id!r:.100} answers no call of the message before it"
        )
    if call_id in results:
        raise RequestError(f"the tool call {call_id!r:.100} has two results")
    results[call_id] = turn


def _closed(open_ids: Iterable[str], results: dict[str, Turn]) -> list[Turn]:
    missing = [call_id for call_id in open_ids if call_id not in results]
    if missing:
        named = ", ".join(repr(call_id)[:100] for call_id in missing[:8])
        raise RequestError(f"tool calls without a result: {named}")
    return [results[call_id] for call_id in open_ids]
