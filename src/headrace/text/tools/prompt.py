"""A conversation with tools as a model's chat template takes it, or as text where the template knows no tools.

Owns what templates demand of a conversation beyond its meaning: one system message, in front; users and assistants
that take turns; one call a message; ids of a length. Knows no template and no tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from headrace.text.tools.formats import Format
from headrace.values import Tool

Json = dict[str, Any]
JOINT = "\n\n"  # between messages that become one

_SYSTEM = ("system", "developer")
_CALLS = (
    "# Tools\n\nYou may call functions. These are declared, one JSON object a line:\n<tools>\n{tools}\n</tools>\n\n"
    "To call one, write its name and its arguments as a JSON object between tags, and end your turn behind it:\n"
    '{open}\n{{"name": <function>, "arguments": {{<parameter>: <value>}}}}\n{close}\n{more}'
    "The results follow between <tool_response> and </tool_response>. Call a function only where it helps; otherwise "
    "answer in text."
)
_MORE = "For several calls, repeat that.\n"
_ONE = "Only one call at a time is possible.\n"


def conversation(
    form: Format,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] = (),
    *,
    choice: str = "auto",
    parallel: bool = True,
) -> tuple[list[Json], list[Json] | None]:
    """Messages and tools for `encode_chat`.

    messages: as Hugging Face's templates have them: role, content (text, or a list of parts), and of an assistant
    reasoning_content and tool_calls, each with id and function (name; arguments, an object or its JSON); role "tool"
    has tool_call_id, or name. choice: "auto", "none", "required", or a tool's name; a demand is told at the end of the
    last message of the user, which leaves what is before it as it was.
    """
    offered = [] if choice == "none" else list(tools)
    turns = _in_front([_plain(message) for message in messages])
    _name_results(turns)
    if offered and choice != "auto":
        _demand(turns, choice)
    if not form.native:
        return _as_text(form, turns, offered, parallel), None
    turns = _native(form, _joined(_asked(turns)))
    return turns, [_declared(tool) for tool in offered] or None


def _plain(message: Mapping[str, Any]) -> Json:
    out = {key: value for key, value in message.items() if value is not None}
    content = out.get("content", "")
    if not isinstance(content, str) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    out["content"] = content
    if "tool_calls" in out:
        out["tool_calls"] = [_call(call) for call in out["tool_calls"]]
        if not out["tool_calls"]:
            del out["tool_calls"]
    return out


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _call(call: Mapping[str, Any]) -> Json:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    if not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}
    inside = {"name": str(function["name"]), "arguments": dict(arguments)}
    return {"id": str(call.get("id", "")), "type": "function", "function": inside}


def _in_front(turns: list[Json]) -> list[Json]:
    """What the system says before the conversation as one message; what it says later as the user's."""
    head = 0
    while head < len(turns) and turns[head]["role"] in _SYSTEM:
        head += 1
    text = JOINT.join(filter(None, (_text(turn) for turn in turns[:head])))
    rest = [{**t, "role": "user"} if t["role"] in _SYSTEM else t for t in turns[head:]]
    return [*([{"role": "system", "content": text}] if text else []), *rest]


