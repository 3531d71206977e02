"""The body of a language model call as the AI SDK's gateway client sends it, specification versions 2 to 4.

Version 4 is LanguageModelV4CallOptions; what only 2 and 3 have (files as a string, `media` in results) is read too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic.alias_generators import to_camel

from headrace.serve.request import Json
from headrace.serve.validation import Only, OpenWire, Wire

NonEmpty = Annotated[str, Field(min_length=1)]
ProviderOptions = dict[str, dict[str, Any] | None]
Reasoning = Literal[
    "provider-default", "none", "minimal", "low", "medium", "high", "xhigh", "max"
]  # fmt: skip


class Camel(Wire):
    """A wire type whose fields are written in camel case."""

    model_config = ConfigDict(alias_generator=to_camel)


def _by(key: str, what: str) -> Discriminator:
    """Which of a union's types a value is of: its tag is the value of `key`, capitalised so that no place names it."""

    def tag(value: object) -> str | None:
        found = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        # A kind that comes capitalised is none.
        return _tag(found) if isinstance(found, str) and not found[:1].isupper() else None

    return Discriminator(
        tag,
        custom_error_type="unknown_kind",
        custom_error_message=f"{key} is missing, or names no {what} that is known here",
    )


def _tag(kind: str) -> str:
    return kind[:1].upper() + kind[1:]


def _is(kind: str) -> Tag:
    return Tag(_tag(kind))


class Optioned(Camel):
    """What may carry options of providers, which are not looked at."""

    provider_options: ProviderOptions | None = Field(default=None, description="No effect.")


class InlineData(Camel):
    type: Literal["data"]
    data: str = Field(description="Base64.")


class UrlData(Camel):
    type: Literal["url"]
    url: str = Field(description="A data: URL; others are refused.")
    original_url: str | None = Field(default=None, description="No effect.")


class ReferenceData(Camel):
    """A file that a provider keeps: refused."""

    type: Literal["reference"]
    reference: dict[str, Any]


class TextData(Camel):
    type: Literal["text"]
    text: str


FileData = Annotated[
    Annotated[InlineData, _is("data")]
    | Annotated[UrlData, _is("url")]
    | Annotated[ReferenceData, _is("reference")]
    | Annotated[TextData, _is("text")],
    _by("type", "form of file data"),
]


def _string_or(value: object) -> str:
    return "String" if isinstance(value, str) else "Object"


AnyData = Annotated[
    Annotated[str, Tag("String")] | Annotated[FileData, Tag("Object")], Discriminator(_string_or)
]


class TextPart(Optioned):
    type: Literal["text"]
    text: str


class FilePart(Optioned):
    """A picture, or text; other files are refused."""

    type: Literal["file"]
    data: AnyData
    media_type: str
    filename: str | None = Field(default=None, description="No effect.")


class ReasoningPart(Optioned):
    type: Literal["reasoning"]
    text: str


class ReasoningFilePart(Optioned):
    """Refused."""

    type: Literal["reasoning-file"]
    data: AnyData
    media_type: str


class CustomPart(Optioned):
    """A part of a provider's own kind: left out."""

    type: Literal["custom"]
    kind: str | None = None


class CallPart(Optioned):
    type: Literal["tool-call"]
    tool_call_id: NonEmpty
    tool_name: NonEmpty
    input: Any = Field(default=None, description="The arguments, a JSON object.")
    provider_executed: bool | None = Field(
        default=None, description="True: the call and its result are left out."
    )


class TextOutput(Optioned):
    type: Literal["text"]
    value: str


class JsonOutput(Optioned):
    type: Literal["json"]
    value: Any = None


class DeniedOutput(Optioned):
    type: Literal["execution-denied"]
    reason: str | None = None


class ErrorTextOutput(Optioned):
    type: Literal["error-text"]
    value: str


class ErrorJsonOutput(Optioned):
    type: Literal["error-json"]
    value: Any = None


class MediaPart(Optioned):
    """A file of a result in versions 2 and 3."""

    type: Literal["media", "file-data", "image-data"]
    data: str
    media_type: str
    filename: str | None = Field(default=None, description="No effect.")


ResultPart = Annotated[
    Annotated[TextPart, _is("text")]
    | Annotated[FilePart, _is("file")]
    | Annotated[MediaPart, _is("media")]
    | Annotated[MediaPart, _is("file-data")]
    | Annotated[MediaPart, _is("image-data")]
    | Annotated[CustomPart, _is("custom")],
    _by("type", "part of a tool result"),
]


