"""The default model behind every dialect: what a client gets is what the Python API says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from headrace.completion import Completion
from headrace.llm import LLM
from headrace.values import Message
from serve.model.asking import (
    ASKS,
    REASONS,
    SEEDED,
    Asked,
    GatewayError,
    Json,
    Server,
    Told,
    user,
)

CHAT: Any = {"top_p": 0.8, "top_k": 20, "presence_penalty": 1.5}  # the specification's table
MESSAGES = [
    {"role": "system", "content": "You answer in short sentences."},
    {"role": "user", "content": "What is the sea like in winter?"},
]
HISTORY = [
    *MESSAGES,
    {"role": "assistant", "content": "It is cold and grey."},
    {"role": "user", "content": "And in summer?"},
]
STREAM = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
EVERY = pytest.mark.parametrize("dialect", ASKS)


def ask(server: Server, dialect: str, asked: Asked, *, stream: bool) -> Told:
    told: Told = ASKS[dialect](server, asked, stream=stream)
    return told


def said(llm: LLM, messages: Sequence[Json], **options: Any) -> Completion:
    """What the Python API answers."""
    turns = [Message(m["role"], m["content"]) for m in messages]
    return llm.chat(turns, **{**CHAT, "temperature": 0.0, "max_tokens": 32, **options})


@EVERY
@STREAM
def test_an_answer_is_that_of_the_python_api(
    real: LLM, real_server: Server, dialect: str, stream: bool
) -> None:
    for messages in (MESSAGES, HISTORY):
        wanted = said(real, messages)
        told = ask(real_server, dialect, Asked(messages), stream=stream)
        assert told.text == wanted.text
        assert wanted.text.strip()
        assert told.prompt == wanted.stats.prompt_tokens
        assert told.new == wanted.stats.new_tokens
        kind = "length" if wanted.finish_reason == "length" else "stop"
        assert told.reason == REASONS[dialect][kind]  # type: ignore[index]
        if stream:
            assert told.pieces > 5


@EVERY
def test_an_answer_that_the_model_ends(real: LLM, real_server: Server, dialect: str) -> None:
    messages = user("Say hello.")
    wanted = said(real, messages, max_tokens=200)
    assert wanted.finish_reason == "stop"
    told = ask(real_server, dialect, Asked(messages, limit=200), stream=True)
    assert (told.text, told.reason) == (wanted.text, REASONS[dialect]["stop"])
    assert told.new == wanted.stats.new_tokens


@EVERY
@pytest.mark.parametrize("limit", [2, 7])
def test_an_answer_shorter_than_eight_tokens_comes_in_pieces(
    real: LLM, real_server: Server, dialect: str, limit: int
) -> None:
    """Nothing is held back until there is more of it."""
    told = ask(real_server, dialect, Asked(MESSAGES, limit=limit), stream=True)
    assert told.new == limit
    assert told.text == said(real, MESSAGES, max_tokens=limit).text
    assert 1 < told.pieces <= limit


@EVERY
@STREAM
def test_no_limit_is_a_quarter_of_the_window_or_512(
    real_server: Server, dialect: str, stream: bool
) -> None:
    """Anthropic's has to give one."""
    if dialect == "messages":
        with pytest.raises(TypeError):
            ask(real_server, dialect, Asked(MESSAGES, limit=None), stream=stream)
        return
    asked = Asked(user("Count from one to a thousand: one, two, three"), limit=None)
    told = ask(real_server, dialect, asked, stream=stream)
    assert told.new <= (512 if dialect == "ollama" else 256)


@pytest.mark.parametrize("dialect", SEEDED)
@STREAM
def test_a_seed_decides(real: LLM, real_server: Server, dialect: str, stream: bool) -> None:
    answers = {}
    for seed in (0, 7, 2**63):
        asked = Asked(MESSAGES, temperature=0.9, seed=seed)
        told = ask(real_server, dialect, asked, stream=stream)
        assert told.text == said(real, MESSAGES, temperature=0.9, seed=seed).text
        assert told.text == ask(real_server, dialect, asked, stream=stream).text
        answers[seed] = told.text
    assert len(set(answers.values())) == 3


@pytest.mark.parametrize("dialect", SEEDED)
def test_seeds_of_any_size_are_seeds_below_2_to_the_64(
    real: LLM, real_server: Server, dialect: str
) -> None:
    """Negative ones too; Ollama's say that it is drawn."""
    for seed, same in ((-1, 2**64 - 1), (2**64 + 5, 5), (10**30, 10**30 % 2**64)):
        if seed < 0 and dialect == "ollama":
            continue
        asked = Asked(MESSAGES, temperature=1.0, seed=seed, limit=12)
        wanted = said(real, MESSAGES, temperature=1.0, seed=same, max_tokens=12)
        assert ask(real_server, dialect, asked, stream=False).text == wanted.text


def test_a_negative_seed_of_ollama_is_none(real_server: Server) -> None:
    asked = Asked(MESSAGES, temperature=1.5, seed=-1, limit=24)
    texts = {ask(real_server, "ollama", asked, stream=False).text for _ in range(4)}
    assert len(texts) > 1


