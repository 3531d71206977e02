"""OpenAI's Responses API, which Codex uses. Nothing is stored, so GET and DELETE of a response find nothing.

A conversation is a list of items, and so is an answer. Freeform ("custom") tools are functions of one string, `input`;
members of a namespace are functions called `namespace.name`. Both are taken apart again on the way out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.serve import images, tool_names
from headrace.serve.dialect import Context, Exchange, Generate, Tell, served_name, sse
from headrace.serve.dialects import openai_responses_wire as wire
from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    Reason,
    Reasoning,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Usage,
)
from headrace.serve.failure import RequestError, at, located
from headrace.serve.history import JOINT, arranged, joined, with_instructions
from headrace.serve.request import (
    Format,
    Json,
    Part,
    Request,
    Sampling,
    Text,
    ToolCall,
    ToolChoice,
    Turn,
)
from headrace.values import Tool

NO_PARAMETERS: Json = {"type": "object", "properties": {}}
FREEFORM: Json = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The whole input of the tool, as plain text."}
    },
    "required": ["input"],
    "additionalProperties": False,
}


def error(failure: Failure) -> Json:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if failure.status < 500 else "server_error"
    place = located(failure, prompt="input", answer="text.format")
    return {"error": {"message": failure.text, "type": kind, "param": place, "code": failure.code}}


# What the model may call.


@dataclass(frozen=True)
class Declared:
    """A tool as the model sees it, and as the client named it."""

    tool: Tool
    name: str
    namespace: str | None = None
    freeform: bool = False


def _full(name: str, namespace: str | None) -> str:
    """What the model calls a tool."""
    return f"{namespace}.{name}" if namespace else name


def _declared(
    tool: wire.FunctionTool | wire.CustomTool, space: wire.NamespaceTool | None
) -> Declared:
    namespace = None if space is None else space.name
    name, about = _full(tool.name, namespace), tool.description or ""
    if isinstance(tool, wire.FunctionTool):
        function = Tool(name, about, tool.parameters or NO_PARAMETERS, tool.strict or False)
        return Declared(function, tool.name, namespace)
    if tool.format is not None and tool.format.definition:
        about += f"{JOINT}Grammar of the input ({tool.format.syntax}):\n{tool.format.definition}"
    return Declared(Tool(name, about, FREEFORM, strict=True), tool.name, namespace, freeform=True)


def _all_declared(tools: Iterable[wire.ToolWire], place: str) -> Iterator[tuple[str, Declared]]:
    """Each with the place of its name. place: of the list."""
    for i, tool in enumerate(tools):
        if isinstance(tool, wire.NamespaceTool):
            about = tool.description or ""  # of all members; in front of the first
            for j, member in enumerate(tool.tools):
                if not isinstance(member, wire.HostedTool):
                    made = _declared(member, tool)
                    said = JOINT.join(filter(None, (about, made.tool.description)))
                    made = replace(made, tool=replace(made.tool, description=said))
                    yield f"{place}[{i}].tools[{j}].name", made
                    about = ""
        elif not isinstance(tool, wire.HostedTool):
            yield f"{place}[{i}].name", _declared(tool, None)


def _tools(body: wire.Body) -> dict[str, Declared]:
    """By the names that the model calls. Raises RequestError for a name that occurs twice."""
    found = list(_all_declared(body.tools or [], "tools"))
    for i, item in enumerate(body.input if isinstance(body.input, list) else []):
        if isinstance(item, wire.AdditionalTools):
            found += _all_declared(item.tools, f"input[{i}].tools")
    tool_names.check_unique((place, made.tool.name) for place, made in found)
    return {made.tool.name: made for _, made in found}


def _ignored(body: wire.Body) -> tuple[str, ...]:
    """Hosted tools, which the model does not get to know of."""
    return tuple(
        f"tools[{i}]"
        for i, tool in enumerate(body.tools or [])
        if isinstance(tool, wire.HostedTool)
    )


def _choice(body: wire.Body, tools: Sequence[Tool]) -> ToolChoice:
    chosen = body.tool_choice
    if chosen is None:
        return ToolChoice()
    if isinstance(chosen, wire.NamedChoice):
        return tool_names.named(_full(chosen.name, chosen.namespace), tools, "tool_choice.name")
    if chosen == "required":
        return tool_names.required(tools, "tool_choice")
    return ToolChoice(chosen)


# What was said.


def _parts(content: str | Sequence[wire.Part], place: str, *, pictures: bool) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (Text(content),) if content else ()
    out: list[Part] = []
    for i, part in enumerate(content):
        if isinstance(part, wire.ImagePart):
            if not pictures or part.image_url is None:
                why = "a data: URL is missing" if pictures else "only a user or a tool shows images"
                raise RequestError(f"{place}[{i}]: {why}", place=f"{place}[{i}]")
            with at(f"{place}[{i}].image_url"):
                out.append(images.data_url(part.image_url))
        elif text := part.refusal if isinstance(part, wire.RefusalPart) else part.text:
            out.append(Text(text))
    return tuple(out)


def _message(item: wire.Message, place: str) -> Turn:
    role: Literal["system", "user", "assistant"]
    role = "system" if item.role == "developer" else item.role
    turn = Turn(role, _parts(item.content, f"{place}.content", pictures=role == "user"))
    # Blanks between calls are no answer.
    return Turn(role) if role == "assistant" and not turn.text.strip() else turn


def _thought(item: wire.Reasoning) -> Turn:
    said = item.content or item.summary or []
    return Turn("assistant", reasoning=JOINT.join(thought.text for thought in said))


def _call(item: wire.FunctionCall | wire.CustomCall, place: str) -> Turn:
    if isinstance(item, wire.CustomCall):
        arguments = _json({"input": item.input})
    else:
        arguments = item.arguments.strip() or "{}"
        if _object(arguments) is None:
            where = f"{place}.arguments"
            raise RequestError(f"{where}: not a JSON object as text", place=where)
    call = ToolCall(item.call_id, _full(item.name, item.namespace), arguments)
    return Turn("assistant", calls=(call,))


def _turn(item: wire.Item, place: str) -> Turn | None:
    match item:
        case wire.Message():
            return _message(item, place)
        case wire.Reasoning():
            return _thought(item)
        case wire.FunctionCall() | wire.CustomCall():
            return _call(item, place)
        case wire.CallOutput():
            parts = _parts(item.output, f"{place}.output", pictures=True)
            return Turn("tool", parts, call_id=item.call_id)
        case wire.ShellCall():
            call = ToolCall(item.call_id, "local_shell", _json(item.action))
            return Turn("assistant", calls=(call,))
        case wire.ShellOutput():
            return Turn("tool", (Text(item.output),), call_id=item.id)
    return None


def _turns(body: wire.Body) -> tuple[Turn, ...]:
    if isinstance(body.input, str):
        turns = [Turn("user", (Text(body.input),))]
    else:
        made = (_turn(item, f"input[{i}]") for i, item in enumerate(body.input))
        turns = [turn for turn in made if turn is not None]
    if turns and all(turn.role == "system" for turn in turns):
        turns[-1] = replace(turns[-1], role="user")  # nobody else asks anything
    told = with_instructions(turns, before=body.instructions or "")
    if turns and told:
        return arranged(joined(told), "input")
    raise RequestError("input: the conversation is empty", place="input")


def _format(text: wire.TextOptions | None) -> Format:
    asked = None if text is None else text.format
    if isinstance(asked, wire.SchemaFormat):
        return Format("schema", asked.schema_)
    return Format("json" if asked is not None and asked.type == "json_object" else "text")


def _request(body: wire.Body, tools: dict[str, Declared]) -> Request:
    effort = None if body.reasoning is None else body.reasoning.effort
    callable_ = tuple(made.tool for made in tools.values())
    return Request(
        model=body.model,
        turns=_turns(body),
        tools=callable_,
        choice=_choice(body, callable_),
        parallel_calls=body.parallel_tool_calls is not False,
        answer=_format(body.text),
        effort=None if effort == "none" or effort == "minimal" else effort,
        sampling=Sampling(temperature=body.temperature, top_p=body.top_p),
        limit=body.max_output_tokens,
    )


# What is answered.


def _object(text: str) -> Json | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Response(Exchange):
    """One response: its output as it grows, and the events that tell of it."""

    def __init__(self, body: wire.Body, context: Context) -> None:
        self._tools = _tools(body)
        super().__init__(_request(body, self._tools), stream=body.stream or False)
        self.ignored = _ignored(body)
        self._id = context.id
        self._begun = wire.begun(body, context)
        self._number = 0  # of the next event
        self._output: list[Json] = []  # finished items
        self._open: wire.TextKind | None = None  # the item that grows, behind them
        self._pieces: list[str] = []
        self._calls: dict[int, CallStarted] = {}
        self._called = False

    # A whole response.

    def whole(self, reply: Reply) -> Json:
        """The response object that a stream ends with."""
        last = len(reply.parts) - 1
        for i, part in enumerate(reply.parts):
            if isinstance(part, ToolCall):
                self._output.append(self._call_item(part))
                continue
            # A limit cuts what grows when it comes; where that is a call, it is not told.
            cut = _cut(reply.reason) and i == last and not reply.call_cut
            status: wire.Status = "incomplete" if cut else "completed"
            kind: wire.TextKind = "reasoning" if isinstance(part, Reasoning) else "message"
            self._output.append(wire.text_item(kind, self._item_id(kind), part.text, status))
        return self._ended(_status(reply.reason, bool(reply.calls)), reply.usage)

    def _item_id(self, kind: wire.TextKind) -> str:
        prefix = "rs" if kind == "reasoning" else "msg"
        return f"{prefix}_{self._id}_{len(self._output)}"

    def _call_item(self, call: ToolCall) -> Json:
        made = self._tools.get(call.name)
        name = call.name if made is None else made.name
        freeform = made is not None and made.freeform
        item: Json = {
            "id": f"{'ctc' if freeform else 'fc'}_{call.id}",
            "type": "custom_tool_call" if freeform else "function_call",
            "status": "completed",
            "call_id": f"call_{call.id}",
            "name": name,
        }
        if made is not None and made.namespace is not None:
            item["namespace"] = made.namespace
        if not freeform:
            return item | {"arguments": call.arguments}
        text = (_object(call.arguments) or {}).get("input")
        return item | {"input": text if isinstance(text, str) else call.arguments}

    def _ended(self, status: wire.Status, usage: Usage) -> Json:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._begun | {
            "status": status,
            "output": list(self._output),
            "incomplete_details": cut,
            "usage": wire.usage_of(usage),
        }

    # A streamed one.

    def push(self, event: Event) -> Iterator[bytes]:
        match event:
            case Started():
                yield self._frame("response.created", response=self._begun)
                yield self._frame("response.in_progress", response=self._begun)
            case ReasoningDelta(text):
                yield from self._grow("reasoning", text)
            case TextDelta(text):
                yield from self._grow("message", text)
            case CallStarted(index=index):
                yield from self._close("completed")
                self._calls[index] = event
            case CallDelta():
                pass  # a call is told when it is complete, so a cut one never is
            case CallEnded(index, arguments):
                begun = self._calls[index]
                yield from self._call(ToolCall(begun.id, begun.name, arguments))
            case Finished(reason, usage):
                status = _status(reason, self._called)
                yield from self._close("incomplete" if _cut(reason) else "completed")
                yield self._frame(f"response.{status}", response=self._ended(status, usage))
            case Failed(failure):
                yield self._failed(failure)

    def keepalive(self) -> bytes:
        """An event, because Codex counts events and not bytes."""
        return self._frame("response.in_progress", response=self._begun)

    def _frame(self, name: str, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return sse(_json(data), name)

    def _grow(self, kind: wire.TextKind, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        self._pieces.append(text)
        place = self._place(kind)
        if kind == "reasoning":
            yield self._frame("response.reasoning_summary_text.delta", **place, delta=text)
        else:
            yield self._frame("response.output_text.delta", **place, delta=text, logprobs=[])

    def _place(self, kind: wire.TextKind) -> Json:
        """Of the open item's only part."""
        part = "summary_index" if kind == "reasoning" else "content_index"
        return {"item_id": self._item_id(kind), "output_index": len(self._output), part: 0}

    def _begin(self, kind: wire.TextKind) -> Iterator[bytes]:
        self._open = kind
        item = wire.text_item(kind, self._item_id(kind), "", "in_progress")
        place = self._place(kind)
        yield self._frame("response.output_item.added", output_index=len(self._output), item=item)
        if kind == "reasoning":
            part: Json = {"type": "summary_text", "text": ""}
            yield self._frame("response.reasoning_summary_part.added", **place, part=part)
        else:
            yield self._frame("response.content_part.added", **place, part=wire.text_part(""))

    def _close(self, status: wire.Status) -> Iterator[bytes]:
        if self._open is None:
            return
        kind, text, place = self._open, "".join(self._pieces), self._place(self._open)
        item = wire.text_item(kind, self._item_id(kind), text, status)
        if kind == "reasoning":
            part: Json = {"type": "summary_text", "text": text}
            yield self._frame("response.reasoning_summary_text.done", **place, text=text)
            yield self._frame("response.reasoning_summary_part.done", **place, part=part)
        else:
            yield self._frame("response.output_text.done", **place, text=text, logprobs=[])
            yield self._frame("response.content_part.done", **place, part=wire.text_part(text))
        yield self._item_done(item)
        self._open, self._pieces = None, []

    def _item_done(self, item: Json) -> bytes:
        index = len(self._output)
        self._output.append(item)
        return self._frame("response.output_item.done", output_index=index, item=item)

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        item = self._call_item(call)
        field, event = "arguments", "response.function_call_arguments"
        if item["type"] == "custom_tool_call":
            field, event = "input", "response.custom_tool_call_input"
        index, text = len(self._output), item[field]
        place = {"item_id": item["id"], "output_index": index}
        begun = item | {"status": "in_progress", field: ""}
        yield self._frame("response.output_item.added", output_index=index, item=begun)
        yield self._frame(f"{event}.delta", **place, delta=text)
        yield self._frame(f"{event}.done", **place, **{field: text})
        yield self._item_done(item)
        self._called = True

    def _failed(self, failure: Failure) -> bytes:
        output = list(self._output)
        if self._open is not None:
            item_id, text = self._item_id(self._open), "".join(self._pieces)
            output.append(wire.text_item(self._open, item_id, text, "incomplete"))
        why = {"code": failure.code, "message": failure.text}
        told = self._begun | {"status": "failed", "output": output, "error": why}
        return self._frame("response.failed", response=told)


def _status(reason: Reason, called: bool) -> wire.Status:
    """A cut answer is complete once a call in it is."""
    return "incomplete" if _cut(reason) and not called else "completed"


def _cut(reason: Reason) -> bool:
    """Whether a limit ended the answer."""
    return reason in ("length", "context")


def _open(body: wire.Body, context: Context) -> Exchange:
    model = served_name(body.model, context.card)
    return Response(body.model_copy(update={"model": model}), context)


def _absent(_body: None, context: Context) -> Json:
    raise RequestError(
        f"there is no response {context.path['id']!r:.100}: {wire.STORED}",
        status=404,
        code="not_found",
    )


ENDPOINTS = (
    Generate("/v1/responses", wire.Body, _open),
    Tell("GET", "/v1/responses/{id}", _absent),
    Tell("DELETE", "/v1/responses/{id}", _absent),
)
