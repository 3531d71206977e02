"""Answers that have to satisfy something: every one that ends does, by an independent validator, whatever the model."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.completion import Completion
from headrace.errors import ConstraintError, GrammarError, InputError
from headrace.llm import LLM
from headrace.values import Message, SamplingParams
from llm.schemas import SCHEMAS, SHORT, record

ASK = "Answer in JSON."
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
LIMIT = 400


def check(schema: Any, done: Completion) -> bool:
    """Whether the answer is whole; then it is valid, and compact but for a space after a comma or a colon."""
    outside = STRING.sub('""', done.text)
    assert not re.search(r"[\n\t\r]|  | [,:\]}]|[\[{] ", outside)
    assert not re.search(r"[\x00-\x1f]", done.text)
    if done.finish_reason != "stop":
        assert done.finish_reason == "length"
        return False
    value = json.loads(done.text)
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    kind(schema).validate(value)
    return True


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_random_model_keeps_to_a_schema(wild: LLM, name: str) -> None:
    schema = SCHEMAS[name]
    done = [wild.generate(ASK, schema=schema, max_tokens=LIMIT, temperature=0.0)]
    done += [
        wild.generate(ASK, schema=schema, max_tokens=LIMIT, temperature=t, seed=s)
        for s, t in ((1, 0.7), (2, 1.0), (3, 5.0), (4, 100.0))
    ]
    assert sum(check(schema, d) for d in done) > 0 or name == "tree"


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_real_model_keeps_to_a_schema(real: LLM, name: str) -> None:
    schema = SCHEMAS[name]
    check(schema, real.generate(ASK, schema=schema, max_tokens=60, temperature=0.0))
    check(schema, real.generate(ASK, schema=schema, max_tokens=40, temperature=1.0, seed=1))


@pytest.mark.parametrize("name", ["date", "uuid", "ipv4", "ipv6", "email"])
def test_formats_are_kept(wild: LLM, name: str) -> None:
    schema = SCHEMAS[name]
    for seed in range(6):
        done = wild.generate(ASK, schema=schema, max_tokens=LIMIT, temperature=3.0, seed=seed)
        if check(schema, done):
            jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.FormatChecker()
            ).validate(json.loads(done.text))


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    low = st.integers(-30, 30)
    return st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, SHORT, {"const": "a"}, {"enum": [1, "é\n", None]}]),
        st.tuples(low, st.integers(0, 40)).map(
            lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}
        ),
        st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
            lambda b: {"type": "string", "minLength": b[0], "maxLength": b[0] + b[1]}
        ),
    )  # fmt: skip


def grown(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Arrays, unions and objects, open and closed, of smaller schemas."""
    keys = st.sampled_from(["a", "b", "ab", "é", "", 'q"', "\t"])
    objects = st.dictionaries(keys, inner, max_size=4).flatmap(
        lambda properties: st.builds(
            lambda required, rest: record(properties, required=required) | rest,
            st.lists(st.sampled_from(sorted(properties) or ["z"]), unique=True, max_size=4 if properties else 0),
            st.sampled_from([{}, {"additionalProperties": {"type": "null"}, "maxProperties": 9}]) if not properties else st.just({}),
        )
    )  # fmt: skip
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return st.one_of(objects, arrays, unions)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.recursive(leaves(), grown, max_leaves=8),
    st.sampled_from([0.0, 1.0, 100.0]),
    st.integers(0, 99),
)
def test_any_schema_is_kept(wild: LLM, schema: Any, temperature: float, seed: int) -> None:  # fmt: skip
    done = wild.generate(ASK, schema=schema, max_tokens=LIMIT, temperature=temperature, seed=seed)
    check(schema, done)


def test_the_same_seed_gives_the_same_answer(wild: LLM, real: LLM) -> None:
    for llm in (wild, real):
        options = {"schema": SCHEMAS["person"], "seed": 5, "temperature": 1.0, "max_tokens": 120}
        first, second = (llm.generate(ASK, **options) for _ in range(2))  # type: ignore[arg-type]
        assert first == second
        assert first.stats.fingerprint == second.stats.fingerprint
        assert llm.generate(ASK, **{**options, "seed": 6}) != first  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["person", "const", "one of kinds", "tree", "record"])
def test_reading_spans_at_once_changes_nothing(
    wild: LLM, real: LLM, name: str, temperature: float
) -> None:
    """Tokens, positions, logits of the picks: those of a pass for every forced token."""
    for llm in (wild, real):
        ids = llm.prompt_ids(ASK)
        grammar = llm.compile(schema=SCHEMAS[name])
        params = SamplingParams(
            temperature=temperature, seed=3, max_tokens=60, repetition_penalty=1.1
        )
        runs = []
        for jump in (True, False):
            steps = llm.engine.generate(ids, params, constraint=grammar.start(), jump_forward=jump)
            tokens = list(steps)
            assert llm.engine.stats is not None
            stats = llm.engine.stats
            runs.append((tokens, stats.fingerprint, stats.finish_reason, stats.forced_tokens))
        assert runs[0] == runs[1]
        assert runs[0][3] > 0


