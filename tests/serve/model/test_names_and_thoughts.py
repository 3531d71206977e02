"""Adapters by name, sampling values as clients send them, and reasoning in front of what a grammar demands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

import loras
from headrace.artifact.container import Artifact
from headrace.llm import LLM
from headrace.values import Message
from serve.model.asking import ASKS, NAME, REASONS, THOUGHTFUL, Asked, Json, Server, serving, user
from serve.model.test_structured import SCHEMAS, TOOLS, valid

EVERY = pytest.mark.parametrize("dialect", ASKS)
CHAT = {"top_p": 0.8, "top_k": 20, "presence_penalty": 1.5}


@pytest.fixture(scope="module")
def adapted(wild_artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("pirate") / "pirate"
    pirate = loras.make(path, wild_artifact)
    with LLM(
        wild_artifact.path,
        threads=1,
        max_context=1024,
        parallel=4,
        adapters={"pirate": pirate.path},
    ) as model:
        yield model


@pytest.fixture(scope="module")
def adapted_server(adapted: LLM) -> Iterator[Server]:
    with serving(adapted) as server:
        yield server


@EVERY
def test_a_name_selects_an_adapter(adapted: LLM, adapted_server: Server, dialect: str) -> None:
    texts = {}
    for name, adapter in ((NAME, None), (f"{NAME}+pirate", "pirate")):
        asked = Asked(user("Hello"), 20, model=name)
        texts[name] = ASKS[dialect](adapted_server, asked, stream=True).text
        turns = [Message("user", "Hello")]
        wanted = adapted.chat(turns, temperature=0.0, max_tokens=20, adapter=adapter, **CHAT)  # type: ignore[arg-type]
        assert texts[name] == wanted.text
    assert len(set(texts.values())) == 2


def test_adapters_are_listed(adapted_server: Server) -> None:
    assert [m.id for m in adapted_server.openai.models.list()] == [NAME, f"{NAME}+pirate"]


def test_an_adapter_reuses_nothing_of_its_base(adapted: LLM, adapted_server: Server) -> None:
    adapted.forget()
    first = ASKS["chat"](adapted_server, Asked(user("Hello there"), 4), stream=False)
    other = Asked(user("Hello there"), 4, model=f"{NAME}+pirate")
    assert ASKS["chat"](adapted_server, other, stream=False).cached == 0
    assert ASKS["chat"](adapted_server, other, stream=False).cached == first.prompt - 1


@pytest.mark.parametrize(
    "value", ["1e999", "-1e999", "1" + "0" * 320, "-5", "7.5"], ids=lambda text: text[:6]
)
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "min_p"])
def test_values_out_of_range_are_brought_into_it(
    wild_server: Server, field: str, value: str
) -> None:
    """They are sent as text: JSON has no infinity, but 1e999 reads as one."""
    plain = {"model": NAME, "messages": user("x"), "max_tokens": 4, "seed": 5}
    text = json.dumps(plain)[:-1] + f', "{field}": {value}}}'
    answer = wild_server.http.post(
        "/v1/chat/completions", content=text, headers={"content-type": "application/json"}
    )
    if "999" in value or len(value) > 300:  # what no double holds may be refused by name
        assert answer.status_code in (200, 400)
        assert answer.status_code == 200 or answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200


@EVERY
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_schema_behind_reasoning(brief_server: Server, dialect: str, stream: bool) -> None:
    """The grammar lets the model reason first, and then holds it to the schema."""
    thoughts = 0
    for number in range(4):
        messages = user(f"x{number}")
        asked = Asked(messages, 900, 2.0, schema=SCHEMAS["colour"], more=THOUGHTFUL[dialect])
        told = ASKS[dialect](brief_server, asked, stream=stream)
        assert told.reason == REASONS[dialect]["stop"]
        jsonschema.validate(json.loads(told.text), SCHEMAS["colour"])
        thoughts += bool(told.reasoning)
    assert thoughts


ONE: dict[str, Json] = {
    "chat": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "gateway": {"providerOptions": {"headrace": {"parallelToolCalls": False}}},
}


@pytest.mark.parametrize("dialect", ONE)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_demanded_call_behind_reasoning(brief_server: Server, dialect: str, stream: bool) -> None:
    more = THOUGHTFUL[dialect] | ONE[dialect]
    asked = Asked(user("x"), 900, 2.0, tools=TOOLS, choice="required", more=more)
    told = ASKS[dialect](brief_server, asked, stream=stream)
    valid(told.calls)
    assert (told.text, told.reason) == ("", REASONS[dialect]["calls"])


def test_thoughts_and_answers_of_many_seeds(brief_server: Server) -> None:
    """Whole and streamed agree, and no tag is in either part."""
    thoughts = 0
    for seed in range(12):
        asked = Asked(
            user(f"x{seed}"), 40, 2.0, seed, more=THOUGHTFUL["chat"] | {"presence_penalty": 2}
        )
        whole = ASKS["chat"](brief_server, asked, stream=False)
        told = ASKS["chat"](brief_server, asked, stream=True)
        assert (told.reasoning, told.text, told.new) == (whole.reasoning, whole.text, whole.new)
        assert "think>" not in whole.reasoning + whole.text
        thoughts += bool(whole.reasoning)
    assert thoughts


def test_tokens_of_reasoning_are_counted(thinking_server: Server) -> None:
    whole = thinking_server.openai.chat.completions.create(
        model=NAME, messages=user("x"), max_tokens=9, reasoning_effort="low"
    )
    assert whole.usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens == whole.usage.completion_tokens == 9


def test_a_model_that_does_not_reason_ignores_the_wish(wild_server: Server) -> None:
    for dialect in ("chat", "messages", "gateway"):
        asked = Asked(user("x"), 8, more=THOUGHTFUL[dialect])
        told = ASKS[dialect](wild_server, asked, stream=False)
        assert told.reasoning == ""
        assert told.text == ASKS[dialect](wild_server, Asked(user("x"), 8), stream=False).text


def test_a_raw_prompt_has_no_template(real: LLM, real_server: Server) -> None:
    wanted = real.generate("The sea is", raw=True, temperature=0.0, max_tokens=12, **CHAT)  # type: ignore[arg-type]
    answer = real_server.ollama.generate(
        model=NAME, prompt="The sea is", raw=True, options={"temperature": 0, "num_predict": 12}
    )
    assert answer.response == wanted.text
    assert answer.prompt_eval_count == len(real.tokenize("The sea is"))


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    """A raw prompt it takes."""
    import tiny
    from headrace.artifact.convert import convert

    checkpoint = tiny.write_checkpoint(tmp_path / "source", "llama")
    (checkpoint / "chat_template.jinja").unlink()
    artifact = convert(checkpoint, tmp_path / "artifact")
    with LLM(artifact.path, threads=1, max_context=256) as model, serving(model) as server:
        with pytest.raises(Exception, match="no chat template") as found:
            ASKS["chat"](server, Asked(user("x"), 3), stream=False)
        assert found.value.status_code == 400  # type: ignore[attr-defined]
        told = server.ollama.generate(model=NAME, prompt="x", raw=True, options={"num_predict": 3})
        assert told.eval_count == 3
