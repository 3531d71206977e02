"""Where a refusal says that its cause is, in every dialect; and that no type of theirs takes True for 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import pytest

from headrace.errors import ContextError, GrammarError
from headrace.serve.dialects import anthropic, gateway, ollama, openai_chat, openai_responses
from headrace.serve.events import Failure
from headrace.serve.failure import RequestError, failure
from headrace.serve.request import Json
from headrace.serve.validation import Wire
from serve.dialects import anthropic_messages, chat, gateway_calls, ollama_asked, responses
from serve.fields import MODULES

URL = "https://example.com/a.png"
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
TOOL = {"type": "function", **FUNCTION}
SPACE = {"type": "namespace", "name": "s", "tools": [TOOL]}
MORE = {"type": "additional_tools", "tools": [TOOL]}


def _ollama(**fields: Any) -> object:
    return ollama_asked.opened("/api/chat", {"model": ollama_asked.MODEL, **fields})


OPEN: dict[str, Callable[..., object]] = {
    "chat": chat.exchange,
    "responses": responses.opened,
    "anthropic": anthropic_messages.opened,
    "ollama": _ollama,
    "gateway": gateway_calls.opened,
}


@pytest.mark.parametrize(
    ("dialect", "body", "place"),
    [
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [chat.USER, {"role": "assistant", "content": "Hi"}]}, "messages"),
        ("chat", {"messages": [chat.USER, chat.called("a")]}, "messages"),
        ("chat", {"messages": [chat.USER, chat.result("a")]}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url", "image_url": {"url": URL}}]}]},
         "messages[0].content[1].image_url.url"),
        ("chat", {"tools": [CHAT_TOOL, CHAT_TOOL]}, "tools[1].function.name"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"tool_choice": CHAT_TOOL | {"function": {"name": "f"}}}, "tool_choice.function.name"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"role": "assistant", "content": "Hi"}]}, "input"),
        ("responses", {"input": [CALL]}, "input"),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": ""}]}, "input"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}, "input[0].content[0].image_url"),
        ("responses", {"input": [CALL, {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": URL}]}]},
         "input[1].output[0].image_url"),
        ("responses", {"tools": [TOOL, TOOL]}, "tools[1].name"),
        ("responses", {"tools": [TOOL, SPACE, SPACE]}, "tools[2].tools[0].name"),
        ("responses", {"tools": [TOOL], "input": [{"role": "user", "content": "Hi"}, MORE]}, "input[1].tools[0].name"),
        ("responses", {"tool_choice": "required"}, "tool_choice"),
        ("responses", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ("anthropic", {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]}, "messages"),
        ("anthropic", {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "messages"),
        ("anthropic", {"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools[1].name"),
        ("anthropic", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("anthropic", {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ("ollama", {"messages": [{"role": "assistant", "content": "Hi"}]}, "messages"),
        ("ollama", {"messages": [ollama_asked.HELLO], "tools": [CHAT_TOOL, CHAT_TOOL]}, "tools[1].function.name"),
        ("gateway", {"prompt": []}, "prompt"),
        ("gateway", {"prompt": [{"role": "user", "content": [{"type": "file", "data": URL, "mediaType": "image/png"}]}]}, "prompt[0].content[0].data"),
        ("gateway", {"prompt": [{"role": "user", "content": [{"type": "file", "data": {"type": "url", "url": URL}, "mediaType": "image/png"}]}]},
         "prompt[0].content[0].data.url"),
        ("gateway", {"tools": [gateway_calls.TOOL] * 2}, "tools[1].name"),
        ("gateway", {"toolChoice": {"type": "required"}}, "toolChoice"),
        ("gateway", {"toolChoice": {"type": "tool"}}, "toolChoice.toolName"),
        ("gateway", {"toolChoice": {"type": "tool", "toolName": "f"}}, "toolChoice.toolName"),
    ],
)  # fmt: skip
def test_a_refusal_has_its_place(dialect: str, body: Json, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        OPEN[dialect](**body)
    assert caught.value.place == place


CHOSEN = {
    "chat": ({"type": "function", "function": {"name": "f"}}, "required"),
    "responses": ({"type": "function", "name": "f"}, "required"),
    "anthropic": ({"type": "tool", "name": "f"}, {"type": "any"}),
    "gateway": ({"type": "tool", "toolName": "f"}, {"type": "required"}),
}


@pytest.mark.parametrize("dialect", CHOSEN)
def test_a_choice_that_cannot_be_is_refused_in_the_same_words(dialect: str) -> None:
    field, said = "toolChoice" if dialect == "gateway" else "tool_choice", []
    for choice in CHOSEN[dialect]:
        with pytest.raises(RequestError) as caught:
            OPEN[dialect](**{field: choice})
        said.append(caught.value.message.removeprefix(f"{caught.value.place}: "))
    assert said == ["'f' is not among the tools", "a call is required, but there are no tools"]


LONG = failure(ContextError(9, 8, 1))
SCHEMA = failure(GrammarError("schema", "/items", "format: is not known"))
STRICT = failure(GrammarError("tool 'f'", "/items", "format: is not known"))
UNSEEN = Failure(400, "unsupported_image", "the model takes no images")


@pytest.mark.parametrize(
    ("dialect", "places"),
    [
        (openai_chat, ("messages", "response_format", "tools", "messages")),
        (openai_responses, ("input", "text.format", "tools", "input")),
        (gateway, ("prompt", "responseFormat", "tools", "prompt")),
    ],
    ids=["chat", "responses", "gateway"],
)
def test_what_the_model_refuses_has_its_place(dialect: Any, places: tuple[str, ...]) -> None:
    told = [dialect.error(what)["error"]["param"] for what in (LONG, SCHEMA, STRICT, UNSEEN)]
    assert tuple(told) == places


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (lambda what: anthropic.error(what)["error"]["message"], "output_config.format"),
        (lambda what: ollama.error(what)["error"], "format"),
    ],
    ids=["anthropic", "ollama"],
)
def test_errors_without_a_field_for_it_begin_with_the_place_of_a_schema(
    message: Callable[[Failure], str], field: str
) -> None:
    assert message(SCHEMA) == f"{field}: schema at /items: format: is not known"
    assert message(STRICT) == "tool 'f' at /items: format: is not known"


def literals(annotation: object) -> Iterator[object]:
    """Values of all `Literal`s in an annotation."""
    for argument in get_args(annotation):
        if "Literal" in str(get_origin(annotation)):
            yield argument
        else:
            yield from literals(argument)


WIRES = [
    kind
    for module in MODULES.values()
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Wire) and kind.model_fields
]


@pytest.mark.parametrize("kind", WIRES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_constants_that_are_no_text_have_their_type_checked(kind: type[Wire]) -> None:
    for name, field in kind.model_fields.items():
        assert all(isinstance(value, str) for value in literals(field.annotation)), name
