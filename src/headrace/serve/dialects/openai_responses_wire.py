"""The wire of OpenAI's Responses API: what a body of `POST /v1/responses` may hold, and the objects of a response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag
from pydantic_core import CoreSchema, core_schema

from headrace.serve.dialect import Context
from headrace.serve.events import Usage
from headrace.serve.request import Json
from headrace.serve.validation import Offered, Only, OpenWire, Wire, not_offered

Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Refused:
    """A field that only null, false or nothing may stand in, with the reason."""

    why: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Json:
        return {**handler(schema), "description": f"Refused: {self.why}."}

    def _check(self, value: object) -> object:
        if value is None or value is False or value == "":
            return None
        raise not_offered(f"not supported: {self.why}")


def _by_type(tags: Mapping[str, str], otherwise: Callable[[Json], str | None]) -> Discriminator:
    """Choose a union's branch by `type`. tags: of every type, the name of its class."""

    def tag(value: Any) -> str | None:
        if not isinstance(value, dict):
            return type(value).__name__ if isinstance(value, Wire) else None
        kind = value.get("type")
        return otherwise(value) if kind is None else tags.get(kind if isinstance(kind, str) else "")

    known = ", ".join(sorted(tags))
    return Discriminator(
        tag,
        custom_error_type="unsupported_type",
        custom_error_message=f"an object with a type that is supported is expected: {known}",
    )


def _nothing(_value: Json) -> None:
    return None


UNUSED = Field(None, description="No effect.")
ECHOED = Field(None, description="No effect; the response repeats it.")
STORED = "no response is stored, so a request carries its whole conversation as input"
SEALED = "content that another provider encrypted cannot be read"


class TextPart(Wire):
    """Some text of a message or of a tool's result."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = UNUSED
    logprobs: list[Any] | None = UNUSED
    parsed: Any = UNUSED
    prompt_cache_breakpoint: Any = UNUSED


class RefusalPart(Wire):
    """What a model said in place of an answer; read as text."""

    type: Literal["refusal"]
    refusal: str


class ImagePart(Wire):
    """A picture, inline."""

    type: Literal["input_image"]
    image_url: str | None = Field(None, description="A data: URL; others are refused.")
    detail: str | None = UNUSED
    file_id: Annotated[None, Refused("no file is stored; send a data: URL")] = None
    prompt_cache_breakpoint: Any = UNUSED


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")]
    | Annotated[RefusalPart, Tag("RefusalPart")]
    | Annotated[ImagePart, Tag("ImagePart")],
    _by_type(
        {
            "input_text": "TextPart",
            "output_text": "TextPart",
            "text": "TextPart",
            "refusal": "RefusalPart",
            "input_image": "ImagePart",
        },
        _nothing,
    ),
]


class Thought(Wire):
    """Some text of a reasoning item."""

    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class _Item(Wire):
    # What the API and clients write beside an item, and the model has no use for.
    id: str | None = UNUSED
    status: str | None = UNUSED
    caller: Any = UNUSED
    created_by: Any = UNUSED
    agent: Any = UNUSED
    async_: bool | None = Field(None, alias="async", description="No effect.")
    internal_chat_message_metadata_passthrough: Any = UNUSED


class Message(_Item):
    """What somebody said."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    phase: str | None = UNUSED
    end_turn: bool | None = UNUSED


class Reasoning(_Item):
    """What the model thought before what it said."""

    type: Literal["reasoning"]
    summary: list[Thought] | None = None
    content: list[Thought] | None = None
    encrypted_content: Annotated[None, Refused(SEALED)] = None


class FunctionCall(_Item):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="A JSON object as text.")
    namespace: str | None = None
    parsed_arguments: Any = UNUSED


class CustomCall(_Item):
    """A call of a freeform tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CallOutput(_Item):
    """What a tool answered."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[Part]
    name: str | None = UNUSED
    namespace: str | None = UNUSED


class ShellCall(_Item):
    """A call of a hosted shell, in the history of another model."""

    type: Literal["local_shell_call"]
    call_id: str
    action: Json


class ShellOutput(_Item):
    """What a hosted shell answered."""

    type: Literal["local_shell_call_output"]
    id: str | None = Field(None, description="Of the call.")
    output: str


HostedCallKind = Literal[
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "tool_search_call",
    "tool_search_output",
]


class HostedCall(OpenWire):
    """What another provider's own tools did; nothing that a model could read is in it."""

    type: HostedCallKind


class FunctionTool(Wire):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Json | None = Field(None, description="A JSON Schema of an object.")
    strict: bool | None = Field(None, description="Arguments follow the schema exactly.")
    defer_loading: bool | None = UNUSED
    allowed_callers: list[str] | None = UNUSED
    output_schema: Any = UNUSED
    async_: bool | None = Field(None, alias="async", description="No effect.")


class Grammar(Wire):
    """What the input of a freeform tool looks like. The model reads it; it is not enforced."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Wire):
    """A freeform tool: one text is its input."""

    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: Grammar | None = None
    defer_loading: bool | None = UNUSED
    allowed_callers: list[str] | None = UNUSED
    async_: bool | None = Field(None, alias="async", description="No effect.")


HostedToolKind = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "local_shell",
    "image_generation",
    "tool_search",
]


class HostedTool(OpenWire):
    """A tool that a provider would run itself; the model does not get to know of it."""

    type: HostedToolKind


_MEMBERS = {
    "function": "FunctionTool",
    "custom": "CustomTool",
    **dict.fromkeys(get_args(HostedToolKind), "HostedTool"),
}
Member = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[HostedTool, Tag("HostedTool")],
    _by_type(_MEMBERS, _nothing),
]


class NamespaceTool(Wire):
    """Tools under one name; a member is called `namespace.name`."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = None
    tools: list[Member]


