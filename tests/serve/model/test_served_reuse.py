"""What earlier requests left in the cache shows in every dialect's figures, and changes no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact
from headrace.engine.pages import PAGE_TOKENS
from headrace.engine.prefix_disk import DiskOptions
from headrace.llm import LLM
from serve.model.asking import ASKS, CACHED, THOUGHTFUL, Asked, Json, Server, Told, serving

EVERY = pytest.mark.parametrize("dialect", CACHED)  # Ollama's form has no such figure
SYSTEM = (
    "You answer questions about rivers and mills, in few words, and never more than asked. " * 3
)


def asked(*turns: str, system: str = SYSTEM) -> Asked:
    """A conversation; the user begins it."""
    roles = ("user", "assistant")
    told: list[Json] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return Asked([{"role": "system", "content": system}, *told], 10)


def ask(server: Server, dialect: str, one: Asked, *, stream: bool = False) -> Told:
    told: Told = ASKS[dialect](server, one, stream=stream)
    return told


@pytest.fixture(autouse=True)
def nothing_known(request: pytest.FixtureRequest) -> None:
    if "wild" in request.fixturenames:
        request.getfixturevalue("wild").forget()


@EVERY
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_exact_repeat(wild: LLM, wild_server: Server, dialect: str, stream: bool) -> None:
    """All but the last token, whose logits are wanted."""
    first = ask(wild_server, dialect, asked("What is a weir?"), stream=stream)
    again = ask(wild_server, dialect, asked("What is a weir?"), stream=stream)
    assert first.cached == 0
    assert again.cached == again.prompt - 1
    assert (again.text, again.prompt, again.new) == (first.text, first.prompt, first.new)


@EVERY
def test_the_next_turn_of_a_conversation(wild: LLM, wild_server: Server, dialect: str) -> None:
    first = ask(wild_server, dialect, asked("What is a weir?"))
    following = asked("What is a weir?", "A dam.", "And a race?")
    second = ask(wild_server, dialect, following)
    assert first.prompt <= second.cached < second.prompt
    wild.forget()
    alone = ask(wild_server, dialect, following)
    assert (alone.text, alone.cached) == (second.text, 0)


@EVERY
def test_a_system_prompt_that_others_share(wild: LLM, wild_server: Server, dialect: str) -> None:
    ask(wild_server, dialect, asked("What is a weir?"))
    other = ask(wild_server, dialect, asked("Who built the first mill?"))
    assert len(SYSTEM) <= other.cached < other.prompt


@EVERY
def test_dialects_share_the_cache(wild: LLM, wild_server: Server, dialect: str) -> None:
    ask(wild_server, "ollama", asked("What is a weir?"))
    told = ask(wild_server, dialect, asked("What is a weir?"))
    assert told.cached == told.prompt - 1


@EVERY
def test_another_system_prompt_shares_nothing(wild: LLM, wild_server: Server, dialect: str) -> None:
    ask(wild_server, dialect, asked("What is a weir?"))
    other = ask(wild_server, dialect, asked("What is a weir?", system="No. " + SYSTEM))
    assert other.cached < PAGE_TOKENS


@EVERY
def test_a_schema_shares_what_was_read(wild: LLM, wild_server: Server, dialect: str) -> None:
    """The grammar is no part of the prompt."""
    ask(wild_server, dialect, asked("What is a weir?"))
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    told = ask(wild_server, dialect, replace(asked("What is a weir?"), schema=schema))
    assert told.cached == told.prompt - 1


@EVERY
def test_without_reuse_there_is_none(wild: LLM, dialect: str) -> None:
    with serving(wild, reuse=False) as server:
        told = [ask(server, dialect, asked("What is a weir?")) for _ in range(2)]
    assert [one.cached for one in told] == [0, 0]
    assert told[0].text == told[1].text


def test_a_restart_finds_it_on_disk(wild_artifact: Artifact, tmp_path: Path) -> None:
    texts = set()
    for number, dialect in enumerate(CACHED):
        with (
            LLM(
                wild_artifact.path,
                threads=1,
                max_context=1024,
                prefix_disk=DiskOptions(tmp_path / "prefixes", min_tokens=16),
            ) as model,
            serving(model) as server,
        ):
            told = ask(server, dialect, asked("What is a weir?"))
            texts.add(told.text)
            assert told.cached == (0 if number == 0 else told.prompt - 1)
            assert model.engine.stats.disk_tokens == told.cached
            again = ask(server, dialect, asked("What is a weir?"))
            assert (again.cached, model.engine.stats.disk_tokens) == (told.prompt - 1, 0)
    assert len(texts) == 1


# Reasoning


@EVERY
def test_a_conversation_that_is_replayed_without_its_reasoning(
    thinking: LLM, thinking_server: Server, dialect: str
) -> None:
    """Everything up to the answer is there; what the answer began with was reasoning, so that is not."""
    thinking.forget()
    first = replace(asked("What is a weir?"), more=THOUGHTFUL[dialect])
    told = ask(thinking_server, dialect, first)
    assert told.reasoning
    following = replace(asked("What is a weir?", "A dam.", "And a race?"), more=THOUGHTFUL[dialect])
    second = ask(thinking_server, dialect, following)
    opened = len(thinking.tokenize("\n")) + 1  # <think> and its line end
    assert second.cached == told.prompt - opened
    thinking.forget()
    alone = ask(thinking_server, dialect, following)
    assert (alone.reasoning, alone.text) == (second.reasoning, second.text)


@pytest.mark.parametrize("dialect", ASKS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_reasoning_is_told_apart(thinking_server: Server, dialect: str, stream: bool) -> None:
    """A limit falls into it: there is no answer yet."""
    one = replace(asked("What is a weir?"), more=THOUGHTFUL[dialect])
    told = ask(thinking_server, dialect, one, stream=stream)
    assert told.reasoning
    assert (told.text, told.new) == ("", 10)
    plain = ask(thinking_server, dialect, asked("What is a weir?"), stream=stream)
    assert plain.reasoning == ""
    assert plain.text
