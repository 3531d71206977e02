"""The Messages API's requests as they come, and the signature of a thought.

Fields that are not named here are ignored; the dialect tells those of the top.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from headrace.serve.failure import RequestError
from headrace.serve.request import Effort, Json
from headrace.serve.validation import OpenWire, Wire

SIGNATURE = "headrace-1."  # a format's version, then base64 of a digest and the reasoning
DIGEST_BYTES = 16
NO_THREADS = "thread_unsupported_request"


class Inner(Wire):
    """A value below the top: markers such as `cache_control` have no effect."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class TextBlock(Inner):
    type: Literal["text"]
    text: str


class InlineImage(Inner):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class RemoteImage(Inner):
    """Refused: nothing is fetched."""

    type: Literal["url", "file"]


class ImageBlock(Inner):
    type: Literal["image"]
    source: Annotated[InlineImage | RemoteImage, Field(discriminator="type")]


class PlainSource(Inner):
    type: Literal["text"]
    media_type: Literal["text/plain"] | None = None
    data: str


class BlocksSource(Inner):
    type: Literal["content"]
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]]


class UnreadSource(Inner):
    """A PDF, a URL or an uploaded file: a note takes its place."""

    type: Literal["base64", "url", "file"]


class DocumentBlock(Inner):
    """Read as its title, context and text."""

    type: Literal["document"]
    source: Annotated[PlainSource | BlocksSource | UnreadSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Inner):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]


class ToolReferenceBlock(Inner):
    """Read as a sentence that names the tool."""

    type: Literal["tool_reference"]
    tool_name: str


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]


class ToolResultBlock(Inner):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = Field(
        default=None, description="True puts 'Error:' in front of the content."
    )


class ThinkingBlock(Inner):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(
        default=None, description="Holds the reasoning, also where text is gone."
    )


class RedactedThinkingBlock(Inner):
    """Another provider's, encrypted: skipped."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Inner):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class ToolChangeBlock(Inner):
    """Skipped: the tools are those of the request."""

    type: Literal["tool_addition", "tool_removal"]


UserBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock,
    Field(discriminator="type"),
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]
SystemBlock = Annotated[TextBlock | ToolChangeBlock, Field(discriminator="type")]


class UserMessage(Inner):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Inner):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Inner):
    role: Literal["system"]
    content: str | list[SystemBlock]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ToolParam(Inner):
    """A function, or with a `type` other than "custom" a tool of the API's own."""

    type: str | None = None
    name: str | None = Field(default=None, min_length=1, max_length=128)
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = Field(default=None, description="Arguments follow the schema exactly.")
    eager_input_streaming: bool | None = Field(
        default=None, description="The input is sent while it is written, not when it is complete."
    )


class ToolChoiceParam(Inner):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(default=None, description="One call at most.")


class Adaptive(Inner):
    type: Literal["adaptive"]
    display: str | None = Field(
        default=None, description='"omitted" leaves out the text of thinking.'
    )


class Enabled(Inner):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1)
    display: str | None = Field(
        default=None, description='"omitted" leaves out the text of thinking.'
    )


class Disabled(Inner):
    type: Literal["disabled"]


class JsonFormat(Inner):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Inner):
    effort: Effort | None = None
    format: JsonFormat | None = Field(
        default=None, description="The answer always follows the schema."
    )


class Prompt(OpenWire):
    """What the model reads and how, without a limit: the body of a count."""

    model: str
    messages: list[Message] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Annotated[Adaptive | Enabled | Disabled, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(default=None, description="Older name of the format.")
    metadata: Json | None = Field(default=None, description="No effect.")
    context_management: Json | None = Field(default=None, description="No effect.")
    service_tier: str | None = Field(default=None, description="No effect.")
    container: Any = Field(default=None, description="Refused: there is nothing that runs code.")
    mcp_servers: list[Any] | None = Field(
        default=None, description="Refused unless empty: nothing is connected to."
    )
    thread: Json | None = Field(default=None, description="Refused: no conversation is kept.")

    def check_served(self) -> None:
        """Refuse what asks for work that no server of a model can do."""
        for name in ("container", "mcp_servers"):
            if getattr(self, name) not in (None, []):
                raise RequestError(
                    f"{name} is not supported: the server runs the model and nothing else",
                    code="unsupported_field",
                    place=name,
                )
        if self.thread is not None:
            said = "thread is not supported: send the whole conversation"
            raise RequestError(said, code=NO_THREADS, place="thread")


class Body(Prompt):
    """The body of a message that is to be generated."""

    max_tokens: int = Field(ge=1)


def signed(reasoning: str) -> str:
    """A signature that holds the reasoning, for clients that send a block back without its text."""
    data = reasoning.encode()
    return SIGNATURE + base64.urlsafe_b64encode(_digest(data) + data).decode()


def recalled(signature: str) -> str | None:
    """The reasoning in a signature; None if it is not one of ours, or damaged."""
    if not signature.startswith(SIGNATURE):
        return None
    try:
        held = base64.b64decode(signature[len(SIGNATURE) :], altchars=b"-_", validate=True)
        digest, data = held[:DIGEST_BYTES], held[DIGEST_BYTES:]
        return data.decode() if digest == _digest(data) else None
    except ValueError:
        return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"headrace thought").digest()