ToolWire = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[NamespaceTool, Tag("NamespaceTool")]
    | Annotated[HostedTool, Tag("HostedTool")],
    _by_type(_MEMBERS | {"namespace": "NamespaceTool"}, _nothing),
]


class AdditionalTools(_Item):
    """Tools that a client declares in the midst of its input."""

    type: Literal["additional_tools"]
    role: str | None = None
    tools: list[ToolWire]


Item = Annotated[
    Annotated[Message, Tag("Message")]
    | Annotated[Reasoning, Tag("Reasoning")]
    | Annotated[FunctionCall, Tag("FunctionCall")]
    | Annotated[CustomCall, Tag("CustomCall")]
    | Annotated[CallOutput, Tag("CallOutput")]
    | Annotated[ShellCall, Tag("ShellCall")]
    | Annotated[ShellOutput, Tag("ShellOutput")]
    | Annotated[HostedCall, Tag("HostedCall")]
    | Annotated[AdditionalTools, Tag("AdditionalTools")],
    _by_type(
        {
            "message": "Message",
            "reasoning": "Reasoning",
            "function_call": "FunctionCall",
            "custom_tool_call": "CustomCall",
            "function_call_output": "CallOutput",
            "custom_tool_call_output": "CallOutput",
            "local_shell_call": "ShellCall",
            "local_shell_call_output": "ShellOutput",
            "additional_tools": "AdditionalTools",
            **dict.fromkeys(get_args(HostedCallKind), "HostedCall"),
        },
        lambda value: "Message" if "role" in value else None,
    ),
]


class NamedChoice(Wire):
    """The one tool that has to be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class Thinking(Wire):
    """Whether to reason."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = ECHOED
    generate_summary: Literal["auto", "concise", "detailed"] | None = UNUSED
    context: str | None = UNUSED


class PlainFormat(Wire):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Wire):
    """JSON that a schema allows; enforced."""

    type: Literal["json_schema"]
    name: str = Field(description="No effect; the response repeats it.")
    schema_: Json = Field(alias="schema")
    description: str | None = ECHOED
    strict: bool | None = Field(
        None, description="No effect: the answer follows the schema in either case."
    )


class TextOptions(Wire):
    """What the answer has to be."""

    format: (
        Annotated[
            Annotated[PlainFormat, Tag("PlainFormat")]
            | Annotated[SchemaFormat, Tag("SchemaFormat")],
            _by_type(
                {
                    "text": "PlainFormat",
                    "json_object": "PlainFormat",
                    "json_schema": "SchemaFormat",
                },
                _nothing,
            ),
        ]
        | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = ECHOED


class Body(Wire):
    """The body of `POST /v1/responses`."""

    model: str
    input: str | list[Item]
    instructions: str | None = None
    tools: list[ToolWire] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Thinking | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool | None = None
    # Nothing is stored, billed or moderated.
    store: bool | None = UNUSED
    include: list[str] | None = UNUSED
    metadata: dict[str, str] | None = ECHOED
    prompt_cache_key: str | None = UNUSED
    prompt_cache_retention: str | None = UNUSED
    prompt_cache_options: Json | None = UNUSED
    safety_identifier: str | None = UNUSED
    user: str | None = ECHOED
    service_tier: str | None = ECHOED
    stream_options: Json | None = UNUSED
    truncation: Annotated[Literal["disabled"] | None, Offered] = Field(
        None, description='Accepted where "disabled": what is too long is refused.'
    )
    client_metadata: Json | None = UNUSED
    access_programs: Any = UNUSED
    previous_response_id: Annotated[None, Refused(STORED)] = None
    conversation: Annotated[None, Refused(STORED)] = None
    background: Annotated[None, Refused("a response is made while its client waits")] = None
    prompt: Annotated[None, Refused("no prompt templates are stored")] = None
    context_management: (
        Annotated[list[Any], Only((), "the client decides what to leave out")] | None
    ) = None
    max_tool_calls: Annotated[None, Refused("the client runs the tools, and may count")] = None
    top_logprobs: Annotated[int, Only(0, "no probabilities are reported")] | None = None


# The objects of a response.

Status = Literal["in_progress", "completed", "incomplete", "failed"]
TextKind = Literal["reasoning", "message"]


def begun(body: Body, context: Context) -> Json:
    """The object of a response that has no output yet: what it says of its request."""
    sent = body.model_dump(
        mode="json", by_alias=True, exclude_unset=True, include={"tools", "tool_choice", "text"}
    )
    thinking, text = body.reasoning, body.text
    return {
        "id": f"resp_{context.id}",
        "object": "response",
        "created_at": int(context.now),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": None if thinking is None else thinking.effort,
            "summary": None if thinking is None else thinking.summary,
        },
        "service_tier": body.service_tier,
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}}
        | ({} if text is None else {k: v for k, v in sent["text"].items() if v is not None}),
        "tool_choice": sent.get("tool_choice") or "auto",
        "tools": sent.get("tools") or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def usage_of(usage: Usage) -> Json:
    """The tokens of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.new_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.new_tokens,
    }


def text_part(text: str) -> Json:
    """The one part of a message."""
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def text_item(kind: TextKind, item_id: str, text: str, status: Status) -> Json:
    """A message or reasoning item; one that has just begun has no parts yet."""
    item: Json = {"id": item_id, "type": kind, "status": status}
    if kind == "reasoning":
        parts = [{"type": "summary_text", "text": text}] if text else []
        return item | {"summary": parts, "encrypted_content": None}
    return item | {"role": "assistant", "content": [text_part(text)] if text else []}
