"""A prompt of the AI SDK's gateway client as turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.serve import images
from headrace.serve.dialects import gateway_wire as wire
from headrace.serve.failure import RequestError, at
from headrace.serve.history import arranged, joined, with_instructions
from headrace.serve.request import Json, Part, Text, ToolCall, Turn
from headrace.serve.validation import decoded

DENIED = "The user denied this tool call."


def unsupported(place: str, said: str) -> RequestError:
    """What has a meaning to the client, and none here."""
    return RequestError(f"{place}: {said}", code="unsupported_field", place=place)


def compact(value: object) -> str:
    """JSON as JavaScript writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass
class Reading:
    """A prompt's messages as turns, and warnings of what was left out, in the form of version 4."""

    turns: list[Turn] = field(default_factory=list)
    _warnings: dict[str, Json] = field(default_factory=dict)
    provider_calls: set[str] = field(default_factory=set)

    def conversation(self, prompt: Sequence[wire.Message]) -> tuple[Turn, ...]:
        """All messages, results in the order of their calls. Raises RequestError."""
        for i, message in enumerate(prompt):
            self._read(f"prompt[{i}]", message)
        turns = arranged(joined(with_instructions(self.turns)), "prompt")
        _check_names(turns)
        return turns

    def warn(self, feature: str, details: str) -> None:
        told = {"type": "unsupported", "feature": feature, "details": details}
        self._warnings.setdefault(feature, told)

    @property
    def warnings(self) -> list[Json]:
        return list(self._warnings.values())

    def _read(self, place: str, message: wire.Message) -> None:
        match message:
            case wire.SystemMessage(content=content):
                self.turns.append(Turn("system", _texts(content)))
            case wire.UserMessage(content=content):
                parts = [
                    _user_part(f"{place}.content[{i}]", part) for i, part in enumerate(content)
                ]
                self.turns.append(Turn("user", tuple(parts)))
            case wire.AssistantMessage(content=content):
                self._assistant(place, content)
            case wire.ToolMessage(content=content):
                for i, part in enumerate(content):
                    self._result(f"{place}.content[{i}]", part)

    def _assistant(self, place: str, content: Sequence[wire.AssistantPart]) -> None:
        text, reasoning, calls = "", "", []
        for i, part in enumerate(content):
            at = f"{place}.content[{i}]"
            match part:
                case wire.TextPart():
                    text += part.text
                case wire.ReasoningPart():
                    reasoning += part.text
                case wire.CallPart(provider_executed=True):
                    self.provider_calls.add(part.tool_call_id)
                    self._removed()
                case wire.CallPart():
                    arguments = _arguments(f"{at}.input", part.input)
                    calls.append(ToolCall(part.tool_call_id, part.tool_name, arguments))
                case wire.ResultMessagePart():
                    self._provider_result(at, part)
                case wire.CustomPart():
                    self.warn("custom content", "parts of a provider's own kind are left out")
                case _:
                    raise unsupported(f"{at}.type", f"{part.type!r} in an assistant message")
        if text or reasoning or calls:
            self.turns.append(Turn("assistant", _texts(text), reasoning, tuple(calls)))

    def _provider_result(self, place: str, part: wire.ResultMessagePart) -> None:
        if part.tool_call_id not in self.provider_calls:
            raise RequestError(
                f"{place}: the result {part.tool_call_id!r:.100} of an assistant message answers no call "
                "that a provider executed",
                place=place,
            )

    def _removed(self) -> None:
        self.warn("provider-executed tools", "their calls and results are left out of the prompt")

    def _result(self, place: str, part: wire.ToolPart) -> None:
        if isinstance(part, wire.ApprovalPart) or part.tool_call_id in self.provider_calls:
            self._removed()
            return
        parts = _output(f"{place}.output", part.output)
        self.turns.append(Turn("tool", parts, call_id=part.tool_call_id, tool_name=part.tool_name))


def _texts(text: str) -> tuple[Part, ...]:
    return (Text(text),) if text else ()


def _user_part(place: str, part: wire.UserPart) -> Part:
    return Text(part.text) if isinstance(part, wire.TextPart) else _file(place, part)


def _file(place: str, part: wire.FilePart | wire.MediaPart) -> Part:
    data, media_type = part.data, part.media_type
    if isinstance(data, wire.TextData):
        return Text(data.text)
    if media_type.split("/")[0].lower() != "image":
        raise unsupported(f"{place}.mediaType", f"{media_type!r:.60}; only images are read")
    match data:
        case str() | wire.InlineData():
            inline = data if isinstance(data, str) else data.data
            known = "/" in media_type and not media_type.endswith("/*")
            with at(f"{place}.data"):
                return images.inline(inline, media_type if known else None)
        case wire.UrlData():
            with at(f"{place}.data.url"):
                return images.data_url(data.url)
        case _:
            raise unsupported(f"{place}.data", "a provider's file is not to be had here")


def _arguments(place: str, value: object) -> str:
    """A call's input as the text of a JSON object. An input that is text is read as JSON; blank is no argument."""
    if isinstance(value, str):
        try:
            value = decoded(value.encode()) if value.strip() else {}
        except RequestError:
            value = None
    if not isinstance(value, dict):
        raise RequestError(f"{place}: the arguments are not a JSON object", place=place)
    return compact(value)


def _output(place: str, output: wire.Output) -> tuple[Part, ...]:
    match output:
        case wire.TextOutput() | wire.ErrorTextOutput():
            return _texts(output.value)
        case wire.JsonOutput() | wire.ErrorJsonOutput():
            return _texts(compact(output.value))
        case wire.DeniedOutput():
            return _texts(output.reason or DENIED)
        case wire.ContentOutput():
            parts: list[Part] = []
            for i, part in enumerate(output.value):
                if isinstance(part, wire.TextPart):
                    parts.append(Text(part.text))
                elif not isinstance(part, wire.CustomPart):
                    parts.append(_file(f"{place}.value[{i}]", part))
            return tuple(parts)


def _check_names(turns: Sequence[Turn]) -> None:
    """Refuse a result whose tool is not the one that was called. turns: arranged."""
    names: dict[str | None, str] = {}
    for turn in turns:
        if turn.role != "tool":
            names = {call.id: call.name for call in turn.calls}
        elif turn.tool_name != names[turn.call_id]:
            raise RequestError(
                f"the result of {turn.call_id!r:.100} is of the tool {turn.tool_name!r:.100}, "
                f"its call of {names[turn.call_id]!r:.100}",
                place="prompt",
            )