def _text(turn: Json) -> str:
    content = turn["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if _is_text(part))


def _name_results(turns: list[Json]) -> None:
    """Every result has its tool's name: some templates print it."""
    names: dict[str, str] = {}
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if turn["role"] == "tool" and "name" not in turn:
            turn["name"] = names.get(turn.get("tool_call_id", ""), "")


def _demand(turns: list[Json], choice: str) -> None:
    """Ask for a call, at the end of what the user said last."""
    named = choice != "required"
    what = (
        f"Call the function {json.dumps(choice, ensure_ascii=False)}"
        if named
        else "Call a function"
    )
    sentence = f"{what} now; do not answer in text."
    for at in range(len(turns) - 1, -1, -1):
        if turns[at]["role"] == "user":
            turns[at] = _with(turns[at], sentence)
            return
    turns.append({"role": "user", "content": sentence})


def _with(turn: Json, text: str) -> Json:
    content = turn["content"]
    if isinstance(content, str):
        return {**turn, "content": JOINT.join(filter(None, (content, text)))}
    return {**turn, "content": [*content, {"type": "text", "text": JOINT + text}]}


def _joined(turns: Iterable[Json]) -> list[Json]:
    """Neighbours of one role as one turn; results stay apart."""
    out: list[Json] = []
    for role, group in groupby(turns, key=lambda turn: turn["role"]):
        neighbours = list(group)
        out += [_one(neighbours)] if role in ("user", "assistant") else neighbours
    return out


def _one(turns: Sequence[Json]) -> Json:
    if all(isinstance(turn["content"], str) for turn in turns):
        return _merged(turns)
    one = turns[0]
    for turn in turns[1:]:
        if isinstance(one["content"], str) and isinstance(turn["content"], str):
            one = _merged([one, turn])
        else:
            one = {**one, "content": [*_parts(one), *_parts(turn)]}
    return one


def _parts(turn: Json) -> list[Any]:
    content = turn["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _merged(turns: Sequence[Json]) -> Json:
    """Turns whose content is text as one."""
    out: Json = {}
    for turn in turns:
        out |= turn
    for key in ("content", "reasoning_content"):
        text = JOINT.join(filter(None, (turn.get(key, "") for turn in turns)))
        if text or key == "content":
            out[key] = text
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    return {**out, "tool_calls": calls} if calls else out


def _declared(tool: Tool) -> Json:
    """A tool as templates have it; they look for properties even where there are none."""
    schema = {"type": "object", "properties": {}} | dict(tool.parameters)
    inside = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": inside}


# For templates with tools


def _asked(turns: list[Json]) -> list[Json]:
    """The user speaks first: templates look for what was asked, or put tools there."""
    head = int(bool(turns) and turns[0]["role"] == "system")
    if turns[head:] and turns[head]["role"] == "user":
        return turns
    return [*turns[:head], {"role": "user", "content": ""}, *turns[head:]]


def _native(form: Format, turns: list[Json]) -> list[Json]:
    if form.single:
        turns = _one_by_one(turns)
    if form.ids:
        turns = [_with_ids(turn, form.ids) for turn in turns]
    if form.alternating:
        turns = _alternating(turns)
    if form.shape == "channels":
        turns = [_thinking(turn) for turn in turns]
    return turns


def _one_by_one(turns: list[Json]) -> list[Json]:
    """Every call in a message of its own, with its result behind it."""
    out: list[Json] = []
    at = 0
    while at < len(turns):
        turn = turns[at]
        at += 1
        calls = turn.get("tool_calls", [])
        if len(calls) < 2:
            out.append(turn)
            continue
        results: dict[str | None, list[Json]] = {call["id"]: [] for call in calls}
        others: list[Json] = []
        while at < len(turns) and turns[at]["role"] == "tool":
            results.get(turns[at].get("tool_call_id"), others).append(turns[at])
            at += 1
        for index, call in enumerate(calls):
            said = turn if index == 0 else {"role": "assistant", "content": ""}
            out.append({**said, "tool_calls": [call]})
            out += results[call["id"]]
        out += others
    return out


def _with_ids(turn: Json, letters: int) -> Json:
    out = dict(turn)
    if "tool_calls" in out:
        out["tool_calls"] = [{**c, "id": short_id(c["id"], letters)} for c in out["tool_calls"]]
    if "tool_call_id" in out:
        out["tool_call_id"] = short_id(out["tool_call_id"], letters)
    return out


def short_id(full: str, letters: int) -> str:
    """An id of so many letters and digits: the same for the same id."""
    if re.fullmatch(rf"[A-Za-z0-9]{{{letters}}}", full):
        return full
    return hashlib.sha256(full.encode("utf-8", "surrogatepass")).hexdigest()[:letters]


def _alternating(turns: list[Json]) -> list[Json]:
    """Users and assistants in turn, calls and results left out of the count; an empty message where one is missing."""
    out: list[Json] = []
    due = "user"
    for turn in turns:
        counted = turn["role"] in ("user", "assistant") and "tool_calls" not in turn
        if counted and turn["role"] != due:
            out.append({"role": due, "content": ""})
        if counted:
            due = "assistant" if turn["role"] == "user" else "user"
        out.append(turn)
    return out


def _thinking(turn: Json) -> Json:
    """Reasoning under the name that channels have for it; beside a call it is the only text there is room for."""
    out = dict(turn)
    thought = out.pop("reasoning_content", "")
    if thought and "tool_calls" in out:
        out["thinking"] = JOINT.join(filter(None, (thought, _text(out))))
        out["content"] = ""
    elif thought:
        out["thinking"] = thought
    return out


# For templates without


def _as_text(form: Format, turns: list[Json], tools: list[Tool], parallel: bool) -> list[Json]:
    """Tools, calls and results as text of the system, the assistant and the user."""
    out: list[Json] = []
    for turn in turns:
        if turn["role"] == "tool":
            out.append({"role": "user", "content": _result(turn)})
        elif "tool_calls" in turn:
            calls = (_written(form, call["function"]) for call in turn["tool_calls"])
            said = "\n".join(filter(None, (_text(turn), *calls)))
            out.append({"role": "assistant", "content": said})
        else:
            out.append({"role": turn["role"], "content": turn["content"]})
    if tools:
        described = _described(form, tools, parallel)
        if out and out[0]["role"] == "system":
            out[0] = _with(out[0], described)
        else:
            out.insert(0, {"role": "system", "content": described})
    return _joined(out)


def _described(form: Format, tools: list[Tool], parallel: bool) -> str:
    lines = "\n".join(_json(_declared(tool)) for tool in tools)
    more = _MORE if parallel else _ONE
    return _CALLS.format(tools=lines, open=form.open, close=form.close, more=more)


def _written(form: Format, function: Json) -> str:
    return f"{form.open}\n{_json(function)}\n{form.close}"


def _result(turn: Json) -> str:
    named = {"name": turn["name"]} if turn.get("name") else {}
    return f"<tool_response>\n{_json({**named, 'content': _text(turn)})}\n</tool_response>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
