"""OpenAI's Chat Completions, and the list of models: parse, render, stream. Knows no engine and no other dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from headrace.serve import images, tool_names
from headrace.serve.dialect import Context, Exchange, Generate, Tell, one_line, served_name, sse
from headrace.serve.dialects.openai_chat_wire import (
    AnyMessage,
    AssistantMessage,
    BySchema,
    Call,
    ChatBody,
    FunctionTool,
    ImagePart,
    NamedChoice,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
)
from headrace.serve.events import (
    CallDelta,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    Reason,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Usage,
)
from headrace.serve.failure import RequestError, at, located
from headrace.serve.history import arranged, joined, with_instructions
from headrace.serve.request import (
    Effort,
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

THINK_EFFORT: Effort = "medium"  # of `think: true` alone
NO_PARAMETERS = {"type": "object", "properties": {}}
REASONS: dict[Reason, str] = {
    "stop": "stop",
    "stop_sequence": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "context": "length",
}


class ChatExchange(Exchange):
    """One chat completion. id, created and model are the same in every chunk of a stream."""

    def __init__(self, request: Request, body: ChatBody, context: Context) -> None:
        super().__init__(request, stream=bool(body.stream))
        options = body.stream_options
        self._tells_usage = options is not None and bool(options.include_usage)
        self._head: Json = {
            "id": f"chatcmpl-{context.id}",
            "created": int(context.now),
            "model": request.model,
            "system_fingerprint": f"fp_{context.card.digest[:16]}",
        }

    def whole(self, reply: Reply) -> Json:
        message: Json = {
            "role": "assistant",
            "content": reply.text if reply.text or not reply.calls else None,
            "refusal": None,
        }
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [
                _call(call.id, call.name, call.arguments) for call in reply.calls
            ]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": REASONS[reply.reason],
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(reply.usage),
        }

    def push(self, event: Event) -> Iterator[bytes]:
        match event:
            case Started():
                yield self._delta({"role": "assistant", "content": ""})
            case ReasoningDelta(text):
                yield self._delta({"reasoning_content": text})
            case TextDelta(text):
                yield self._delta({"content": text})
            case CallStarted(index, call_id, name):
                yield self._delta({"tool_calls": [{"index": index, **_call(call_id, name, "")}]})
            case CallDelta(index, fragment):
                piece = {"index": index, "function": {"arguments": fragment}}
                yield self._delta({"tool_calls": [piece]})
            case Finished(reason, usage):
                yield from self._end(reason, usage)
            case Failed(failure):
                yield _frame(error(failure))
            case _:
                pass

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def _end(self, reason: Reason, usage: Usage) -> Iterator[bytes]:
        yield self._delta({}, REASONS[reason])
        if self._tells_usage:
            yield self._chunk(choices=[], usage=_usage(usage))
        yield sse("[DONE]")

    def _delta(self, delta: Json, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._chunk(choices=[choice])

    def _chunk(self, **fields: object) -> bytes:
        return _frame({**self._head, "object": "chat.completion.chunk", **fields})


def opened(body: ChatBody, context: Context) -> ChatExchange:
    """What a body asks for. Raises RequestError."""
    card = context.card
    model = served_name(body.model, card)
    tools = _tools(body.tools or ())
    request = Request(
        model=model,
        turns=_turns(body.messages),
        tools=tools,
        choice=_choice(body, tools),
        parallel_calls=body.parallel_tool_calls is not False,
        answer=_format(body),
        effort=_effort(body),
        sampling=Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            seed=body.seed,
        ),
        limit=_limit(body),
        stop=_stop(body),
        window=_window(body, card.context_window),
    )
    return ChatExchange(request, body, context)


def error(failure: Failure) -> Json:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if failure.status < 500 else "server_error"
    place = located(failure, prompt="messages", answer="response_format")
    return {"error": {"message": failure.text, "type": kind, "param": place, "code": failure.code}}


def models(_body: None, context: Context) -> Json:
    """Every name that a request may give: what OpenAI's clients read, and what Anthropic's do."""
    names = context.card.names
    return {
        "object": "list",
        "data": [_model(name, context) for name in names],
        "has_more": False,
        "first_id": names[0],
        "last_id": names[-1],
    }


def model(_body: None, context: Context) -> Json:
    """One of them. Raises UnknownNameError."""
    return _model(served_name(context.path["name"], context.card, status=404), context)


def _model(name: str, context: Context) -> Json:
    card = context.card
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "headrace",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card.context_window,
        "max_tokens": card.default_limit,
        "context_window": card.context_window,
        "max_output_tokens": card.default_limit,
        "input_modalities": ["text", "image"] if card.vision else ["text"],
        "context_policy": card.context_policy,
    }


def _turns(messages: Sequence[AnyMessage]) -> tuple[Turn, ...]:
    # Results are paired before neighbours are joined: the very next messages have to answer a call.
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return joined(arranged(with_instructions(turns), "messages"))


def _turn(message: AnyMessage, place: str) -> Turn:
    parts = _parts(message.content, f"{place}.content")
    match message:
        case SystemMessage():
            return Turn("system", parts)
        case AssistantMessage():
            said = (Text(message.refusal),) if message.refusal else ()
            calls = tuple(
                _called(call, f"{place}.tool_calls[{i}]")
                for i, call in enumerate(message.tool_calls or ())
            )
            content, old = message.reasoning_content, message.reasoning
            reasoning = old if content is None else content
            return Turn("assistant", parts + said, reasoning or "", calls)
        case ToolMessage():
            return Turn("tool", parts, call_id=message.tool_call_id, tool_name=message.name)
        case _:
            return Turn("user", parts)


def _parts(
    content: Sequence[TextPart | ImagePart | RefusalPart] | str | None, place: str
) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (Text(content),) if content else ()
    return tuple(_part(part, f"{place}[{i}]") for i, part in enumerate(content or ()))


def _part(part: TextPart | ImagePart | RefusalPart, place: str) -> Part:
    match part:
        case TextPart():
            return Text(part.text)
        case RefusalPart():
            return Text(part.refusal)
        case ImagePart():
            with at(f"{place}.image_url.url"):
                return images.data_url(part.image_url.url)


def _called(call: Call, place: str) -> ToolCall:
    """A call of the history; one without arguments may have them empty."""
    arguments = call.function.arguments.strip() or "{}"
    try:
        whole = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise RequestError(
            f"{place}.function.arguments is not a JSON object",
            place=f"{place}.function.arguments",
            hint="a call that was cut must not be sent back",
        )
    return ToolCall(call.id, call.function.name, arguments)


def _tools(tools: Sequence[FunctionTool]) -> tuple[Tool, ...]:
    tool_names.check_unique(
        (f"tools[{i}].function.name", tool.function.name) for i, tool in enumerate(tools)
    )
    return tuple(
        Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=tool.function.parameters or NO_PARAMETERS,
            strict=bool(tool.function.strict),
        )
        for tool in tools
    )


def _choice(body: ChatBody, tools: Sequence[Tool]) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, NamedChoice):
        return tool_names.named(choice.function.name, tools, "tool_choice.function.name")
    if choice == "required":
        return tool_names.required(tools, "tool_choice")
    return ToolChoice(choice or "auto")


def _format(body: ChatBody) -> Format:
    match body.response_format:
        case None:
            return Format()
        case BySchema(json_schema=wanted):
            schema = wanted.schema_
            return Format("json") if schema is None else Format("schema", schema)
        case other:
            return Format("json" if other.type == "json_object" else "text")


def _effort(body: ChatBody) -> Effort | None:
    effort, think = body.reasoning_effort, body.think
    if effort is None:
        return THINK_EFFORT if think else None
    reasons = effort not in ("none", "minimal")
    if think is not None and think != reasons:
        raise RequestError(
            f"think is {json.dumps(think)}, but reasoning_effort is {effort!r}", place="think"
        )
    return None if effort == "none" or effort == "minimal" else effort


def _limit(body: ChatBody) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            "max_tokens and max_completion_tokens are two names of one limit, and differ",
            place="max_tokens",
        )
    return old if new is None else new


def _stop(body: ChatBody) -> tuple[str, ...]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return tuple(text for text in stop if text)


def _window(body: ChatBody, served: int) -> int | None:
    window = None if body.options is None else body.options.num_ctx
    if window is not None and window > served:
        raise RequestError(
            f"options.num_ctx is {window}, the server's window is {served}",
            place="options.num_ctx",
        )
    return window


def _call(call_id: str, name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{call_id}", "type": "function", "function": function}


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.new_tokens,
        "total_tokens": usage.prompt_tokens + usage.new_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _frame(body: Json) -> bytes:
    return sse(one_line(body))


ENDPOINTS = (
    Generate("/v1/chat/completions", ChatBody, opened),
    Tell("GET", "/v1/models", models),
    Tell("GET", "/v1/models/{name:path}", model),
)
