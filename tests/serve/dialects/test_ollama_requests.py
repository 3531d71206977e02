"""Ollama's bodies as requests: every field, every refusal, every default. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.serve.dialect import Exchange
from headrace.serve.dialects.ollama_wire import Options
from headrace.serve.failure import RequestError
from headrace.serve.request import Format, Json, Sampling, Text, Turn
from serve.dialects.ollama_asked import (
    ASKED,
    BASIC,
    BOTH,
    CHAT,
    CONTEXT,
    ENDPOINTS,
    GENERATE,
    HELLO,
    MODEL,
    PLAIN,
    PNG64,
    RED,
    asked,
    chat,
    opened,
    refused,
)
from serve.scripted import CARD


@BOTH
def test_the_least_request(path: str) -> None:
    exchange = opened(path, BASIC[path])
    assert isinstance(exchange, Exchange)
    assert exchange.request == PLAIN
    assert exchange.stream
    assert exchange.media_type == "application/x-ndjson"


@BOTH
@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"temperature": 0}, {"sampling": Sampling(temperature=0.0)}),
        (
            {"temperature": -3.5},
            {"sampling": Sampling(temperature=-3.5)},
        ),  # clamped where defaults are
        ({"top_p": 0.5}, {"sampling": Sampling(top_p=0.5)}),
        ({"top_k": 7}, {"sampling": Sampling(top_k=7)}),
        ({"min_p": 0.1}, {"sampling": Sampling(min_p=0.1)}),
        ({"presence_penalty": 1}, {"sampling": Sampling(presence_penalty=1.0)}),
        ({"repeat_penalty": 1.1}, {"sampling": Sampling(repetition_penalty=1.1)}),
        ({"seed": 0}, {"sampling": Sampling(seed=0)}),
        ({"seed": -1}, {}),
        ({"num_predict": 3}, {"limit": 3}),
        ({"num_predict": 3.0}, {"limit": 3}),
        ({"top_k": 40.0}, {"sampling": Sampling(top_k=40)}),
        ({"seed": 1.0}, {"sampling": Sampling(seed=1)}),
        ({"num_ctx": 100.0}, {"window": 100}),
        ({"repeat_last_n": 64}, {}),
        ({"repeat_last_n": 0}, {}),
        ({"repeat_last_n": -1.0}, {}),
        ({"num_gpu": 99.0}, {}),
        ({"num_predict": 0}, {"limit": 8192}),
        ({"num_predict": -1}, {"limit": 8192}),
        ({"num_predict": -2}, {"limit": 8192}),
        ({"num_ctx": 100}, {"window": 100}),
        ({"num_ctx": 8192}, {"window": 8192}),
        ({"num_ctx": 100, "num_predict": -1}, {"window": 100, "limit": 100}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": []}, {}),
        ({"stop": ["", "a"]}, {"stop": ("a",)}),
        ({"stop": ""}, {}),
        ({}, {}),
        (None, {}),
    ],
    ids=str,
)
def test_options(path: str, options: Json | None, changed: Json) -> None:
    assert asked(path, options=options) == replace(PLAIN, **changed)


NEUTRAL = {
    "frequency_penalty": 0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "tfs_z": 1.0, "typical_p": 1,
    "repeat_last_n": -1, "penalize_newline": True, "vocab_only": False, "embedding_only": False, "logits_all": False,
    "num_keep": 4, "num_batch": 512, "num_gpu": 99, "main_gpu": 0, "num_thread": 8, "numa": False, "low_vram": True,
    "f16_kv": True, "use_mmap": False, "use_mlock": True,
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_option_without_effect(name: str) -> None:
    assert asked(CHAT, options={name: NEUTRAL[name]}) == PLAIN


@pytest.mark.parametrize("name", Options.model_fields)
def test_an_option_that_is_null_is_unset(name: str) -> None:
    assert asked(GENERATE, options={name: None}) == PLAIN


@BOTH
@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"frequency_penalty": 0.1}, "options.frequency_penalty"),
        ({"mirostat": 1}, "options.mirostat"),
        ({"tfs_z": 0.9}, "options.tfs_z"),
        ({"typical_p": 0.9}, "options.typical_p"),
        ({"repeat_last_n": 64.5}, "options.repeat_last_n"),
        ({"penalize_newline": 1}, "options.penalize_newline"),
        ({"vocab_only": 0}, "options.vocab_only"),
        ({"top_k": True}, "options.top_k"),
        ({"num_ctx": 0.0}, "options.num_ctx"),
        ({"penalize_newline": False}, "options.penalize_newline"),
        ({"vocab_only": True}, "options.vocab_only"),
        ({"num_ctx": 0}, "options.num_ctx"),
        ({"num_ctx": 8193}, "options.num_ctx"),
        ({"temperature": "0.7"}, "options.temperature"),
        ({"temperature": True}, "options.temperature"),
        ({"top_k": 1.5}, "options.top_k"),
        ({"seed": "7"}, "options.seed"),
        ({"num_predict": "10"}, "options.num_predict"),
        ({"stop": 3}, "options.stop"),
        ({"stop": ["a", 3]}, "options.stop"),
        ({"adapter": "x"}, "options.adapter"),
    ],
    ids=str,
)
def test_an_option_is_refused(path: str, options: Json, place: str) -> None:
    error = refused(place, path, options=options)
    assert (error.place or "").startswith(place)


@BOTH
@pytest.mark.parametrize(
    "more",
    [
        {"keep_alive": "5m"}, {"keep_alive": 0}, {"keep_alive": -1}, {"keep_alive": 1.5}, {"truncate": True},
        {"truncate": False}, {"shift": True}, {"logprobs": False}, {"top_logprobs": 0}, {"format": ""}, {"think": False},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_without_effect(path: str, more: Json) -> None:
    assert asked(path, **more) == PLAIN


@pytest.mark.parametrize(
    "more",
    [{"suffix": ""}, {"template": ""}, {"context": []}, {"system": ""}, {"raw": False}, {"images": []}],
    ids=str,
)  # fmt: skip
def test_a_field_of_generate_without_effect(more: Json) -> None:
    assert asked(GENERATE, **more) == PLAIN


@pytest.mark.parametrize("tools", [[], None])
def test_no_tools(tools: list[Json] | None) -> None:
    assert asked(CHAT, tools=tools) == PLAIN


@BOTH
def test_a_field_that_is_null_is_unset(path: str) -> None:
    names = set(ENDPOINTS[path].body.model_fields) - {"model", "messages", "prompt"}
    exchange = opened(path, {**BASIC[path], **dict.fromkeys(names)})
    assert isinstance(exchange, Exchange)
    assert exchange.request == PLAIN
    assert exchange.stream


@BOTH
def test_stream_is_what_the_client_says(path: str) -> None:
    for value in (True, False):
        exchange = opened(path, {**BASIC[path], "stream": value})
        assert isinstance(exchange, Exchange)
        assert exchange.stream is value


@BOTH
@pytest.mark.parametrize(
    ("think", "effort"),
    [(True, "medium"), ("low", "low"), ("medium", "medium"), ("high", "high"), ("max", "max")],
)
def test_think(path: str, think: bool | str, effort: str) -> None:
    assert asked(path, think=think) == replace(PLAIN, effort=effort)


@BOTH
@pytest.mark.parametrize("think", ["", "none", "true", "silly", 1])
def test_think_is_refused(path: str, think: Any) -> None:
    refused("think: has to be true, false, low, medium, high or max", path, think=think)


@BOTH
@pytest.mark.parametrize("think", [True, "low"])
def test_thinking_that_the_model_cannot_do_is_refused(path: str, think: bool | str) -> None:
    plain = replace(CONTEXT, card=replace(CARD, reasoning=False))
    refused("does not support thinking", path, plain, think=think)
    assert isinstance(opened(path, {**BASIC[path], "think": False}, plain), Exchange)


@BOTH
def test_format(path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert asked(path, format="json") == replace(PLAIN, answer=Format("json"))
    assert asked(path, format=schema) == replace(PLAIN, answer=Format("schema", schema))
    assert asked(path, format={}) == replace(PLAIN, answer=Format("schema", {}))


@BOTH
@pytest.mark.parametrize("shape", ["xml", True, ["json"], 3])
def test_a_format_is_refused(path: str, shape: Any) -> None:
    refused("format", path, format=shape)


@BOTH
@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"keep_alive": []}, "keep_alive"),
        ({"options": []}, "options"),
        ({"temperature": 1}, "temperature"),
        ({"model": 3}, "model"),
    ],
    ids=str,
)
def test_a_field_is_refused(path: str, more: Json, place: str) -> None:
    assert (refused(place, path, **more).place or "").startswith(place)


@BOTH
def test_an_unknown_field_is_named(path: str) -> None:
    assert refused("unknown field logits", path, logits=1).cause == "unsupported_field"


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"prompt": ["a"]}, "prompt"),
        ({"tools": []}, "tools"),
        ({"width": 512}, "width"),
    ],
    ids=str,
)
def test_a_field_of_generate_is_refused(more: Json, place: str) -> None:
    refused(place, GENERATE, **more)


def test_a_system_prompt_of_generate() -> None:
    turns = (Turn("system", (Text("Be brief."),)), ASKED)
    assert asked(GENERATE, system="Be brief.") == replace(PLAIN, turns=turns)


def test_a_raw_prompt() -> None:
    assert asked(GENERATE, raw=True) == replace(PLAIN, turns=(), raw="Hello")
    shaped = asked(GENERATE, raw=True, format="json", think=False)
    assert shaped == replace(PLAIN, turns=(), raw="Hello", answer=Format("json"))


@pytest.mark.parametrize("more", [{"system": "x"}, {"think": True}, {"images": [PNG64]}], ids=["system", "think", "images"])  # fmt: skip
def test_raw_stands_alone(more: Json) -> None:
    assert refused("raw cannot be combined", GENERATE, raw=True, **more).place == "raw"


@pytest.mark.parametrize("value", [PNG64, f"data:image/png;base64,{PNG64}"], ids=["base64", "url"])
def test_images(value: str) -> None:
    turns = (Turn("user", (RED, Text("Hello"))),)
    assert asked(GENERATE, images=[value]) == replace(PLAIN, turns=turns)
    assert chat({**HELLO, "images": [value]}) == replace(PLAIN, turns=turns)
    assert asked(GENERATE, prompt="", images=[value]).turns == (Turn("user", (RED, Text(""))),)


@BOTH
@pytest.mark.parametrize(
    "value", ["https://example.com/cat.png", "file:///cat.png", "???", PNG64[:-8]]
)
def test_an_image_is_refused(path: str, value: str) -> None:
    body = {"images": [value]}
    if path == CHAT:
        body = {"messages": [{**HELLO, **body}]}
    refused("image", path, **body)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("painted:1m", "painted:1m"),
        ("painted", "painted:1m"),
        ("painted:latest", "painted:1m"),
        ("Painted:1M", "painted:1m"),
        ("painted:1m:latest", "painted:1m"),
        ("PAINTED+Pirate", "painted:1m+pirate"),
        ("painted:1m+pirate:latest", "painted:1m+pirate"),
        ("painted:1m+pirate", "painted:1m+pirate"),
        ("painted+pirate", "painted:1m+pirate"),
    ],
)
def test_model_names(name: str, served: str) -> None:
    assert asked(CHAT, model=name).model == served


@BOTH
@pytest.mark.parametrize("name", ["", "other", "painted:2m", "painted+", "painted:1m+", "pirate", "painted:1m:latest+pirate"])  # fmt: skip
def test_another_model_is_refused(path: str, name: str) -> None:
    assert refused("is not served here", path, model=name).cause == "model_not_found"


LOADED = {"model": MODEL, "created_at": "2023-11-14T22:13:20.250000Z", "done": True, "done_reason": "load"}  # fmt: skip


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": None}, {"stream": False, "keep_alive": 0}], ids=str)  # fmt: skip
def test_a_chat_without_messages_loads(body: Json) -> None:
    assert opened(CHAT, body) == {**LOADED, "message": {"role": "assistant", "content": ""}}


@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"prompt": None}, {"system": "x", "think": True}], ids=str)  # fmt: skip
def test_an_empty_prompt_loads(body: Json) -> None:
    assert opened(GENERATE, body) == {**LOADED, "response": ""}


@BOTH
def test_a_load_is_refused_as_a_generation_would_be(path: str) -> None:
    for body in ({"model": "other"}, {"options": {"num_ctx": 9999}}):
        with pytest.raises(RequestError):
            opened(path, body)
