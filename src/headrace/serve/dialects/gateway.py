"""The AI SDK gateway: language model calls of specification versions 2 to 4, over gateway protocol 0.0.1.

`@ai-sdk/gateway` speaks it, and fx, whose catalogue and credits are here too. Headers name the model, the version and
whether to stream; the body is `gateway_wire.Body`. Answers follow LanguageModelV4GenerateResult and
LanguageModelV4StreamPart, which differ from version 2 in usage and finish reason only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Literal, get_args

from headrace.serve import tool_names
from headrace.serve.arguments import readable
from headrace.serve.dialect import (
    Card,
    Context,
    Endpoint,
    Exchange,
    Generate,
    Tell,
    one_line,
    served_name,
    sse,
)
from headrace.serve.dialects import gateway_wire as wire
from headrace.serve.dialects.gateway_prompt import Reading
from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    Reasoning,
    ReasoningDelta,
    Reply,
    Said,
    Started,
    TextDelta,
    Usage,
)
from headrace.serve.failure import RequestError, located
from headrace.serve.request import (
    Effort,
    Format,
    Json,
    Request,
    Sampling,
    Text,
    ToolCall,
    ToolChoice,
)
from headrace.values import Tool

PROVIDER = "headrace"
PROTOCOL = "0.0.1"
VERSIONS = (2, 3, 4)
LEVELS: dict[str, Effort] = {level: level for level in get_args(Effort)}
UNIFIED = {
    "stop": "stop",
    "stop_sequence": "stop",
    "tool_calls": "tool-calls",
    "length": "length",
    "context": "length",
}
ERROR_TYPES = {
    401: "authentication_error",
    403: "forbidden",
    404: "not_found",
    429: "rate_limit_exceeded",
}


# Errors.


def error(failure: Failure) -> Json:
    """What the client makes its error classes of: by type, with the house's own code beside it."""
    return {"error": _error(failure)}


def _error(failure: Failure) -> Json:
    if failure.code == "model_not_found":
        kind = failure.code
    else:
        server = failure.status >= 500
        kind = ERROR_TYPES.get(
            failure.status, "internal_server_error" if server else "invalid_request_error"
        )
    place = located(failure, prompt="prompt", answer="responseFormat")
    return {"message": failure.text, "type": kind, "param": place, "code": failure.code}


# Headers.


@dataclass(frozen=True)
class Asked:
    """What the headers say."""

    model: str
    version: int
    stream: bool


def asked(context: Context) -> Asked:
    """Raises RequestError for a model, version or protocol that is not served."""
    headers = context.headers
    protocol = headers.get("ai-gateway-protocol-version", PROTOCOL)
    if protocol != PROTOCOL:
        raise _header("ai-gateway-protocol-version", f"{protocol!r:.60} is not {PROTOCOL}")
    version = headers.get("ai-language-model-specification-version", str(VERSIONS[-1]))
    if version not in map(str, VERSIONS):
        known = ", ".join(map(str, VERSIONS))
        raise _header(
            "ai-language-model-specification-version", f"{version!r:.60} is none of {known}"
        )
    streaming = headers.get("ai-language-model-streaming", "false")
    if streaming not in ("true", "false"):
        raise _header(
            "ai-language-model-streaming", f"{streaming!r:.60} is neither 'true' nor 'false'"
        )
    return Asked(_model(context), int(version), streaming == "true")


def _header(name: str, said: str) -> RequestError:
    return RequestError(f"the header {name}: {said}", place=name)


def _model(context: Context) -> str:
    name = context.headers.get("ai-language-model-id", "")
    if not name:
        raise RequestError("the header ai-language-model-id is missing", place="model")
    return served_name(name, context.card, prefix=f"{PROVIDER}/")


# The request.


def _tools(body: wire.Body, reading: Reading) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    places: list[str] = []
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, wire.ProviderTool):
            reading.warn(f"provider-defined tool {tool.id}"[:200], "tools of providers are removed")
            continue
        if tool.input_examples:
            reading.warn("inputExamples", "examples of a tool's input are not shown to the model")
        places.append(f"tools[{i}].name")
        tools.append(
            Tool(tool.name, tool.description or "", tool.input_schema, strict=tool.strict or False)
        )
    tool_names.check_unique(zip(places, (tool.name for tool in tools), strict=True))
    return tuple(tools)


