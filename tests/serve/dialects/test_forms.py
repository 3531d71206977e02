"""A streamed answer, as its official client gathers it, is the whole one, and both make one prompt when they come back.

The gateway's client is JavaScript, so its frames are gathered here; `js/test_js_gateway.py` has the real one.
"""

from __future__ import annotations

import copy
from typing import Any

import anthropic as anthropic_sdk
import ollama as ollama_sdk
import openai
import pytest

from headrace.serve.app import create_app
from headrace.serve.dialects import anthropic, ollama, openai_chat, openai_responses
from headrace.serve.events import Event, Reply, collected
from headrace.serve.request import Json, Request
from serve.dialects.gateway_calls import TOOL, USER, frames
from serve.dialects.gateway_calls import opened as called_by_gateway
from serve.interleaved import CUT_CALLS, SCRIPTS, A, script
from serve.scripted import CARD, ScriptedBackend
from serve.served import served

MODEL = CARD.name
HI: Any = {"role": "user", "content": "Hi"}
SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}}


def scripted(first: list[Event]) -> ScriptedBackend:
    """Tells `first` to what is asked first, and a word to a replay."""
    return ScriptedBackend(lambda asked: first if len(asked.turns) == 1 else script(A))


def replays(backend: ScriptedBackend) -> list[Request]:
    return [asked for asked in backend.requests if len(asked.turns) > 1]


def every(scripts: dict[str, list[Event]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("first", list(scripts.values()), ids=list(scripts))


@pytest.mark.parametrize("display", ["summarized", "omitted"])
@every({**SCRIPTS, **CUT_CALLS})
def test_forms_of_messages(first: list[Event], display: str) -> None:
    backend = scripted(first)
    asked: Json = {
        "model": MODEL,
        "max_tokens": 64,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive", "display": display},
    }
    with (
        served(create_app(backend, [anthropic])) as url,
        anthropic_sdk.Anthropic(base_url=url, api_key="any", max_retries=0) as client,
    ):
        whole = client.messages.create(messages=[HI], **asked)
        with client.messages.stream(messages=[HI], **asked) as stream:
            gathered = stream.get_final_message()
        told = [
            [block.model_dump(exclude={"parsed_output"}) for block in message.content]
            for message in (whole, gathered)
        ]
        for content in told:
            said: Any = {"role": "assistant", "content": content}
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "rain"}
                for block in content
                if block["type"] == "tool_use"
            ]
            answer: Any = {"role": "user", "content": results or "Go on."}
            client.messages.create(messages=[HI, said, answer], **asked)
    assert told[0] == told[1]
    assert whole.stop_reason == gathered.stop_reason
    one, other = replays(backend)
    assert one == other


@every({**SCRIPTS, **CUT_CALLS})
def test_forms_of_responses(first: list[Event]) -> None:
    backend = scripted(first)
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    with (
        served(create_app(backend, [openai_responses])) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        ask = client.responses.create
        whole = ask(model=MODEL, input=[HI], tools=tools)
        with ask(model=MODEL, input=[HI], tools=tools, stream=True) as events:
            *_, last = items = list(events)
        done = [item.item for item in items if item.type == "response.output_item.done"]
        assert last.type in ("response.completed", "response.incomplete")
        told = [[item.model_dump() for item in output] for output in (whole.output, done)]
        for output in told:
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
                for item in output
                if item["type"] == "function_call"
            ]
            ask(model=MODEL, input=[HI, *copy.deepcopy(output), *results, HI], tools=tools)
    assert told[1] == [item.model_dump() for item in last.response.output]
    # Ids of texts hold the response's.
    one, other = ([{**item, "id": None} for item in output] for output in told)
    assert one == other
    assert whole.status == last.response.status
    asked, again = replays(backend)
    assert asked == again