@EVERY
def test_without_a_seed_it_is_drawn(real_server: Server, dialect: str) -> None:
    """The default temperature is not 0."""
    asked = Asked(MESSAGES, temperature=None, limit=24)
    texts = {ask(real_server, dialect, asked, stream=True).text for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize("dialect", [name for name in ASKS if name != "responses"])
@STREAM
def test_stop_strings_end_an_answer(
    real: LLM, real_server: Server, dialect: str, stream: bool
) -> None:
    whole = said(real, MESSAGES).text
    stop = whole[20:24]
    wanted = said(real, MESSAGES, stop=(stop, "never said"))
    asked = Asked(MESSAGES, stop=(stop, "never said"))
    told = ask(real_server, dialect, asked, stream=stream)
    assert told.text == wanted.text == whole[: whole.index(stop)]
    assert told.new == wanted.stats.new_tokens
    assert told.reason == REASONS[dialect]["stop string"]


@pytest.mark.parametrize("dialect", [name for name in ASKS if name != "responses"])
def test_a_stop_string_of_blanks_ends_where_it_is_complete(
    real: LLM, real_server: Server, dialect: str
) -> None:
    """Whitespace at the end is not told until more follows, but it stops."""
    messages = user("Give me a numbered list of three fruits.")
    wanted = said(real, messages, max_tokens=60, stop=("\n",))
    asked = Asked(messages, limit=60, stop=("\n",))
    told = ask(real_server, dialect, asked, stream=dialect != "chat")
    assert told.text == wanted.text
    assert "\n" in said(real, messages, max_tokens=60).text
    assert told.new == wanted.stats.new_tokens
    assert told.reason == REASONS[dialect]["stop string"]


def test_anthropic_names_the_stop_string(real: LLM, real_server: Server) -> None:
    stop = said(real, MESSAGES).text[20:24]
    message = real_server.anthropic.messages.create(
        model="painted:1m", max_tokens=32, messages=user("x"), stop_sequences=["zq"]
    )
    assert message.stop_sequence is None
    message = real_server.anthropic.messages.create(
        model="painted:1m",
        max_tokens=32,
        system=MESSAGES[0]["content"],
        messages=MESSAGES[1:],
        extra_body={"temperature": 0},
        stop_sequences=["never said", stop],
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def failed(server: Server, dialect: str, asked: Asked, *, stream: bool = False) -> tuple[int, str]:
    """Status and message of a refusal, by the client's own error."""
    try:
        ask(server, dialect, asked, stream=stream)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return error.status_code, error.message
    except GatewayError as error:
        return error.status_code, error.body["message"]
    except Exception as error:
        return error.status_code, str(error)  # type: ignore[attr-defined]
    raise AssertionError("it was answered")


@EVERY
@STREAM
def test_an_unknown_model_is_named(real_server: Server, dialect: str, stream: bool) -> None:
    asked = Asked(MESSAGES, model="gpt-5")
    status, message = failed(real_server, dialect, asked, stream=stream)
    assert status == (404 if dialect == "messages" else 400)
    assert "gpt-5" in message
    assert "painted:1m" in message
    status, message = failed(real_server, dialect, replace(asked, model="painted:1m+pirate"))
    assert "painted:1m+pirate" in message


@EVERY
@STREAM
def test_a_prompt_over_the_window_has_both_numbers(
    real: LLM, real_server: Server, dialect: str, stream: bool
) -> None:
    messages = user("word " * 1100)
    count = len(real.chat_ids([Message("user", messages[0]["content"])]))
    status, message = failed(real_server, dialect, Asked(messages), stream=stream)
    assert status == 400
    assert str(count) in message
    assert "1024" in message


def test_its_code_is_context_length_exceeded(real_server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        ask(real_server, "chat", Asked(user("word " * 1100)), stream=False)
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as found:
        ask(real_server, "responses", Asked(user("word " * 600_000)), stream=False)
    assert found.value.code == "context_length_exceeded"  # its tokens were not counted


@pytest.mark.parametrize(
    ("dialect", "more"),
    [
        ("chat", {"extra_body": {"options": {"num_ctx": 64}}}),
        ("ollama", {"options": {"num_ctx": 64}}),
        ("gateway", {"providerOptions": {"headrace": {"numCtx": 64}}}),
    ],
)
def test_num_ctx_is_a_smaller_window(real_server: Server, dialect: str, more: Json) -> None:
    long = Asked(user("word " * 100), more=more)
    status, message = failed(real_server, dialect, long)
    assert status == 400
    assert "64" in message
    told = ask(
        real_server, dialect, Asked(user("Tell a long story."), limit=500, more=more), stream=False
    )
    assert told.prompt + told.new == 64
    assert told.reason == REASONS[dialect]["length"]


@STREAM
def test_a_window_that_fills_up_is_told_apart_from_a_limit(
    wild_server: Server, stream: bool
) -> None:
    """Anthropic's form has a name for it."""
    messages = user("x" * 1984)
    filled = ask(wild_server, "messages", Asked(messages, limit=500), stream=stream)
    assert filled.prompt + filled.new == 2048
    assert filled.reason == "model_context_window_exceeded"
    cut = ask(wild_server, "messages", Asked(messages, limit=2), stream=stream)
    assert (cut.new, cut.reason) == (2, "max_tokens")
