"""A bound schema: masks, forced spans, dead ends and the walk through a save, as issued or refused by cause."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer

import tiny
from embed.frames import CONTEXT, Frame, generated, kv_bytes, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.artifact.schemas import write_schemas
from headrace.embed import errors
from headrace.engine.engine import Engine
from headrace.values import SamplingParams

Get = Callable[[str], Artifact]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
PROMPT = [7, 8, 9]
END = 258  # of the tiny models


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    made = tiny.make(tmp_path_factory.mktemp("schemas") / "model", "llama")
    texts = {
        "person": json.dumps(PERSON),
        "never": '{"type": "string", "minLength": 3, "maxLength": 2}',
    }
    write_schemas(made, {**texts, "digits": '{"type": "string", "pattern": "^[0-9]{2}$"}'})
    return made


@pytest.fixture
def frame(artifact: Artifact) -> Iterator[Frame]:
    with opened(artifact) as made:
        yield made


def ids(text: str) -> list[int]:
    """Of the tiny models: a token a byte."""
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


def bound(frame: Frame, name: str = "person", prompt: list[int] = PROMPT) -> embed.Sequence:
    sequence = frame.new()
    sequence.set_schema(frame.model.schema(name))
    embed.prefill(sequence, prompt, frame.space)
    return sequence


def answer(
    frame: Frame, sequence: embed.Sequence, budget: int = 99, *, jump: bool = False
) -> list[int]:
    """To the end token. jump: forced spans are prefilled."""
    out: list[int] = []
    while not out or out[-1] != END:
        if jump and (span := sequence.forced_span()):
            embed.prefill(sequence, span, frame.space, content=True)
            out += span
            continue
        outcome = step(frame, sequence, budget)
        if isinstance(outcome, embed.Token):
            out.append(outcome.id)
    return out


def test_names(frame: Frame) -> None:
    assert frame.model.schema_names == ("digits", "never", "person")
    assert frame.model.schema("person") is frame.model.schema("person")
    with pytest.raises(errors.UnknownSchemaError, match="person"):
        frame.model.schema("persons")
    with pytest.raises(errors.SchemaUnsatisfiableError):
        frame.model.schema("never")
    with pytest.raises(errors.SchemaUnsatisfiableError, match="uniqueItems"):
        frame.model.compile_schema({"type": "array", "uniqueItems": True})
    for wrong in ({}, {"schema": {}, "regex": "a"}):
        with pytest.raises(errors.InvalidArgumentError):
            frame.model.compile_schema(**wrong)


@pytest.mark.parametrize("budget", [1, 99])
def test_an_answer_is_valid_and_the_same_in_slices_and_with_jumps(
    frame: Frame, budget: int
) -> None:
    plain, jumping = bound(frame), bound(frame)
    assert not plain.stats().schema_accepting
    tokens = answer(frame, plain, budget)
    jsonschema.validate(json.loads(frame.model.tokenizer.decode(tokens)), PERSON)
    assert answer(frame, jumping, budget, jump=True) == tokens
    stats = plain.stats(), jumping.stats()
    assert [s.schema_accepting for s in stats] == [True, True]
    assert stats[0].forced_token_count == 0
    assert stats[1].forced_token_count > len('{"name": "')
    if plain.pending:  # the end token, which the other has read as a forced one
        embed.prefill(plain, [10], frame.space)
        embed.prefill(jumping, [10], frame.space)
    assert kv_bytes(plain) == kv_bytes(jumping)


def test_an_answer_is_the_engines(frame: Frame, artifact: Artifact) -> None:
    grammar = frame.model.schema("person").grammar
    with Engine(artifact, threads=1, max_context=CONTEXT) as engine:
        steps = engine.generate(PROMPT, SamplingParams(temperature=0.0), constraint=grammar.start())
        wanted = [token.id for token in steps]
    assert answer(frame, bound(frame), 1) == wanted


def test_a_dead_end_is_said_again_and_again(frame: Frame) -> None:
    """Behind the end token nothing follows; without one the whole text is the end."""
    sequence = bound(frame)
    answer(frame, sequence)
    outcome: embed.Outcome = embed.MidToken(0)
    while isinstance(outcome, embed.MidToken):
        outcome = step(frame, sequence, 1)
    before = sequence.save()
    assert outcome == embed.DeadEnd(True, "the text has ended")
    assert (outcome.code, outcome.retry) == (-2, True)
    with frame.new([1, 2]) as other:
        found = embed.decode_step([sequence, other], 5, frame.space)
        assert found[0] == outcome
        assert isinstance(found[1], embed.Token)
    assert sequence.save() == before
    sequence.reset()
    assert sequence.schema_bound
    embed.prefill(sequence, PROMPT, frame.space)
    assert answer(frame, sequence) == answer(frame, bound(frame))


def test_a_grammar_that_the_vocabulary_cannot_follow(tmp_path: Path) -> None:
    """There is a token for "a" and none for "b"."""
    checkpoint = tiny.write_checkpoint(tmp_path / "source", "llama")
    tokenizer = json.loads(tiny.tokenizer_json())
    tokenizer["model"]["vocab"] = {c: i for c, i in tokenizer["model"]["vocab"].items() if c != "b"}
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    with opened(convert(checkpoint, tmp_path / "artifact")) as frame:
        for text, tokens in (("ac", [*ids("ac"), END]), ("ab", ids("a"))):
            sequence = frame.new()
            sequence.set_schema(frame.model.compile_schema(regex=text))
            embed.prefill(sequence, PROMPT, frame.space)
            assert generated(frame, sequence, len(tokens)) == tokens
        for _ in range(3):
            outcome = step(frame, sequence)
            assert isinstance(outcome, embed.DeadEnd)
            assert not outcome.accepting
        assert not sequence.stats().schema_accepting


def test_binding_wants_a_new_or_reset_sequence(frame: Frame) -> None:
    schema = frame.model.schema("person")
    with frame.new() as sequence:
        sequence.set_schema(schema)
        sequence.set_schema(None)
        assert not sequence.schema_bound
        with pytest.raises(errors.InvalidArgumentError):
            embed.prefill(sequence, ["x"], frame.space)  # type: ignore[list-item]
        with pytest.raises(errors.SchemaUnboundError):
            embed.prefill(sequence, [1], frame.space, content=True)
        sequence.set_schema(schema)  # refused calls have changed nothing
        embed.prefill(sequence, [], frame.space)  # a no-op, but a valid one
        for value in (schema, None):
            with pytest.raises(errors.SchemaBindError):
                sequence.set_schema(value)
        assert sequence.schema_bound
        sequence.reset()
        sequence.set_schema(None)
    with (
        opened(frame.model.artifact) as other,
        other.new() as foreign,
        pytest.raises(errors.InvalidArgumentError),
    ):
        foreign.set_schema(schema)


def test_a_span_is_read_up_to_what_the_schema_refuses(frame: Frame) -> None:
    sequence, wanted = bound(frame), bound(frame)
    hidden = sequence.read_prefill_final_hidden()
    with pytest.raises(errors.SpanUnreachableError) as caught:
        embed.prefill(sequence, ids("[1"), frame.space, content=True)
    assert caught.value.consumed == 0
    assert sequence.save() == wanted.save()  # the hidden state, too, is as it was
    assert (sequence.read_prefill_final_hidden().values == hidden.values).all()
    with pytest.raises(errors.SpanUnreachableError) as caught:
        embed.prefill(sequence, ids('{"name": "Carl'), frame.space, content=True)
    assert caught.value.consumed == len('{"name": "')
    assert sequence.stats().forced_token_count == caught.value.consumed
    embed.prefill(wanted, ids('{"name": "'), frame.space, content=True)
    assert answer(frame, sequence) == answer(frame, wanted)


def test_a_prefix_under_a_schema(frame: Frame) -> None:
    schema = frame.model.schema("person")
    with embed.Prefix(frame.pool) as prefix, embed.Prefix(frame.pool) as prompt:
        prefix.set_schema(schema)
        prefix.prefill(PROMPT, frame.space)
        prefix.prefill(ids('{"name": "B'), frame.space, content=True)
        prefix.freeze()
        prompt.prefill(PROMPT, frame.space)
        prompt.freeze()
        with frame.new() as sequence:
            for other in (None, frame.model.schema("digits")):
                sequence.set_schema(other)
                with pytest.raises(errors.PrefixSchemaError):
                    sequence.adopt_prefix(prefix)
            sequence.set_schema(schema)
            sequence.adopt_prefix(prefix)
            assert answer(frame, sequence)[:3] == ids('ob"')
        with frame.new() as sequence:  # a prompt alone goes with any schema
            sequence.set_schema(schema)
            sequence.adopt_prefix(prompt)
            assert answer(frame, sequence) == answer(frame, bound(frame))


@pytest.mark.parametrize("tokens", [0, 1, 5, 14])
def test_the_walk_is_saved(frame: Frame, artifact: Artifact, tokens: int) -> None:
    sequence = bound(frame)
    generated(frame, sequence, tokens)
    blob = sequence.save()
    wanted = answer(frame, sequence)
    with opened(artifact, "reference") as other, other.new() as restored:
        restored.restore(blob)
        assert restored.schema_bound
        assert restored.save() == blob
        assert answer(other, restored, 1) == wanted


def test_a_schema_that_the_model_lacks(artifact: Artifact, tmp_path: Path) -> None:
    other = tiny.make(tmp_path / "same", "llama")
    changed = dict(PERSON, required=["name"])
    with opened(artifact) as frame:
        blob = bound(frame).save()
        unnamed = frame.new()
        unnamed.set_schema(frame.model.compile_schema(PERSON))
        free = unnamed.save()
    with opened(other) as frame, frame.new([1, 2]) as target:
        before = target.save()
        with pytest.raises(errors.RestoreSchemaError):
            target.restore(blob)
        with pytest.raises(errors.RestoreSchemaError):
            target.restore(free)
        with pytest.raises(errors.RestoreSchemaError):
            target.restore(free, schema=frame.model.compile_schema(changed))
        with pytest.raises(errors.RestoreSchemaError):
            target.restore(before, schema=frame.model.compile_schema(PERSON))
        assert target.save() == before
        target.restore(free, schema=frame.model.compile_schema(PERSON))
        assert target.save() == free
    write_schemas(other, {"person": json.dumps(changed)})
    with opened(other) as frame, frame.new() as target, pytest.raises(errors.RestoreSchemaError):
        target.restore(blob)


def test_a_damaged_schema_file(tmp_path: Path) -> None:
    made = tiny.make(tmp_path / "model", "llama")
    (made.path / "schemas.json").write_text("{")
    with pytest.raises(errors.ArtifactRejectedError):
        embed.Model(made)


def test_a_schema_of_another_model(frame: Frame, artifact: Artifact, tmp_path: Path) -> None:
    """Of equal text: its masks are of another vocabulary."""
    own = frame.model.compile_schema(regex="[a-c]{5}x")
    sequence = frame.new()
    sequence.set_schema(own)
    embed.prefill(sequence, PROMPT, frame.space)
    blob = sequence.save()
    for other in (artifact, tiny.make(tmp_path / "other", "llama", vocab_size=300)):
        with opened(other) as second, frame.new([1]) as target:
            foreign, before = second.model.compile_schema(regex="[a-c]{5}x"), target.save()
            assert foreign.digest == own.digest
            assert not foreign.same(own)
            with pytest.raises(errors.RestoreSchemaError):
                target.restore(blob, schema=foreign)
            assert target.save() == before
            with frame.new() as new, pytest.raises(errors.InvalidArgumentError):
                new.set_schema(foreign)


class Panic(BaseException):
    """As the grammar library's."""


