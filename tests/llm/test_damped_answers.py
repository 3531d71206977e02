"""Damped decoding in every way to ask, and under grammars: an answer of the grammar, with drafts the same."""

from __future__ import annotations

import pytest

from headrace.engine.damped import DampedParams
from headrace.errors import SettingError
from headrace.llm import LLM
from headrace.values import Message, SamplingParams
from llm.schemas import SCHEMAS
from llm.test_constrained import check

ASK = "Answer in JSON: {}, then say Answer in JSON: {}."
STRONG = DampedParams(alpha_q15=2**19)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_kept_and_drafts_change_nothing(wild: LLM, name: str) -> None:
    schema = SCHEMAS[name]
    done = wild.generate(ASK, schema=schema, damped=STRONG, max_tokens=80)
    check(schema, done)
    for depth in (1, 8, "auto"):
        again = wild.generate(ASK, schema=schema, damped=STRONG, max_tokens=80, speculate=depth)  # type: ignore[arg-type]
        assert again == done
        assert again.stats.fingerprint == done.stats.fingerprint


def test_forced_tokens_are_history_too(wild: LLM) -> None:
    """What a grammar forces was generated as well."""
    tokens = wild.generate("x", regex="abab[ab]{12}", damped=STRONG).text
    assert tokens[:4] == "abab"
    assert set(tokens[4:]) == {"a", "b"}


def test_every_way_to_ask(wild: LLM) -> None:
    asked = [Message("user", "hello")]
    done = wild.chat(asked, damped=True, max_tokens=20)
    assert done == wild.chat(asked, damped=DampedParams(), temperature=0.0, max_tokens=20)
    assert "".join(wild.stream_chat(asked, damped=True, max_tokens=20)) == done.text
    assert wild.generate("hello", damped=True, max_tokens=20) == done
    assert "".join(wild.stream("hello", damped=True, max_tokens=20)) == done.text
    assert wild.generate_ids(wild.chat_ids(asked), damped=True, max_tokens=20) == done
    plain = wild.chat(asked, temperature=0.0, max_tokens=20)
    assert plain == wild.chat(asked, damped=False, temperature=0.0, max_tokens=20)
    assert plain != done


def test_a_loop_of_a_real_model_ends(real: LLM) -> None:
    def repeated(tokens: tuple[int, ...]) -> int:
        fours = [tokens[i : i + 4] for i in range(len(tokens) - 3)]
        return len(fours) - len(set(fours))

    plain = real.generate("Tell me about the sea.", temperature=0.0, max_tokens=160)
    damped = real.generate("Tell me about the sea.", damped=True, max_tokens=160)
    assert repeated(damped.tokens) < repeated(plain.tokens)


def test_what_cannot_be_is_refused_before_anything_is_read(wild: LLM) -> None:
    with pytest.raises(SettingError, match="temperature is 0.7"):
        wild.stream("x", damped=True, temperature=0.7)
    with pytest.raises(SettingError, match="it must be True or DampedParams"):
        wild.stream("x", damped="yes")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="temperature is 0.7"):
        wild.stream_ids([1, 2], SamplingParams(), damped=STRONG)
