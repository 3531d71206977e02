"""Bodies of OpenAI's Chat Completions as typed values. Says what is accepted; `openai_chat` says what it means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headrace.serve.validation import Offered, Only, Wire

Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


def _kind(of: str) -> Any:
    """Chooses a union's branch by one text field, so that a refusal speaks of that branch alone."""

    def chosen(value: object) -> str | None:
        found = value.get(of) if isinstance(value, dict) else getattr(value, of, None)
        # Capitalised, as a tag is no part of the place that a refusal names; what comes so is no kind.
        return found.title() if isinstance(found, str) and found.islower() else None

    return chosen


def _by(of: str, known: str) -> Discriminator:
    said = f"its {of} has to be {known}"
    return Discriminator(_kind(of), custom_error_type="kind", custom_error_message=said)


def _shape(value: object) -> str | None:
    if isinstance(value, str):
        return "Plain"
    return "Structured" if isinstance(value, list | dict) else None


def _either(said: str) -> Discriminator:
    return Discriminator(_shape, custom_error_type="kind", custom_error_message=said)


Plain = Annotated[str, Tag("Plain")]


class TextPart(Wire):
    """Some text."""

    type: Literal["text"]
    text: str


class RefusalPart(Wire):
    """What an assistant said when it refused."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(Wire):
    """A picture, inline."""

    url: str = Field(description="A data: URL; others are refused.")
    detail: str | None = Field(None, description="No effect.")


class ImagePart(Wire):
    """A picture."""

    type: Literal["image_url"]
    image_url: ImageUrl


UserPart = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[ImagePart, Tag("Image_Url")],
    _by("type", "text or image_url"),
]
AssistantPart = Annotated[
    Annotated[TextPart, Tag("Text")] | Annotated[RefusalPart, Tag("Refusal")],
    _by("type", "text or refusal"),
]
_CONTENT = _either("has to be text or a list of parts")
TextContent = Annotated[Plain | Annotated[list[TextPart], Tag("Structured")], _CONTENT]
UserContent = Annotated[Plain | Annotated[list[UserPart], Tag("Structured")], _CONTENT]
AssistantContent = Annotated[Plain | Annotated[list[AssistantPart], Tag("Structured")], _CONTENT]


class CalledFunction(Wire):
    """A function and its arguments, a JSON object as text."""

    name: Name
    arguments: str
    parsed_arguments: Any = Field(None, description="No effect.")


class Call(Wire):
    """A call that the model made."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="No effect.")


class Message(Wire):
    """What every message may carry and nobody reads: bookkeeping of agents."""

    effect_disposition: Any = Field(None, description="No effect.")
    display_kind: Any = Field(None, description="No effect.")
    display_metadata: Any = Field(None, description="No effect.")


class SystemMessage(Message):
    """Instructions."""

    role: Literal["system", "developer"]
    content: TextContent
    name: str | None = Field(None, description="No effect.")


class UserMessage(Message):
    """What the user says."""

    role: Literal["user"]
    content: UserContent
    name: str | None = Field(None, description="No effect.")


class AssistantMessage(Message):
    """What the model said earlier, as the server sent it; fields that it sends as null may come back."""

    role: Literal["assistant"]
    content: AssistantContent | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Another name of `reasoning_content`.")
    tool_calls: list[Call] | None = None
    name: str | None = Field(None, description="No effect.")
    refusal: str | None = None
    annotations: list[Any] | None = Field(None, description="No effect.")
    parsed: Any = Field(None, description="No effect.")
    audio: None = None
    function_call: None = None


class ToolMessage(Message):
    """A tool's result."""

    role: Literal["tool"]
    content: TextContent
    tool_call_id: Name
    name: str | None = Field(None, description="The function that was called.")


AnyMessage = Annotated[
    Annotated[SystemMessage, Tag("System")]
    | Annotated[SystemMessage, Tag("Developer")]
    | Annotated[UserMessage, Tag("User")]
    | Annotated[AssistantMessage, Tag("Assistant")]
    | Annotated[ToolMessage, Tag("Tool")],
    _by("role", "system, developer, user, assistant or tool"),
]


class Function(Wire):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON Schema of an object.")
    strict: bool | None = Field(None, description="Arguments follow the schema exactly.")


class FunctionTool(Wire):
    """A tool of the client's."""

    type: Literal["function"]
    function: Function


class Named(Wire):
    """A function by its name."""

    name: Name


class NamedChoice(Wire):
    """This function has to be called."""

    type: Literal["function"]
    function: Named


Choice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("Plain")]
    | Annotated[NamedChoice, Tag("Structured")],
    _either("has to be auto, none, required or a named function"),
]
Stop = Annotated[
    Plain | Annotated[list[str], Tag("Structured")], _either("has to be text or a list of texts")
]


class Schema(Wire):
    """What the answer has to follow."""

    name: str | None = Field(None, description="No effect.")
    description: str | None = Field(None, description="No effect.")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(
        None, description="No effect: the answer follows the schema in either case."
    )


class AnyText(Wire):
    """An answer of any kind."""

    type: Literal["text"]


class AnyObject(Wire):
    """An answer that is a JSON object."""

    type: Literal["json_object"]


class BySchema(Wire):
    """An answer that follows a schema."""

    type: Literal["json_schema"]
    json_schema: Schema


ResponseFormat = Annotated[
    Annotated[AnyText, Tag("Text")]
    | Annotated[AnyObject, Tag("Json_Object")]
    | Annotated[BySchema, Tag("Json_Schema")],
    _by("type", "text, json_object or json_schema"),
]


class StreamOptions(Wire):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="No effect: nothing is padded.")


class Options(Wire):
    """An extension."""

    num_ctx: Positive | None = Field(None, description="Tokens of prompt and answer together.")


class ChatBody(Wire):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: list[AnyMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="An extension.")
    min_p: float | None = Field(None, description="An extension.")
    presence_penalty: float | None = None
    seed: int | None = None
    stop: Stop | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    think: bool | None = Field(None, description="An extension: whether to reason.")
    options: Options | None = Field(None, description="An extension.")
    n: Annotated[int, Only(1)] | None = None
    frequency_penalty: Annotated[float, Only(0)] | None = None
    logprobs: Annotated[bool, Only(False)] | None = None
    top_logprobs: Annotated[int, Only(0)] | None = None
    logit_bias: Annotated[dict[str, float], Only(())] | None = None
    store: Annotated[bool, Only(False)] | None = Field(None, description="No completion is kept.")
    modalities: Annotated[list[Literal["text"]] | None, Offered] = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="No effect.")
    metadata: dict[str, str] | None = Field(None, description="No effect.")
    user: str | None = Field(None, description="No effect.")
    prompt_cache_key: str | None = Field(None, description="No effect.")
    prompt_cache_retention: str | None = Field(None, description="No effect.")
    safety_identifier: str | None = Field(None, description="No effect.")
    service_tier: str | None = Field(None, description="No effect.")