def _choice(choice: wire.Choice | None, tools: Sequence[Tool]) -> ToolChoice:
    match choice:
        case None | wire.Choice(type="auto"):
            return ToolChoice()
        case wire.Choice(type="none"):
            return ToolChoice("none")
        case wire.Choice(type="tool", tool_name=None):
            place = "toolChoice.toolName"
            raise RequestError(f"{place} is missing", place=place)
        case wire.Choice(type="tool", tool_name=str(name)):
            return tool_names.named(name, tools, "toolChoice.toolName")
        case _:
            return tool_names.required(tools, "toolChoice")


def _format(wanted: wire.ResponseFormat | None) -> Format:
    if wanted is None or wanted.type == "text":
        return Format()
    return Format("json") if wanted.schema_ is None else Format("schema", wanted.schema_)


def _effort(body: wire.Body, own: wire.Own) -> Effort | None:
    said = {value for value in (body.reasoning, own.reasoning_effort) if value}
    said.discard("provider-default")
    if len(said) > 1:
        raise RequestError(
            f"reasoning is {body.reasoning!r}, and providerOptions.headrace.reasoningEffort "
            f"{own.reasoning_effort!r}",
            place="reasoning",
        )
    return LEVELS.get(said.pop()) if said else None


def _sampling(body: wire.Body, own: wire.Own) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=own.min_p,
        presence_penalty=body.presence_penalty,
        repetition_penalty=own.repetition_penalty,
        seed=body.seed,
    )


def _window(own: wire.Own, served: int) -> int | None:
    if own.num_ctx is not None and own.num_ctx > served:
        place = "providerOptions.headrace.numCtx"
        raise RequestError(
            f"{place} is {own.num_ctx}, the server's window is {served}", place=place
        )
    return own.num_ctx


def opened(body: wire.Body, context: Context) -> Exchange:
    """The exchange of a call. Raises RequestError."""
    head = asked(context)
    own = (body.provider_options and body.provider_options.headrace) or wire.Own()
    reading = Reading()
    turns = reading.conversation(body.prompt)
    tools = _tools(body, reading)
    effort = _effort(body, own)
    if effort is not None and not context.card.reasoning:
        reading.warn("reasoning", f"{context.card.name} does not reason")
    request = Request(
        head.model,
        turns,
        tools=tools,
        choice=_choice(body.tool_choice, tools),
        parallel_calls=own.parallel_tool_calls is not False,
        answer=_format(body.response_format),
        effort=effort,
        sampling=_sampling(body, own),
        limit=body.max_output_tokens,
        stop=tuple(body.stop_sequences or ()),
        window=_window(own, context.card.context_window),
    )
    return Call(request, head, context, reading.warnings)


# The answer.


class Call(Exchange):
    """One language model call."""

    def __init__(
        self, request: Request, head: Asked, context: Context, warnings: Sequence[Json]
    ) -> None:
        super().__init__(request, stream=head.stream)
        self._version = head.version
        self._warnings = list(warnings)
        self._metadata = {
            "id": f"gen_{context.id}",
            "timestamp": _timestamp(context.now),
            "modelId": f"{PROVIDER}/{head.model}",
        }
        self._block: tuple[str, str] | None = None  # what is open: its kind and id
        self._blocks = 0
        self._calls: dict[int, CallStarted] = {}

    def whole(self, reply: Reply) -> Json:
        return {
            "content": [_said(part) for part in reply.parts],
            **self._end(reply.reason, reply.usage),
            "warnings": self._warnings,
            "response": self._metadata,
        }

    def push(self, event: Event) -> Iterator[bytes]:
        yield from (_frame(part) for part in self._parts(event))
        if isinstance(event, Finished):
            yield sse("[DONE]")

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def _parts(self, event: Event) -> Iterator[Json]:
        match event:
            case Started():
                yield {"type": "stream-start", "warnings": self._warnings}
                yield {"type": "response-metadata", **self._metadata}
            case ReasoningDelta(text):
                yield from self._delta("reasoning", text)
            case TextDelta(text):
                yield from self._delta("text", text)
            case CallStarted(index, id, name):
                yield from self._closed()
                self._calls[index] = event
                yield {"type": "tool-input-start", "id": _call_id(id), "toolName": name}
            case CallDelta(index, fragment):
                id = self._calls[index].id
                yield {"type": "tool-input-delta", "id": _call_id(id), "delta": fragment}
            case CallEnded(index, arguments):
                begun = self._calls[index]
                yield {"type": "tool-input-end", "id": _call_id(begun.id)}
                yield _call(begun.id, begun.name, arguments)
            case Finished(reason, usage):
                yield from self._closed()
                yield {"type": "finish", **self._end(reason, usage)}
            case Failed(failure):
                yield {
                    "type": "error",
                    "error": {**_error(failure), "statusCode": failure.status},
                }

    def _delta(self, kind: Literal["reasoning", "text"], text: str) -> Iterator[Json]:
        if self._block is None or self._block[0] != kind:
            yield from self._closed()
            self._block = (kind, f"{kind}-{self._blocks}")
            self._blocks += 1
            yield {"type": f"{kind}-start", "id": self._block[1]}
        yield {"type": f"{kind}-delta", "id": self._block[1], "delta": text}

    def _closed(self) -> Iterator[Json]:
        if self._block is not None:
            kind, id = self._block
            self._block = None
            yield {"type": f"{kind}-end", "id": id}

    def _end(self, reason: str, usage: Usage) -> Json:
        if self._version == 2:
            return {"finishReason": UNIFIED[reason], "usage": _flat(usage)}
        return {
            "finishReason": {"unified": UNIFIED[reason], "raw": reason},
            "usage": _nested(usage),
        }