class ContentOutput(Optioned):
    type: Literal["content"]
    value: list[ResultPart]


Output = Annotated[
    Annotated[TextOutput, _is("text")]
    | Annotated[JsonOutput, _is("json")]
    | Annotated[DeniedOutput, _is("execution-denied")]
    | Annotated[ErrorTextOutput, _is("error-text")]
    | Annotated[ErrorJsonOutput, _is("error-json")]
    | Annotated[ContentOutput, _is("content")],
    _by("type", "output of a tool"),
]


class ResultMessagePart(Optioned):
    type: Literal["tool-result"]
    tool_call_id: NonEmpty
    tool_name: NonEmpty
    output: Output


class ApprovalPart(Optioned):
    """The user's word on a tool that a provider runs; here is none."""

    type: Literal["tool-approval-response"]
    approval_id: str
    approved: bool
    reason: str | None = None


UserPart = Annotated[
    Annotated[TextPart, _is("text")] | Annotated[FilePart, _is("file")],
    _by("type", "part of a user message"),
]
AssistantPart = Annotated[
    Annotated[TextPart, _is("text")]
    | Annotated[FilePart, _is("file")]
    | Annotated[ReasoningPart, _is("reasoning")]
    | Annotated[ReasoningFilePart, _is("reasoning-file")]
    | Annotated[CustomPart, _is("custom")]
    | Annotated[CallPart, _is("tool-call")]
    | Annotated[ResultMessagePart, _is("tool-result")],
    _by("type", "part of an assistant message"),
]
ToolPart = Annotated[
    Annotated[ResultMessagePart, _is("tool-result")]
    | Annotated[ApprovalPart, _is("tool-approval-response")],
    _by("type", "part of a tool message"),
]


class SystemMessage(Optioned):
    role: Literal["system"]
    content: str


class UserMessage(Optioned):
    role: Literal["user"]
    content: list[UserPart]


class AssistantMessage(Optioned):
    role: Literal["assistant"]
    content: list[AssistantPart]


class ToolMessage(Optioned):
    role: Literal["tool"]
    content: list[ToolPart]


Message = Annotated[
    Annotated[SystemMessage, _is("system")]
    | Annotated[UserMessage, _is("user")]
    | Annotated[AssistantMessage, _is("assistant")]
    | Annotated[ToolMessage, _is("tool")],
    _by("role", "role of a message"),
]


class FunctionTool(Optioned):
    type: Literal["function"]
    name: NonEmpty
    description: str | None = None
    input_schema: Json
    input_examples: list[Any] | None = Field(
        default=None, description="No effect, and a warning says so."
    )
    strict: bool | None = None


class ProviderTool(Optioned):
    """A tool that a hosted provider runs. It is removed."""

    type: Literal["provider", "provider-defined"]
    id: str
    name: str
    args: Json | None = Field(default=None, description="No effect.")


WireTool = Annotated[
    Annotated[FunctionTool, _is("function")]
    | Annotated[ProviderTool, _is("provider")]
    | Annotated[ProviderTool, _is("provider-defined")],
    _by("type", "kind of tool"),
]


class Choice(Camel):
    type: Literal["auto", "none", "required", "tool"]
    tool_name: str | None = None


class ResponseFormat(Camel):
    type: Literal["text", "json"]
    schema_: Json | None = Field(default=None, alias="schema")
    name: str | None = Field(default=None, description="No effect.")
    description: str | None = Field(default=None, description="No effect.")


class Own(Camel):
    """`providerOptions.headrace`: what the specification has no field for."""

    reasoning_effort: Reasoning | None = None
    parallel_tool_calls: bool | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_ctx: int | None = Field(
        default=None, ge=1, description="Tokens of prompt and answer together."
    )


class Providers(OpenWire):
    """Options of providers; those of others are not looked at."""

    headrace: Own | None = None


class Body(Camel):
    """LanguageModelV4CallOptions. The model and whether to stream are headers."""

    prompt: list[Message]
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: Annotated[float, Only(0)] | None = None
    seed: int | None = None
    stop_sequences: list[NonEmpty] | None = None
    response_format: ResponseFormat | None = None
    tools: list[WireTool] | None = None
    tool_choice: Choice | None = None
    reasoning: Reasoning | None = None
    provider_options: Providers | None = None
    include_raw_chunks: bool | None = Field(default=None, description="No effect.")
    headers: dict[str, str | None] | None = Field(default=None, description="No effect.")
