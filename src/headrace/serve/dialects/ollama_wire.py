"""What Ollama's clients send: the bodies of `serve.dialects.ollama`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from headrace.serve.validation import Only, Wire


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[
    int, BeforeValidator(_whole)
]  # 40.0 too, as clients in languages without integers send it
Empty = Annotated[str, Only(""), Field(description="Accepted where empty.")]
Nothing = Annotated[dict[str, Any], Only(()), Field(description="Accepted where empty.")]
Zero = Annotated[float, Only(0), Field(description="Accepted where it changes nothing.")]
One = Annotated[float, Only(1), Field(description="Accepted where it changes nothing.")]
Unused = Annotated[Whole, Field(description="No effect: it cannot change an answer here.")]
UnusedFlag = Annotated[bool, Field(description="No effect: it cannot change an answer here.")]
Off = Annotated[float, Field(description="No effect: mirostat is off.")]
No = Annotated[bool, Only(False), Field(description="Accepted where false.")]
KeepAlive = Annotated[
    float | str, Field(description="No effect: the server keeps its model loaded.")
]


def _think(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """Says all that may stand there, and not what one branch of the union wants."""
    try:
        return handler(value)
    except ValidationError:
        raise ValueError("has to be true, false, low, medium, high or max") from None


Think = Annotated[
    bool | Literal["low", "medium", "high", "max"],
    WrapValidator(_think),
    Field(description="Whether to reason first, and how hard; true is medium."),
]
Shape = Annotated[
    Literal["", "json"] | dict[str, Any],
    Field(description='"json" for any JSON object, or a JSON Schema that the answer follows.'),
]


class Options(Wire):
    """Of one generation. Sampling values out of range are clamped."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repeat_penalty: float | None = Field(
        default=None, description="Over the prompt and the answer."
    )
    seed: Whole | None = Field(default=None, description="Negative: random, as without it.")
    stop: str | list[str] | None = None
    num_predict: Whole | None = Field(
        default=None,
        description="Tokens of the answer, reasoning included. Without it 512; 0 or less: all that is left.",
    )
    num_ctx: Annotated[int, Field(ge=1), BeforeValidator(_whole)] | None = Field(
        default=None, description="Prompt and answer together, up to the served window."
    )

    frequency_penalty: Zero | None = None
    mirostat: Zero | None = None
    tfs_z: One | None = None
    typical_p: One | None = None
    repeat_last_n: Whole | None = Field(
        default=None, description="Any, without an effect: the penalty always reads everything."
    )
    penalize_newline: Annotated[bool, Only(True)] | None = None
    vocab_only: No | None = None
    embedding_only: No | None = None
    logits_all: No | None = None

    mirostat_tau: Off | None = None
    mirostat_eta: Off | None = None
    num_keep: Unused | None = None
    num_batch: Unused | None = None
    num_gpu: Unused | None = None
    main_gpu: Unused | None = None
    num_thread: Unused | None = None
    numa: UnusedFlag | None = None
    low_vram: UnusedFlag | None = None
    f16_kv: UnusedFlag | None = None
    use_mmap: UnusedFlag | None = None
    use_mlock: UnusedFlag | None = None


class TextPart(Wire):
    type: Literal["text"]
    text: str


class ImageUrl(Wire):
    url: str = Field(description="A data: URL; others are refused.")
    detail: str | None = Field(default=None, description="No effect.")


class ImagePart(Wire):
    type: Literal["image_url"]
    image_url: str | ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class CalledFunction(Wire):
    name: str
    arguments: dict[str, Any]
    index: int | None = Field(default=None, description="No effect.")
    description: str | None = Field(  # in Ollama's own documentation of replayed calls
        default=None, description="No effect."
    )


class CallWire(Wire):
    """A call that the model made, as it was told."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = Field(default=None, description="No effect.")


class MessageWire(Wire):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    images: list[str] | None = Field(default=None, description="Base64; of users and tools.")
    thinking: str | None = Field(default=None, description="Of the assistant.")
    tool_calls: list[CallWire] | None = Field(default=None, description="Of the assistant.")
    tool_name: str | None = Field(default=None, description="Of a result: the tool.")
    tool_call_id: str | None = Field(default=None, description="Of a result: the call.")


class FunctionWire(Wire):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON Schema of an object.")
    strict: bool | None = Field(default=None, description="Arguments follow the schema exactly.")


class ToolWire(Wire):
    function: FunctionWire
    type: Literal["function"] | None = None


class _Body(Wire):
    """What both endpoints that generate accept."""

    model: str
    stream: bool | None = Field(default=None, description="True without it.")
    think: Think | None = None
    format: Shape | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    truncate: UnusedFlag | None = None
    shift: UnusedFlag | None = None
    logprobs: No | None = None
    top_logprobs: Annotated[Whole, Only(0)] | None = None


class ChatBody(_Body):
    """POST /api/chat."""

    messages: list[MessageWire] | None = Field(default=None, description="Empty: loads the model.")
    tools: list[ToolWire] | None = None


class GenerateBody(_Body):
    """POST /api/generate."""

    prompt: str | None = Field(default=None, description="Empty: loads the model.")
    system: str | None = None
    raw: bool | None = Field(default=None, description="No chat template around the prompt.")
    images: list[str] | None = Field(default=None, description="Base64.")
    suffix: Empty | None = None
    template: Empty | None = None
    context: Annotated[list[int], Only(())] | None = None


class ShowBody(Wire):
    """POST /api/show."""

    model: str | None = None
    name: str | None = Field(default=None, description="The old name of `model`.")
    verbose: bool | None = Field(default=None, description="No effect.")
    system: Empty | None = None
    template: Empty | None = None
    options: Nothing | None = None