Panic.__name__ = "PanicException"


@pytest.mark.parametrize("wrong", [IndexError("a"), OverflowError("b"), MemoryError(), Panic("c")])
@pytest.mark.parametrize("place", ["mask", "advance"])
def test_what_fails_for_one_sequence_is_its_outcome(
    frame: Frame, monkeypatch: pytest.MonkeyPatch, place: str, wrong: BaseException
) -> None:
    """The others of its batch get their tokens, and it goes on once the cause is gone."""
    good, bad, schema = frame.new(PROMPT), bound(frame), bound(frame)
    wanted = [generated(frame, line, 1)[0] for line in (frame.new(PROMPT), bound(frame))]
    before = bad.save()
    assert bad.walk is not None

    def fail(*_: object) -> None:
        raise wrong

    monkeypatch.setattr(bad.walk._walk, place, fail)
    found = embed.decode_step([good, bad, schema], 9, frame.space)
    assert [o.code for o in found] == [wanted[0], -4, wanted[1]]
    assert isinstance(found[1], embed.Refused)
    kind = errors.AllocationError if isinstance(wrong, MemoryError) else errors.ChoiceError
    assert type(found[1].error) is kind
    assert bad.save() == before
    monkeypatch.undo()
    assert step(frame, bad) == embed.Token(wanted[1])


def test_the_order_of_keys_is_part_of_a_schema(frame: Frame) -> None:
    """It is the order in which an answer has them."""
    turned = dict(reversed(PERSON.items()))
    assert frame.model.compile_schema(turned).digest != frame.model.compile_schema(PERSON).digest
    spaced = frame.model.compile_schema(json.dumps(PERSON, indent=3))
    assert spaced.digest == frame.model.compile_schema(PERSON).digest
