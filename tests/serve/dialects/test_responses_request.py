"""What a body of the Responses API asks for: every field, default and refusal."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from headrace.serve.dialects import openai_responses as dialect
from headrace.serve.dialects.openai_responses_wire import Body
from headrace.serve.events import Failure
from headrace.serve.failure import RequestError, failure
from headrace.serve.request import (
    Format,
    Image,
    Request,
    Sampling,
    Text,
    ToolCall,
    ToolChoice,
    Turn,
)
from headrace.serve.validation import read
from headrace.values import Tool
from serve.dialects.responses import CONTEXT, FUNCTION, NAME, PATCH, Json, asked, opened
from serve.picture import PNG

HELLO = Turn("user", (Text("Hello"),))
PIXEL = PNG
URL = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
WEATHER = Tool("weather", "Looks out.", FUNCTION["parameters"])


def said(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def test_a_request_that_says_nothing_but_its_input() -> None:
    assert asked() == Request(NAME, (HELLO,))
    assert opened().stream is False
    assert opened().ignored == ()


def test_null_is_unset_in_every_optional_field() -> None:
    optional = [name for name, field in Body.model_fields.items() if not field.is_required()]
    assert len(optional) > 25
    assert asked(**dict.fromkeys(optional)) == asked()


def test_everything_that_has_an_effect() -> None:
    request = asked(
        instructions="Be brief.",
        tools=[FUNCTION],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        max_output_tokens=9,
        temperature=0,
        top_p=0.5,
    )
    assert request == Request(
        NAME,
        (Turn("system", (Text("Be brief."),)), HELLO),
        tools=(WEATHER,),
        choice=ToolChoice("required"),
        parallel_calls=False,
        effort="low",
        sampling=Sampling(temperature=0.0, top_p=0.5),
        limit=9,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"store": False},
        {"include": ["reasoning.encrypted_content"]},
        {"metadata": {"a": "b"}},
        {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"mode": "implicit"}},
        {"safety_identifier": "me"},
        {"user": "me"},
        {"service_tier": "flex"},
        {"stream_options": {"include_obfuscation": False}},
        {"top_logprobs": 0},
        {"context_management": []},
        {"text": {"verbosity": "low"}},
        {"text": {"format": {"type": "text"}}},
        {"truncation": "disabled"},
        {"client_metadata": {"x-codex": "1"}},
        {"access_programs": {"cyber": "standard"}},
        {"background": False},
        {"tools": []},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"reasoning": {}},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"effort": "minimal"}},
        {"reasoning": {"summary": "auto", "generate_summary": "concise", "context": "auto"}},
        {"stream": True},
    ],
    ids=str,
)
def test_accepted_without_effect(fields: Json) -> None:
    assert asked(**fields) == asked()


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_effort_reasons(effort: str) -> None:
    assert asked(reasoning={"effort": effort}).effort == effort


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: not supported: no response is stored, so a request carries its whole conversation as input"),
        ({"conversation": "conv_1"}, "conversation: not supported: no response is stored, so a request carries its whole conversation as input"),
        ({"background": True}, "background: not supported: a response is made while its client waits"),
        ({"prompt": {"id": "p"}}, "prompt: not supported: no prompt templates are stored"),
        ({"context_management": [{"type": "compaction"}]}, "context_management: has to be empty: the client decides what to leave out"),
        ({"max_tool_calls": 3}, "max_tool_calls: not supported: the client runs the tools, and may count"),
        ({"top_logprobs": 2}, "top_logprobs: only 0 is supported: no probabilities are reported"),
        ({"truncation": "auto"}, "truncation: input should be 'disabled'"),
        ({"max_output_tokens": 0}, "max_output_tokens: input should be greater than or equal to 1"),
        ({"temperature": "1"}, "temperature: input should be a valid number"),
        ({"stream": "yes"}, "stream: input should be a valid boolean"),
        ({"metadata": {"a": 1}}, "metadata.a: input should be a valid string"),
        ({"frequency_penalty": 0}, "unknown field frequency_penalty"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort: input should be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'"),
        ({"model": "gpt-5"}, f"the model 'gpt-5' is not served here; {NAME!r}, '{NAME}+pirate' are"),
        ({"text": {"format": {"type": "xml"}}}, "text.format: an object with a type that is supported is expected: json_object, json_schema, text"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema is missing"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name: two tools are called 'weather'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name is missing"),
        ({"tools": [FUNCTION | {"function": {}}]}, "unknown field tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice: a call is required, but there are no tools"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name: 'x' is not among the tools"),
        ({"tool_choice": {"type": "allowed_tools", "name": "x"}}, "tool_choice.type: input should be 'function' or 'custom'"),
        ({"model": None}, "model is missing"),
        ({"input": None}, "input is missing"),
        ({"input": []}, "input: the conversation is empty"),
        ({"input": [said("user", "Hi"), said("assistant", "Hello")]}, "the conversation ends with the assistant's message: nothing is asked"),
        ({"input": [said("user", "Hi"), {"type": "reasoning", "summary": []}]}, "the conversation ends with the assistant's message: nothing is asked"),
        ({"input": [said("robot", "Hi")]}, "input[0].role: input should be 'system', 'developer', 'user' or 'assistant'"),
        ({"input": [{"role": "user"}]}, "input[0].content is missing"),
        ({"input": [said("user", "Hi") | {"name": "me"}]}, "unknown field input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "the tool result 'x' answers no call of the message before it"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "[]"}]}, "input[0].arguments: not a JSON object as text"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "[" * 100_000}]}, "input[0].arguments: not a JSON object as text"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}]}, "tool calls without a result: 'x'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id is missing"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]}, "input[0].encrypted_content: not supported: content that another provider encrypted cannot be read"),
        ({"input": [said("assistant", "") | {"content": [{"type": "input_image", "image_url": URL}]}]}, "input[0].content[0]: only a user or a tool shows images"),
        ({"input": [said("user", "") | {"content": [{"type": "input_image"}]}]}, "input[0].content[0]: a data: URL is missing"),
        ({"input": [said("user", "") | {"content": [{"type": "input_image", "file_id": "file_1"}]}]}, "input[0].content[0].file_id: not supported: no file is stored; send a data: URL"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refused(fields: Json, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        opened(**fields)
    assert caught.value.message == message
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("prompt", {"id": "p"}),
        ("max_tool_calls", 3),
        ("top_logprobs", 2),
        ("truncation", "auto"),
        ("context_management", [{"type": "compaction"}]),
    ],
)
def test_what_is_not_offered_has_the_code_of_it(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        opened(**{name: value})
    assert (caught.value.cause, caught.value.place) == ("unsupported_field", name)


@pytest.mark.parametrize("name", ["moderation", "new"])
def test_null_is_unset_of_fields_that_nobody_knows(name: str) -> None:
    assert asked(**{name: None}) == asked()


@pytest.mark.parametrize("field", ["model", "input"])
def test_what_has_to_be_there(field: str) -> None:
    body: Json = {"model": NAME, "input": "Hi"}
    del body[field]
    with pytest.raises(RequestError, match=f"{field} is missing"):
        read(Body, body)


@pytest.mark.parametrize("part", ["input_file", "input_audio", "encrypted_content"])
@pytest.mark.parametrize("item", ["message", "function_call_output"])
def test_parts_that_nobody_reads_are_refused(item: str, part: str) -> None:
    content = [{"type": part, "file_id": "x"}]
    value = said("user", "") | {"content": content}
    if item == "function_call_output":
        value = {"type": item, "call_id": "x", "output": content}
    with pytest.raises(RequestError) as caught:
        opened(input=[value])
    where = "content" if item == "message" else "output"
    assert caught.value.place == f"input[0].{where}[0]"
    assert "input_image, input_text, output_text, refusal, text" in caught.value.message


@pytest.mark.parametrize("kind", ["item_reference", "compaction", "computer_call", 3])
def test_items_that_nobody_reads_are_refused(kind: Any) -> None:
    with pytest.raises(RequestError) as caught:
        opened(input=[{"type": kind, "id": "x"}])
    assert caught.value.place == "input[0]"
    assert "function_call_output" in caught.value.message


@pytest.mark.parametrize("kind", ["mcp", "code_interpreter", "computer_use_preview", "shell", None])
def test_tools_that_no_client_runs_are_refused(kind: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        opened(tools=[{"type": kind}])
    assert caught.value.place == "tools[0]"


# Messages.


def test_instructions_and_leading_system_messages_become_one_and_later_ones_the_users() -> None:
    messages = [said("developer", "Two."), said("system", "Three."), said("user", "Hi"), said("developer", "Now.")]  # fmt: skip
    assert asked(instructions="One.", input=messages).turns == (
        Turn("system", (Text("One.\n\nTwo.\n\nThree."),)),
        Turn("user", (Text("Hi"), Text("\n\n"), Text("Now."))),
    )


def test_a_lone_developer_message_is_what_is_asked() -> None:
    assert asked(input=[said("developer", "Speak.")]).turns == (Turn("user", (Text("Speak."),)),)


def test_parts_of_messages() -> None:
    parts = [
        {"type": "input_text", "text": "Look:"},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
    ]
    turns = asked(input=[{"type": "message", "role": "user", "content": parts}]).turns
    assert turns == (Turn("user", (Text("Look:"), Image(PIXEL, "image/png"))),)


def test_a_refusal_in_the_history_is_what_the_assistant_said() -> None:
    no = said("assistant", "") | {"content": [{"type": "refusal", "refusal": "No."}]}
    turns = asked(input=[said("user", "Hi"), no, said("user", "Why?")]).turns
    assert turns[1] == Turn("assistant", (Text("No."),))


@pytest.mark.parametrize(
    "url",
    ["https://example.com/cat.png", "http://127.0.0.1/cat.png", "file:///cat.png", "data:image/png;base64,%%"],
)  # fmt: skip
def test_images_that_are_not_inline_are_refused(url: str) -> None:
    with pytest.raises(RequestError):
        asked(input=[said("user", "") | {"content": [{"type": "input_image", "image_url": url}]}])


# Tools.


def test_a_function_tool() -> None:
    assert asked(tools=[FUNCTION]).tools == (WEATHER,)


def test_a_strict_function_tool() -> None:
    tools = asked(tools=[FUNCTION | {"strict": True}]).tools
    assert tools == (Tool("weather", "Looks out.", FUNCTION["parameters"], strict=True),)


def test_a_function_tool_that_says_nothing() -> None:
    tools = asked(
        tools=[{"type": "function", "name": "f", "parameters": None, "strict": None}]
    ).tools
    assert tools == (Tool("f", "", {"type": "object", "properties": {}}),)


def test_a_freeform_tool_is_a_function_of_one_string() -> None:
    (tool,) = asked(tools=[PATCH]).tools
    assert tool.name == "apply_patch"
    assert tool.description == "Edits files.\n\nGrammar of the input (lark):\nstart: /.+/"
    assert tool.strict
    assert tool.parameters["required"] == ["input"]
    assert tool.parameters["properties"]["input"]["type"] == "string"
    assert tool.parameters["additionalProperties"] is False


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_a_freeform_tool_without_a_grammar(form: Json | None) -> None:
    (tool,) = asked(tools=[PATCH | {"format": form}]).tools
    assert tool.description == "Edits files."


def test_a_namespace_is_flattened_and_its_description_comes_first() -> None:
    space = {
        "type": "namespace",
        "name": "mcp__clock",
        "description": "Clocks.",
        "tools": [FUNCTION | {"defer_loading": True}, {"type": "web_search"}, PATCH],
    }
    one, two = asked(tools=[space]).tools
    assert (one.name, one.description) == ("mcp__clock.weather", "Clocks.\n\nLooks out.")
    assert (two.name, two.description[:12]) == ("mcp__clock.apply_patch", "Edits files.")


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search", "external_web_access": True, "filters": None},
        {"type": "web_search_preview"},
        {"type": "file_search", "vector_store_ids": ["x"]},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}},
    ],
    ids=lambda tool: tool["type"],
)
def test_hosted_tools_are_dropped_and_named(tool: Json) -> None:
    exchange = opened(tools=[FUNCTION, tool])
    assert exchange.request.tools == (WEATHER,)
    assert exchange.ignored == ("tools[1]",)


def test_tools_declared_in_the_midst_of_the_input() -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [PATCH]}
    request = asked(tools=[FUNCTION], input=[more, said("user", "Hello")])
    assert [tool.name for tool in request.tools] == ["weather", "apply_patch"]
    assert request.turns == (HELLO,)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "weather"}, ToolChoice("required", "weather")),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("required", "apply_patch")),
        ({"type": "function", "name": "n.weather"}, ToolChoice("required", "n.weather")),
        ({"type": "function", "name": "weather", "namespace": "n"}, ToolChoice("required", "n.weather")),
    ],
    ids=str,
)  # fmt: skip
def test_tool_choice(choice: Any, expected: ToolChoice) -> None:
    space = {"type": "namespace", "name": "n", "tools": [FUNCTION]}
    assert asked(tools=[FUNCTION, PATCH, space], tool_choice=choice).choice == expected


# Structured output.


def test_any_json_object() -> None:
    assert asked(text={"format": {"type": "json_object"}}).answer == Format("json")


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema(strict: bool | None) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked_for = {"type": "json_schema", "name": "n", "description": "d", "schema": schema, "strict": strict}  # fmt: skip
    assert asked(text={"format": asked_for}).answer == Format("schema", schema)


# Errors, and what is not stored.


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (503, "server_error")]
)
def test_the_shape_of_an_error(status: int, kind: str) -> None:
    told = dialect.error(Failure(status, "some_code", "It broke", "try again", place="n"))
    error = {"message": "It broke (try again)", "type": kind, "param": "n", "code": "some_code"}
    assert told == {"error": error}


def test_no_response_is_found() -> None:
    found = {(endpoint.method, endpoint.path): endpoint for endpoint in dialect.ENDPOINTS}
    assert set(found) == {
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/{id}"),
        ("DELETE", "/v1/responses/{id}"),
    }
    context = type(CONTEXT)(CONTEXT.card, CONTEXT.id, CONTEXT.now, path={"id": "resp_1"})
    for method in ("GET", "DELETE"):
        with pytest.raises(RequestError) as caught:
            found[method, "/v1/responses/{id}"].answer(None, context)
        assert failure(caught.value) == Failure(
            404,
            "not_found",
            "there is no response 'resp_1': no response is stored, so a request carries its whole conversation as input",
        )


def test_an_adapter_is_chosen_by_the_name_of_the_model() -> None:
    assert asked(model=f"{NAME}+pirate").model == f"{NAME}+pirate"


def test_calls_and_results_in_any_order() -> None:
    calls = [
        {"type": "function_call", "call_id": name, "name": "weather", "arguments": "{}"}
        for name in ("a", "b")
    ]
    outputs = [
        {"type": "function_call_output", "call_id": "b", "output": "2"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}, {"type": "input_image", "image_url": URL}]},
    ]  # fmt: skip
    assert asked(input=[said("user", "Hello"), *calls, *outputs]).turns == (
        HELLO,
        Turn("assistant", calls=(ToolCall("a", "weather", "{}"), ToolCall("b", "weather", "{}"))),
        Turn("tool", (Text("1"), Image(PIXEL, "image/png")), call_id="a"),
        Turn("tool", (Text("2"),), call_id="b"),
    )