def _frame(part: Json) -> bytes:
    return sse(one_line(part))


def _timestamp(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _call_id(id: str) -> str:
    return f"call_{id}"


def _said(part: Said) -> Json:
    match part:
        case Reasoning(text):
            return {"type": "reasoning", "text": text}
        case Text(text):
            return {"type": "text", "text": text}
        case ToolCall(id, name, arguments):
            return _call(id, name, arguments)


def _call(id: str, name: str, arguments: str) -> Json:
    told = {"type": "tool-call", "toolCallId": _call_id(id), "toolName": name}
    return {**told, "input": readable(arguments)}  # the client parses it


def _nested(usage: Usage) -> Json:
    cached, reasoning = usage.cached_tokens, usage.reasoning_tokens
    return {
        "inputTokens": {
            "total": usage.prompt_tokens,
            "noCache": usage.prompt_tokens - cached,
            "cacheRead": cached,
        },
        "outputTokens": {
            "total": usage.new_tokens,
            "text": usage.new_tokens - reasoning,
            "reasoning": reasoning,
        },
    }


def _flat(usage: Usage) -> Json:
    return {
        "inputTokens": usage.prompt_tokens,
        "outputTokens": usage.new_tokens,
        "totalTokens": usage.prompt_tokens + usage.new_tokens,
        "reasoningTokens": usage.reasoning_tokens,
        "cachedInputTokens": usage.cached_tokens,
    }


# What is told without the model.


def _catalogue(_: None, context: Context) -> Json:
    """What fx reads. `max_tokens` is below the window, or fx would leave no room for an answer."""
    card = context.card
    entry = {
        "object": "model",
        "type": "language",
        "owned_by": PROVIDER,
        "released": card.created,
        "context_window": card.context_window,
        "max_tokens": card.default_limit,
        "tags": _tags(card),
        "pricing": _FREE,
        "context_policy": card.context_policy,
    }
    if card.reasoning:
        entry["reasoning_options"] = [{"type": "effort", "values": ["none", *LEVELS]}]
    data = [{"id": f"{PROVIDER}/{name}", "name": name, **entry} for name in card.names]
    return {"object": "list", "data": data}


_FREE = {"input": "0", "output": "0"}


def _tags(card: Card) -> list[str]:
    tags = {"tool-use": True, "reasoning": card.reasoning, "vision": card.vision}
    return ["implicit-caching", *(name for name, has in tags.items() if has)]


def _config(version: int, _: None, context: Context) -> Json:
    """What `getAvailableModels` reads."""
    return {"models": [_entry(version, name, context.card) for name in context.card.names]}


def _entry(version: int, name: str, card: Card) -> Json:
    id = f"{PROVIDER}/{name}"
    return {
        "id": id,
        "name": name,
        "description": f"{card.family}, served by headrace {card.version}".rstrip(),
        "pricing": _FREE,
        "specification": {
            "specificationVersion": f"v{version}",
            "provider": PROVIDER,
            "modelId": id,
        },
        "modelType": "language",
    }


def _credits(_: None, context: Context) -> Json:
    """Nothing is billed."""
    return {"balance": "0", "total_used": "0"}


def _routes() -> Iterator[Endpoint]:
    # Under v1, the client's version 2 lives.
    for path, version in (("/v4", 4), ("/v3", 3), ("/v1", 2)):
        yield Generate(f"{path}/ai/language-model", wire.Body, opened)
        yield Tell("GET", f"{path}/ai/config", partial(_config, version))
    yield Tell("GET", "/coding-agent/v1/models", _catalogue)
    yield Tell("GET", "/coding-agent/v1/credits", _credits)
    yield Tell("GET", "/v1/credits", _credits)


ENDPOINTS: tuple[Endpoint, ...] = tuple(_routes())