def test_forced_tokens_are_counted_and_not_read_one_by_one(real: LLM) -> None:
    done = real.generate(ASK, schema={"const": {"a long key": [1, 2, 3]}}, temperature=0.0)
    assert json.loads(done.text) == {"a long key": [1, 2, 3]}
    assert done.stats.forced_tokens > 5
    assert 1 <= done.stats.forced_spans < done.stats.forced_tokens
    free = real.generate(ASK, temperature=0.0, max_tokens=3).stats
    assert (free.forced_tokens, free.forced_spans, free.constraint_seconds) == (0, 0, 0)


def test_an_answer_without_any_choice_needs_no_pass(wild: LLM) -> None:
    done = wild.generate(ASK, regex="only this")
    assert (done.text, done.finish_reason) == ("only this", "stop")
    assert done.stats.forced_tokens == done.stats.new_tokens == len("only this") + 1
    assert wild.generate("And?", max_tokens=4, seed=1) == wild.generate(
        "And?", max_tokens=4, seed=1
    )


def test_a_limit_says_length(wild: LLM) -> None:
    for limit in range(1, 12):
        done = wild.generate(ASK, regex="only this", max_tokens=limit)
        assert done.text == "only this"[:limit]
        assert done.finish_reason == ("length" if limit < len("only this") else "stop")
        assert done.stats.new_tokens == min(limit, len("only this") + 1)


def test_a_limit_inside_a_character_leaves_it_out(wild: LLM) -> None:
    done = wild.generate(ASK, regex="a🙂", max_tokens=3)
    assert (done.text, done.finish_reason) == ("a", "length")


def test_an_unbounded_answer_ends_at_its_limit(wild: LLM) -> None:
    done = wild.generate(ASK, regex="a+b", max_tokens=30, temperature=0.0)
    assert re.fullmatch("a+b?", done.text)
    assert done.finish_reason in ("length", "stop")


def test_every_way_to_ask_is_constrained(wild: LLM) -> None:
    options = {"schema": SCHEMAS["record"], "seed": 4, "max_tokens": LIMIT}
    done = wild.generate(ASK, **options)  # type: ignore[arg-type]
    asked = [Message("user", ASK)]
    assert "".join(wild.stream(ASK, **options)) == done.text  # type: ignore[arg-type]
    assert wild.chat(asked, **options) == done  # type: ignore[arg-type]
    assert "".join(wild.stream_chat(asked, **options)) == done.text  # type: ignore[arg-type]
    assert wild.generate_ids(wild.prompt_ids(ASK), **options) == done  # type: ignore[arg-type]
    compiled = wild.compile(schema=SCHEMAS["record"])
    assert wild.generate(ASK, grammar=compiled, seed=4, max_tokens=LIMIT) == done
    assert (
        wild.generate(ASK, schema=json.dumps(SCHEMAS["record"]), seed=4, max_tokens=LIMIT) == done
    )


def test_a_stop_string_ends_a_constrained_answer(wild: LLM) -> None:
    done = wild.generate(ASK, regex="one,two,three", stop=(",t",))
    assert (done.text, done.finish_reason) == ("one", "stop")


def test_what_cannot_be_asked_is_refused_before_anything_runs(wild: LLM, real: LLM) -> None:
    with pytest.raises(InputError, match="one of"):
        wild.generate(ASK, schema={}, regex="a")
    with pytest.raises(InputError, match="one of"):
        wild.compile()
    with pytest.raises(GrammarError, match="uniqueItems"):
        wild.stream(ASK, schema={"type": "array", "uniqueItems": True})
    with pytest.raises(InputError, match="neither"):
        wild.generate(ASK, grammar=real.compile(regex="a"))
    with pytest.raises(InputError):
        wild.generate(ASK, grammar=5)  # type: ignore[arg-type]
    assert wild.generate(ASK, max_tokens=2, seed=1).stats.new_tokens == 2


def test_a_dead_end_is_a_typed_error_and_the_model_goes_on(wild: LLM) -> None:
    """What was written up to there is told; the next generation is as if nothing had been."""
    before = wild.generate(ASK, max_tokens=5, seed=1)
    with pytest.raises(ConstraintError) as caught:
        wild.generate(ASK, grammar='start: "ab" <|im_end|> "c"', seed=1)
    assert (caught.value.code, caught.value.dead_end) == ("constraint_failed", True)
    assert wild.last is not None
    assert wild.last.text == "ab"
    assert wild.generate(ASK, max_tokens=5, seed=1) == before