@every(SCRIPTS)
def test_forms_of_chat(first: list[Event]) -> None:
    backend = scripted(first)
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    asked: Json = {"model": MODEL, "tools": tools}
    with (
        served(create_app(backend, [openai_chat])) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        whole = client.chat.completions.create(messages=[HI], **asked).choices[0]
        with client.chat.completions.create(messages=[HI], stream=True, **asked) as chunks:
            gathered = _gathered([chunk.choices[0].delta.model_dump() for chunk in chunks])
        message = whole.message.model_dump(exclude_none=True)
        for said in (message, gathered):
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
                for call in said.get("tool_calls", ())
            ]
            client.chat.completions.create(messages=[HI, said, *results, HI], **asked)
    assert {**message, "content": message.get("content", "")} == gathered
    one, other = replays(backend)
    assert one == other


def _gathered(deltas: list[Json]) -> Json:
    """The message that deltas make, one behind the other."""
    message: Json = {"role": "assistant", "content": ""}
    calls: dict[int, Json] = {}
    for delta in deltas:
        for field in ("content", "reasoning_content"):
            if delta.get(field):
                message[field] = message.get(field, "") + delta[field]
        for piece in delta["tool_calls"] or ():
            call = calls.setdefault(piece["index"], {"function": {"arguments": ""}})
            call["function"]["arguments"] += piece["function"]["arguments"]
            if piece["id"]:
                call |= {"id": piece["id"], "type": piece["type"]}
                call["function"]["name"] = piece["function"]["name"]
    return message | ({"tool_calls": list(calls.values())} if calls else {})


@every({**SCRIPTS, **CUT_CALLS})
def test_forms_of_ollama(first: list[Event]) -> None:
    backend = scripted(first)
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    with served(create_app(backend, [ollama])) as url:
        client = ollama_sdk.Client(url)
        whole = client.chat(MODEL, [HI], tools=tools, think=True).message
        parts = [p.message for p in client.chat(MODEL, [HI], tools=tools, think=True, stream=True)]
        gathered = ollama_sdk.Message(
            role="assistant",
            content="".join(part.content or "" for part in parts),
            thinking="".join(part.thinking or "" for part in parts) or None,
            tool_calls=[call for part in parts for call in part.tool_calls or ()] or None,
        )
        for said in (whole, gathered):
            results = [{"role": "tool", "content": "rain"} for _ in said.tool_calls or ()]
            client.chat(MODEL, [HI, said, *results, HI], tools=tools, think=True)
    assert whole == gathered
    one, other = replays(backend)
    assert one == other


@every({**SCRIPTS, **CUT_CALLS})
def test_forms_of_the_gateway(first: list[Event]) -> None:
    reply = collected(first)
    assert isinstance(reply, Reply)
    whole = called_by_gateway(tools=[TOOL]).whole(reply)
    *told, finish, done = frames(called_by_gateway(tools=[TOOL]), first)
    assert (finish["finishReason"], done) == (whole["finishReason"], "[DONE]")
    gathered: list[Json] = []
    for part in told:
        match part["type"]:
            case "text-start" | "reasoning-start":
                gathered.append({"type": part["type"].removesuffix("-start"), "text": ""})
            case "text-delta" | "reasoning-delta":
                gathered[-1]["text"] += part["delta"]
            case "tool-call":
                gathered.append(part)
            case _:
                pass
    assert whole["content"] == gathered
    asked, again = (_replayed(content) for content in (whole["content"], gathered))
    assert asked == again


def _replayed(content: list[Json]) -> Request:
    results = [
        {
            "type": "tool-result",
            "toolCallId": part["toolCallId"],
            "toolName": part["toolName"],
            "output": {"type": "text", "value": "rain"},
        }
        for part in content
        if part["type"] == "tool-call"
    ]
    told = [{"role": "tool", "content": results}] if results else []
    said = {"role": "assistant", "content": content}
    return called_by_gateway(prompt=[USER, said, *told, USER], tools=[TOOL]).request
