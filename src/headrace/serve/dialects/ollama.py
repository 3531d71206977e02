"""Ollama's API: `/api/chat`, `/api/generate`, and what its command line and SDKs ask about models.

Answers are lines of JSON, streamed unless the client says otherwise. Two rules beyond Ollama's documentation: `think`
as true is medium effort, and results of tools are matched by `tool_call_id` where calls had ids, else by `tool_name`,
else in order, because the Python SDK drops ids. Durations are prefill and decode; time in the queue is in neither.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.serve import tool_names
from headrace.serve.arguments import parsed
from headrace.serve.dialect import (
    LINES,
    Card,
    Context,
    Endpoint,
    Exchange,
    Generate,
    Tell,
    one_line,
    served_name,
)
from headrace.serve.dialects import ollama_models as models
from headrace.serve.dialects import ollama_wire as wire
from headrace.serve.events import (
    CallEnded,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    Reason,
    ReasoningDelta,
    Reply,
    TextDelta,
    Usage,
)
from headrace.serve.failure import RequestError, worded
from headrace.serve.history import arranged, joined, with_instructions
from headrace.serve.images import data_url, inline
from headrace.serve.request import (
    Effort,
    Format,
    Image,
    Json,
    Part,
    Request,
    Sampling,
    Text,
    ToolCall,
    Turn,
)
from headrace.values import Tool

DEFAULT_LIMIT = 512  # tokens of an answer without num_predict
UNSUPPORTED = "unsupported"

_LITERAL_KEYS = frozenset({"const", "default", "enum", "examples"})


def error(failure: Failure) -> Json:
    return {"error": worded(failure, answer="format")}


# --- what is asked


def _chat(body: wire.ChatBody, context: Context) -> Exchange | Json:
    model, effort = served_name(body.model, context.card), _effort(body.think, context.card)
    asked = _asked(body.options, context.card)
    if not body.messages:
        return {**_head(body.model, context), **_message(), "done": True, "done_reason": "load"}
    request = Request(
        model,
        arranged(joined(with_instructions(_turns(body.messages))), "messages"),
        tools=_tools(body.tools or ()),
        answer=_format(body.format),
        effort=effort,
        **asked,
    )
    return Lines(request, body.model, context, _message, stream=body.stream is not False)


def _generate(body: wire.GenerateBody, context: Context) -> Exchange | Json:
    model, effort = served_name(body.model, context.card), _effort(body.think, context.card)
    asked = _asked(body.options, context.card)
    prompt, images = body.prompt or "", body.images or ()
    if body.raw and (body.system or effort or images):
        raise RequestError("raw cannot be combined with system, think or images", place="raw")
    if not prompt and not images:
        return {**_head(body.model, context), **_response(), "done": True, "done_reason": "load"}
    asked.update(answer=_format(body.format), effort=effort)
    if body.raw:
        request = Request(model, raw=prompt, **asked)
    else:
        user = Turn("user", (*map(inline, images), Text(prompt)))
        request = Request(model, with_instructions([user], before=body.system or ""), **asked)
    return Lines(request, body.model, context, _response, stream=body.stream is not False)


def _effort(think: wire.Think | None, card: Card) -> Effort | None:
    if not think:
        return None
    if not card.reasoning:
        raise RequestError(f"{card.name!r} does not support thinking", place="think")
    return "medium" if think is True else think


def _format(shape: wire.Shape | None) -> Format:
    if isinstance(shape, dict):
        return Format("schema", shape)
    return Format("json") if shape else Format()


def _asked(options: wire.Options | None, card: Card) -> dict[str, Any]:
    """The fields of a Request that options set."""
    options = options or wire.Options()
    window = options.num_ctx
    if window is not None and window > card.context_window:
        raise RequestError(
            f"options.num_ctx is {window:,}; the server was started with a window of {card.context_window:,} tokens",
            place="options.num_ctx",
            hint="ask for less, or leave it out",
        )
    limit = DEFAULT_LIMIT if options.num_predict is None else options.num_predict
    stop = (options.stop,) if isinstance(options.stop, str) else options.stop or ()
    return {
        "sampling": Sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            presence_penalty=options.presence_penalty,
            repetition_penalty=options.repeat_penalty,
            seed=None if options.seed is None or options.seed < 0 else options.seed,
        ),
        "limit": limit if limit > 0 else window or card.context_window,
        "stop": tuple(text for text in stop if text),
        "window": window,
    }


def _tools(tools: Sequence[wire.ToolWire]) -> tuple[Tool, ...]:
    tool_names.check_unique(
        (f"tools[{i}].function.name", tool.function.name) for i, tool in enumerate(tools)
    )
    return tuple(
        Tool(
            tool.function.name,
            tool.function.description or "",
            _schema(tool.function.parameters or {}),
            strict=bool(tool.function.strict),
        )
        for tool in tools
    )


def _schema(node: Any) -> Any:
    """A schema whose unions of types are lists; the Python SDK writes them as "integer, string"."""
    if isinstance(node, list):
        return [_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: at if key in _LITERAL_KEYS else _schema(at) for key, at in node.items()}
    kind = out.get("type")
    if isinstance(kind, str) and "," in kind:
        out["type"] = sorted(part.strip() for part in kind.split(","))
    return out


# --- the conversation


def _turns(messages: Sequence[wire.MessageWire]) -> list[Turn]:
    turns: list[Turn] = []
    waiting = Waiting((), named=True)
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        _check(message, place)
        parts = _parts(message)
        if message.role == "tool":
            call = waiting.take(message, place)
            turns.append(Turn("tool", parts, call_id=call.id, tool_name=call.name))
            continue
        told = message.tool_calls or []
        calls = tuple(_call(call, f"call_{i}_{n}") for n, call in enumerate(told))
        waiting = Waiting(calls, named=all(call.id for call in told))
        turns.append(Turn(message.role, parts, message.thinking or "", calls))
    return turns


class Waiting:
    """Calls of one message that have no result yet. named: whether they came with ids."""

    def __init__(self, calls: Sequence[ToolCall], *, named: bool) -> None:
        self._calls = OrderedDict((call.id, call) for call in calls)
        self._of_name: dict[str, deque[str]] = {}
        for call in calls:
            self._of_name.setdefault(call.name, deque()).append(call.id)
        self._named = named

    def take(self, message: wire.MessageWire, place: str) -> ToolCall:
        """The call that a message of role "tool" answers. Raises RequestError where there is none."""
        if message.tool_call_id and self._named:
            said, found = "id", message.tool_call_id
        elif message.tool_name:
            said, found = "name", self._first(message.tool_name)
        else:
            said, found = "place", next(iter(self._calls), "")
        call = self._calls.pop(found, None)
        if call is None:
            raise RequestError(
                f"{place}: the tool result answers, by its {said}, no open call of the message before it",
                place=place,
            )
        return call

    def _first(self, name: str) -> str:
        ids = self._of_name.get(name, deque())
        while ids and ids[0] not in self._calls:
            ids.popleft()
        return ids[0] if ids else ""


def _check(message: wire.MessageWire, place: str) -> None:
    """Refuse what a message of its role has no use for."""
    role = message.role
    for field, roles in _OWNERS.items():
        if getattr(message, field) and role not in roles:
            raise RequestError(
                f"{place}.{field} is not for role {role!r}", place=f"{place}.{field}"
            )
    pictures = isinstance(message.content, list) and any(
        isinstance(part, wire.ImagePart) for part in message.content
    )
    if pictures and role not in _OWNERS["images"]:
        raise RequestError(f"{place}.content has an image, but is of role {role!r}", place=place)


_OWNERS = {
    "images": ("user", "tool"),
    "thinking": ("assistant",),
    "tool_calls": ("assistant",),
    "tool_name": ("tool",),
    "tool_call_id": ("tool",),
}


def _parts(message: wire.MessageWire) -> tuple[Part, ...]:
    """Pictures of `images` come before the text, as Ollama has them."""
    parts: list[Part] = [inline(text) for text in message.images or ()]
    if isinstance(message.content, str):
        parts += [Text(message.content)] if message.content else []
    else:
        parts += [
            _picture(part) if isinstance(part, wire.ImagePart) else Text(part.text)
            for part in message.content or ()
        ]
    return tuple(parts)


def _picture(part: wire.ImagePart) -> Image:
    return data_url(part.image_url if isinstance(part.image_url, str) else part.image_url.url)


def _call(call: wire.CallWire, made_id: str) -> ToolCall:
    try:
        arguments = json.dumps(call.function.arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise RequestError("the arguments of a tool call have a number out of range") from None
    return ToolCall(call.id or made_id, call.function.name, arguments)


# --- what is told


def _head(model: str, context: Context) -> Json:
    return {"model": model, "created_at": models.time_text(context.now)}


def _message(text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
    """/api/chat."""
    message: Json = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return {"message": message}


def _response(text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
    """/api/generate. It has no tools, so `calls` is empty."""
    return {"response": text, **({"thinking": thinking} if thinking else {})}


class Lines(Exchange):
    """A generation as lines of JSON. said: what a piece of the answer looks like on the endpoint."""

    media_type = LINES

    def __init__(
        self,
        request: Request,
        model: str,
        context: Context,
        said: Callable[..., Json],
        *,
        stream: bool,
    ) -> None:
        super().__init__(request, stream=stream)
        self._head = _head(model, context)
        self._said = said
        self._begun: CallStarted | None = None

    def whole(self, reply: Reply) -> Json:
        calls = [_told(i, call) for i, call in enumerate(reply.calls)]
        said = self._said(reply.text, reply.reasoning, calls)
        return {**self._head, **said, **_end(reply.reason, reply.usage)}

    def push(self, event: Event) -> Iterator[bytes]:
        match event:
            case TextDelta(text):
                yield self._line(self._said(text))
            case ReasoningDelta(text):
                yield self._line(self._said(thinking=text))
            case CallStarted():
                self._begun = event
            case CallEnded(index, arguments) if self._begun is not None:
                call = ToolCall(self._begun.id, self._begun.name, arguments)
                yield self._line(self._said(calls=[_told(index, call)]))
            case Finished(reason, usage):
                yield _bytes({**self._head, **self._said(), **_end(reason, usage)})
            case Failed(failure):
                yield _bytes(error(failure))
            case _:
                pass

    def keepalive(self) -> bytes:
        """A piece without text: clients parse every line, so an empty line would break them."""
        return self._line(self._said())

    def _line(self, said: Json) -> bytes:
        return _bytes({**self._head, **said, "done": False})


def _bytes(line: Json) -> bytes:
    return one_line(line).encode() + b"\n"


def _end(reason: Reason, usage: Usage) -> Json:
    prefill, decode = (round(s * 1e9) for s in (usage.prefill_seconds, usage.decode_seconds))
    return {
        "done": True,
        "done_reason": "length" if reason in ("length", "context") else "stop",
        "total_duration": prefill + decode,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": prefill,
        "eval_count": usage.new_tokens,
        "eval_duration": decode,
    }


def _told(index: int, call: ToolCall) -> Json:
    function = {"index": index, "name": call.name, "arguments": parsed(call.arguments)}
    return {"id": f"call_{call.id}", "function": function}


def _refusal(
    status: int, message: str, hint: str, code: str = UNSUPPORTED
) -> Callable[[None, Context], Json]:
    def refuse(_body: None, context: Context) -> Json:
        raise RequestError(message, status=status, code=code, hint=hint)

    return refuse


_EMBED = _refusal(400, "embeddings are not supported", "the served model generates text")
_PULL = "use headrace pull, then start the server with it"
_MANAGE = _refusal(501, "the server does not manage models", _PULL)
# HEAD asks whether a blob has to be sent; 200 would mean that it is there.
_NO_BLOB = _refusal(404, "the server has no blobs", _PULL, "not_found")

ENDPOINTS: tuple[Endpoint, ...] = (
    Generate("/api/chat", wire.ChatBody, _chat),
    Generate("/api/generate", wire.GenerateBody, _generate),
    Tell("GET", "/api/tags", models.tags),
    Tell("GET", "/api/ps", models.ps),
    Tell("POST", "/api/show", models.show, wire.ShowBody),
    Tell("GET", "/api/version", models.version),
    Tell("GET", "/", models.root),
    Tell("POST", "/api/embed", _EMBED),
    Tell("POST", "/api/embeddings", _EMBED),
    Tell("POST", "/api/pull", _MANAGE),
    Tell("POST", "/api/push", _MANAGE),
    Tell("POST", "/api/create", _MANAGE),
    Tell("POST", "/api/copy", _MANAGE),
    Tell("DELETE", "/api/delete", _MANAGE),
    Tell("POST", "/api/blobs/{digest}", _MANAGE),
    Tell("GET", "/api/blobs/{digest}", _NO_BLOB),
)
