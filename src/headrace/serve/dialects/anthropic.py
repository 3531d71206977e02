"""Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from headrace.serve import images, tool_names
from headrace.serve.arguments import parsed, readable
from headrace.serve.dialect import Context, Count, Counting, Exchange, Generate, served_name, sse
from headrace.serve.dialects import anthropic_wire as wire
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
from headrace.serve.failure import UNSUPPORTED_IMAGE, RequestError, worded
from headrace.serve.history import JOINT, arranged, joined, steady, with_instructions
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
    ToolChoice,
    Turn,
)
from headrace.values import Tool

# Clients look for these words to go on without a picture that a tool brought.
NO_PICTURE = "Could not process image: "
# Types of tools that the API runs itself, with the date of a version behind them.
HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_")
# Budgets of thinking below which an effort is enough, in tokens.
BUDGETS: tuple[tuple[int, Effort], ...] = ((4_096, "low"), (16_384, "medium"), (65_536, "high"))
STOPS = {
    "stop": "end_turn",
    "stop_sequence": "stop_sequence",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
}
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error(failure: Failure) -> Json:
    """The JSON of an error."""
    kind = ERRORS.get(failure.status)
    if kind is None:
        kind = "invalid_request_error" if failure.status < 500 else "api_error"
    told: Json = {"type": kind, "message": _told(failure)}
    if failure.code == wire.NO_THREADS:  # the client sends the whole conversation then
        told["details"] = {"error_code": failure.code}
    return {"type": "error", "error": told}


def _told(failure: Failure) -> str:
    if failure.code == UNSUPPORTED_IMAGE:
        return f"{NO_PICTURE}{failure.text}"
    if failure.context_tokens is None:
        return worded(failure, answer="output_config.format")
    # Clients look for these words to compact a conversation.
    if failure.prompt_tokens is None:
        size, most = f"more than {failure.context_tokens}", failure.context_tokens
    else:  # a prompt that fills the window leaves no room for an answer
        size = str(failure.prompt_tokens)
        most = min(failure.context_tokens, failure.prompt_tokens - 1)
    return f"prompt is too long: {size} tokens > {most} maximum"


def _open(body: wire.Body, context: Context) -> Messages:
    request = _request(body, context, limit=body.max_tokens)
    if request.turns[-1].role == "assistant":
        raise RequestError(
            "the conversation ends with an assistant message, and its answer cannot be prefilled",
            place="messages",
        )
    return Messages(request, body, context)


def _request(body: wire.Prompt, context: Context, *, limit: int | None = None) -> Request:
    model = served_name(body.model, context.card, status=404)
    body.check_served()
    tools, hosted = _tools(body.tools or ())
    choice = _choice(body.tool_choice, tools, hosted)
    single = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    asked = body.output_config or wire.OutputConfig()
    answer = asked.format or body.output_format
    return Request(
        model=model,
        turns=_conversation(body),
        tools=tools,
        choice=choice,
        parallel_calls=not single,
        answer=Format() if answer is None else Format("schema", answer.schema_),
        effort=_effort(body.thinking, asked.effort),
        sampling=Sampling(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        limit=limit,
        stop=tuple(body.stop_sequences or ()),
    )


def _effort(
    thinking: wire.Adaptive | wire.Enabled | wire.Disabled | None, effort: Effort | None
) -> Effort | None:
    match thinking:
        case wire.Adaptive():
            return effort or "high"
        case wire.Enabled(budget_tokens=budget):
            return next((enough for below, enough in BUDGETS if budget < below), "xhigh")
        case _:
            return None


def _tools(params: Iterable[wire.ToolParam]) -> tuple[tuple[Tool, ...], set[str]]:
    """The functions, and the names of the tools that only Anthropic can run."""
    tools: list[Tool] = []
    places: list[str] = []
    hosted: set[str] = set()
    for at, param in enumerate(params):
        place = f"tools[{at}]"
        kind = param.type or "custom"
        if kind == "mcp_toolset" or kind.startswith(HOSTED):
            hosted.add(param.name or kind)
            continue
        if kind != "custom":
            raise RequestError(
                f"{place}.type: {kind!r:.100} is not supported",
                code="unsupported_field",
                place=place,
            )
        if param.name is None or param.input_schema is None:
            missing = "name" if param.name is None else "input_schema"
            raise RequestError(f"{place}.{missing} is missing", place=f"{place}.{missing}")
        places.append(f"{place}.name")
        tools.append(
            Tool(param.name, param.description or "", param.input_schema, bool(param.strict))
        )
    tool_names.check_unique(zip(places, (tool.name for tool in tools), strict=True))
    return tuple(tools), hosted


def _choice(
    param: wire.ToolChoiceParam | None, tools: Sequence[Tool], hosted: set[str]
) -> ToolChoice:
    if param is None or param.type == "auto":
        return ToolChoice()
    if param.type == "none":
        return ToolChoice("none")
    if param.type == "any":
        return tool_names.required(tools, "tool_choice")
    place = "tool_choice.name"
    if param.name is None:
        raise RequestError(f"{place} is missing", place=place)
    if param.name in hosted and all(param.name != tool.name for tool in tools):
        why = f"{param.name!r:.100} runs on Anthropic's servers only"
        raise RequestError(f"{place}: {why}", place=place)
    return tool_names.named(param.name, tools, place)


def _conversation(body: wire.Prompt) -> tuple[Turn, ...]:
    """The turns, each with all messages of its role; what the assistant began last may stand at the end."""
    messages = body.messages
    head = 0
    while head < len(messages) and messages[head].role == "system":
        head += 1
    given = [body.system or "", *(message.content for message in messages[:head])]
    instructions = JOINT.join(text for content in given if (text := _plain(content)))
    turns: list[Turn] = []
    heard: list[wire.UserMessage | wire.SystemMessage] = []
    for message in messages[head:]:
        if isinstance(message, wire.AssistantMessage):
            turns += [*_heard(heard), _said(message)]
            heard = []
        else:
            heard.append(message)
    turns += _heard(heard)
    turns = list(joined(turns))
    # A count may stop behind what the assistant said; its calls have no results yet.
    last = turns[-1:] if turns and turns[-1].role == "assistant" else []
    before = turns[: len(turns) - len(last)]
    whole = (*(arranged(before, "messages") if before or not last else ()), *last)
    return with_instructions(whole, before=instructions)


def _plain(content: str | Sequence[Any]) -> str:
    """The text of instructions."""
    if isinstance(content, str):
        return steady(content)
    texts = [steady(block.text) for block in content if isinstance(block, wire.TextBlock)]
    return JOINT.join(filter(None, texts))


def _said(message: wire.AssistantMessage) -> Turn:
    if isinstance(message.content, str):
        return Turn("assistant", _texts([message.content], ""))
    texts, thoughts, calls = [], [], []
    for block in message.content:
        match block:
            case wire.TextBlock(text=text):
                texts.append(text)
            case wire.ThinkingBlock(thinking=thinking, signature=signature):
                held = wire.recalled(signature or "")
                thoughts.append(thinking if held is None else held)
            case wire.ToolUseBlock():
                calls.append(ToolCall(block.id, block.name, _arguments(block)))
            case _:
                pass
    # The model's own text was cut by what it called: nothing comes between its pieces.
    return Turn("assistant", _texts(texts, ""), JOINT.join(filter(None, thoughts)), tuple(calls))


def _arguments(block: wire.ToolUseBlock) -> str:
    try:
        return json.dumps(block.input, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise RequestError(f"the input of {block.id!r:.100} has a number out of range") from None


def _heard(messages: Sequence[wire.UserMessage | wire.SystemMessage]) -> list[Turn]:
    """What came between two answers: results first, whatever stood before them, then everything else as one turn."""
    results: list[Turn] = []
    parts: list[Part] = []
    for message in messages:
        content = message.content
        if not isinstance(content, str):
            blocks = [block for block in content if isinstance(block, wire.ToolResultBlock)]
            results += map(_result, blocks)
        parts += _inside(content)
    parts = list(_apart(parts))
    asked = any(isinstance(message, wire.UserMessage) for message in messages)
    return [*results, Turn("user", tuple(parts))] if parts or (asked and not results) else results


def _result(block: wire.ToolResultBlock) -> Turn:
    content = block.content or ""
    parts = list(_apart(_inside(content)))
    if block.is_error:
        said = "".join(part.text for part in parts[:1] if isinstance(part, Text))
        parts[: bool(said)] = [Text(f"Error: {said}" if said else "Error:")]
    return Turn("tool", tuple(parts), call_id=block.tool_use_id)


def _inside(content: str | Sequence[Any]) -> list[Part]:
    """What the model sees of text or blocks."""
    if isinstance(content, str):
        return [Text(content)]
    return [part for block in content for part in _parts(block)]


def _parts(block: Any) -> list[Part]:
    """What the model sees of a block."""
    match block:
        case wire.TextBlock(text=text):
            return [Text(text)]
        case wire.ImageBlock():
            return [_image(block)]
        case wire.DocumentBlock():
            return _document(block)
        case wire.SearchResultBlock():
            texts = [inner.text for inner in block.content]
            return [Text("\n".join([block.title, block.source, *texts]))]
        case wire.ToolReferenceBlock(tool_name=name):
            return [Text(f"Tool available: {name}")]
        case _:
            return []


def _image(block: wire.ImageBlock) -> Image:
    source = block.source
    if isinstance(source, wire.RemoteImage):
        raise RequestError(
            f"an image's source is {source.type!r}; only inline images are accepted",
            hint='send {"type": "base64", "media_type": ..., "data": ...}',
        )
    try:
        return images.inline(source.data, source.media_type)
    except RequestError as error:
        raise RequestError(f"{NO_PICTURE}{error.message}", hint=error.hint) from None


def _document(block: wire.DocumentBlock) -> list[Part]:
    source = block.source
    named = "" if block.title is None else f" {block.title!r}"
    if isinstance(source, wire.UnreadSource):
        note = "it is not plain text" if source.type == "base64" else "it is not inline"
        return [Text(f"[The document{named} cannot be seen: {note}.]")]
    head: list[Part] = [Text(text) for text in (block.title, block.context) if text]
    return head + _inside(source.data if isinstance(source, wire.PlainSource) else source.content)


def _apart(parts: Iterable[Part]) -> Iterator[Part]:
    """Neighbouring texts as one, with an empty line between them."""
    for is_text, run in groupby(parts, key=lambda part: isinstance(part, Text)):
        if is_text:
            yield from _texts([part.text for part in run if isinstance(part, Text)], JOINT)
        else:
            yield from run


def _texts(texts: Iterable[str], between: str) -> tuple[Text, ...]:
    text = between.join(filter(None, texts))
    return (Text(text),) if text else ()


class Messages(Exchange):
    """One message: a list of blocks, of which at most one is open."""

    def __init__(self, request: Request, body: wire.Body, context: Context) -> None:
        super().__init__(request, stream=bool(body.stream))
        self.ignored = _ignored(body)
        self._id = f"msg_{context.id}"
        self._omitted = getattr(body.thinking, "display", None) == "omitted"
        self._eager = {tool.name for tool in body.tools or () if tool.eager_input_streaming}
        self._index = -1  # of the last block that was started; never used again
        self._block: str | None = None  # the type of the open one
        self._thought: list[str] = []  # of the open block
        self._call: CallStarted | None = None
        self._ended = False

    def whole(self, reply: Reply) -> Json:
        message = self._message([*map(self._said, reply.parts)], _usage(reply.usage))
        return {**message, "stop_reason": STOPS[reply.reason], "stop_sequence": reply.stop}

    def _said(self, part: Said) -> Json:
        match part:
            case Reasoning(text):
                return _thinking("" if self._omitted else text, text)
            case Text(text):
                return {"type": "text", "text": text}
            case ToolCall(call_id, name, arguments):
                return _tool_use(call_id, name, parsed(arguments))

    def push(self, event: Event) -> Iterator[bytes]:
        if self._ended:
            return
        match event:
            case Started(prompt_tokens, cached_tokens):
                usage = _usage(Usage(prompt_tokens, cached_tokens))
                yield _frame("message_start", message=self._message([], usage))
                yield _frame("ping")
            case ReasoningDelta(text):
                yield from self._begin("thinking", {"thinking": "", "signature": ""})
                self._thought.append(text)
                if not self._omitted:
                    yield self._delta("thinking_delta", thinking=text)
            case TextDelta(text):
                yield from self._begin("text", {"text": ""})
                yield self._delta("text_delta", text=text)
            case CallStarted() | CallDelta() | CallEnded():
                yield from self._called(event)
            case Finished(reason, usage, stop):
                self._ended = True
                yield from self._close()
                delta = {"stop_reason": STOPS[reason], "stop_sequence": stop}
                yield _frame("message_delta", delta=delta, usage=_usage(usage))
                yield _frame("message_stop")
            case Failed(failure):
                self._ended = True
                yield _frame("error", **error(failure))

    def keepalive(self) -> bytes:
        if self._block == "thinking" and self._omitted:
            return self._delta("thinking_delta", thinking="")
        return _frame("ping")

    def _called(self, event: CallStarted | CallDelta | CallEnded) -> Iterator[bytes]:
        """A call is told when it is complete, so that none is run that was cut; sooner for a tool that says so."""
        match event:
            case CallStarted():
                yield from self._close()
                self._call = event
                if event.name in self._eager:
                    yield from self._begin_call(event)
            case CallDelta(fragment=fragment):
                if self._block == "tool_use":
                    yield self._delta("input_json_delta", partial_json=fragment)
            case CallEnded(arguments=arguments):
                if self._block != "tool_use" and self._call is not None:
                    yield from self._begin_call(self._call)
                    yield self._delta("input_json_delta", partial_json=readable(arguments))
                yield from self._close()

    def _begin_call(self, call: CallStarted) -> Iterator[bytes]:
        yield from self._begin("tool_use", _tool_use(call.id, call.name, {}))

    def _begin(self, kind: str, empty: Json) -> Iterator[bytes]:
        """Start a block of a kind, unless one is open."""
        if self._block == kind:
            return
        yield from self._close()
        self._block = kind
        self._index += 1
        block = {"type": kind} | empty
        yield _frame("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._block is None:
            return
        if self._block == "thinking":
            yield self._delta("signature_delta", signature=wire.signed("".join(self._thought)))
            self._thought = []
        self._block = None
        yield _frame("content_block_stop", index=self._index)

    def _delta(self, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return _frame("content_block_delta", index=self._index, delta=delta)

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _ignored(body: wire.Prompt) -> tuple[str, ...]:
    """Fields that nobody looks at."""
    return tuple(name for name, value in (body.model_extra or {}).items() if value is not None)


def _thinking(shown: str, reasoning: str) -> Json:
    return {"type": "thinking", "thinking": shown, "signature": wire.signed(reasoning)}


def _tool_use(call_id: str, name: str, given: Json) -> Json:
    return {"type": "tool_use", "id": f"toolu_{call_id}", "name": name, "input": given}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.new_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _frame(kind: str, **fields: Any) -> bytes:
    data = {"type": kind, **fields}
    return sse(json.dumps(data, ensure_ascii=False, separators=(",", ":")), kind)


def _count(body: wire.Prompt, context: Context) -> Counting:
    return Counting(_request(body, context), _ignored(body))


def _counted(tokens: int) -> Json:
    return {"input_tokens": tokens}


ENDPOINTS = (
    Generate("/v1/messages", wire.Body, _open),
    Count("/v1/messages/count_tokens", wire.Prompt, _count, _counted),
)
