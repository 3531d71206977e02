"""Bodies as typed values, or refusals that name the field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from headrace.serve.failure import RequestError
from headrace.serve.validation import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_VALUES,
    Offered,
    Only,
    OpenWire,
    Wire,
    decoded,
    read,
)


class Part(Wire):
    type: str
    text: str | None = None


class Body(Wire):
    model: str
    parts: list[Part] | str
    limit: int | None = None
    warmth: float | None = None


class Open(OpenWire):
    model: str


def test_the_longest_number_is_read() -> None:
    digits = "9" * MAX_DIGITS
    assert decoded(f'{{"a": [{digits}, -{digits}]}}'.encode()) == {"a": [int(digits), -int(digits)]}


def test_a_body_is_read() -> None:
    value = decoded(b'{"model": "m", "parts": [{"type": "text", "text": null}], "limit": null}')
    assert read(Body, value) == Body(model="m", parts=[Part(type="text")])


@pytest.mark.parametrize(
    ("sent", "read_as"),
    [
        ("\\ud83d", "\ufffd"),
        ("\\ude00a", "\ufffda"),
        ("\\ud83d\\ud83d\\ude00", "\ufffd\U0001f600"),
        ("\\ud83d\\ude00", "\U0001f600"),
        ("\\\\ud83d", "\\ud83d"),
    ],
)
def test_half_a_surrogate_pair_is_a_replacement_character(sent: str, read_as: str) -> None:
    assert decoded(f'{{"a": ["{sent}"]}}'.encode()) == {"a": [read_as]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff{}", "not UTF-8 at byte 0"),
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "a key occurs twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": [1e999]}', "the number 1e999 is out of range"),
        (b'{"a\\ud800": 1, "a\\ud801": 2}', "not JSON: a key occurs twice in one object"),
        (b'{"b": [{"\\udfff": 1, "\xef\xbf\xbd": 2}]}', "not JSON: a key occurs twice in one object"),
        (b'{"a": [' + b"9" * 4301 + b"]}", "^a number of the body has 4,301 digits; at most 4,300 may be$"),
        (b'{"a": -' + b"9" * 5000 + b"}", "^a number of the body has 5,000 digits"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested deeper"),
    ],
)  # fmt: skip
def test_what_is_no_body_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        decoded(body)


@pytest.mark.parametrize(
    ("value", "said", "place"),
    [
        ({"parts": ""}, "model is missing", "model"),
        ({"model": "m", "parts": "", "n": 1}, "unknown field n", "n"),
        ({"model": None, "parts": ""}, "model is missing", "model"),
        ({"model": "m", "parts": None}, "parts is missing", "parts"),
        ({"model": "m", "parts": [{"type": None}]}, "parts[0].type is missing", "parts[0].type"),
        ({"model": "m", "parts": [None]}, "parts[0]: input should be an object", "parts[0]"),
        ({"model": 1, "parts": ""}, "model: input should be a valid string", "model"),
        ({"model": "m", "parts": "", "limit": "1"}, "limit: input should be a valid integer", "limit"),
        ({"model": "m", "parts": "", "warmth": 10**400}, "warmth: input should be a valid number", "warmth"),
        ({"model": "m", "parts": [{"type": "text", "x": 1}]}, "unknown field parts[0].x", "parts[0].x"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(value: dict[str, object], said: str, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(Body, value)
    assert caught.value.message.startswith(said)
    assert caught.value.place == place


class Free(Wire):
    schema_: dict[str, Any] = Field(alias="schema")
    parts: list[Part]
    limit: int | None = Field(5, alias="max")


def test_null_is_unset_of_unknown_fields_too_and_kept_in_free_json() -> None:
    schema = {"default": None, "enum": [None], "new": {"more": None}}
    part = {"type": "text", "new": None, "text": None}
    value = read(Free, {"schema": schema, "new": None, "max": None, "parts": [part]})
    assert value == Free(schema=schema, parts=[Part(type="text")], max=None)
    assert read(Open, {"model": "m", "new": None}).model_extra == {}
    with pytest.raises(RequestError, match=r"unknown field parts\[0\].new"):
        read(Free, {"schema": {}, "parts": [part | {"new": 0}], "other": None})


class Few(Wire):
    one: Annotated[int, Only(1)] | None = None
    off: Annotated[bool, Only(False)] | None = None
    none: Annotated[float, Only(0, "there is no more")] | None = None
    empty: Annotated[list[int], Only(())] | None = None
    free: Annotated[dict[str, int], Only(())] | None = None
    text: Annotated[str, Only("")] | None = None


def test_the_only_value_is_read() -> None:
    told = {"one": 1, "off": False, "none": 0, "empty": [], "free": {}, "text": ""}
    assert read(Few, told).model_dump() == told
    assert read(Few, {"none": -0.0}).none == 0
    assert read(Few, dict.fromkeys(told)) == Few()


@pytest.mark.parametrize(
    ("value", "said", "code"),
    [
        ({"one": True}, "one: input should be a valid integer", "invalid_request"),
        ({"one": 2}, "one: only 1 is supported", "unsupported_field"),
        ({"off": 0}, "off: input should be a valid boolean", "invalid_request"),
        ({"off": True}, "off: only false is supported", "unsupported_field"),
        ({"none": False}, "none: input should be a valid number", "invalid_request"),
        ({"none": 0.5}, "none: only 0 is supported: there is no more", "unsupported_field"),
        ({"empty": False}, "empty: input should be a valid list", "invalid_request"),
        ({"empty": [0]}, "empty: has to be empty", "unsupported_field"),
        ({"free": []}, "free: input should be an object", "invalid_request"),
        ({"free": {"a": 1}}, "free: has to be empty", "unsupported_field"),
        ({"text": []}, "text: input should be a valid string", "invalid_request"),
        ({"text": "a"}, "text: has to be empty", "unsupported_field"),
    ],
)
def test_what_is_not_the_only_value_is_refused(
    value: dict[str, object], said: str, code: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read(Few, value)
    assert (caught.value.message, caught.value.cause) == (said, code)
    assert caught.value.place == next(iter(value))


class Some(Wire):
    n: Annotated[int | None, Field(ge=1, le=1), Offered] = None


def test_what_is_not_offered_has_a_code_of_its_own() -> None:
    assert [read(Some, {"n": n}).n for n in (1, None)] == [1, None]
    found = []
    for n in (2, "1"):
        with pytest.raises(RequestError) as caught:
            read(Some, {"n": n})
        found.append((caught.value.cause, caught.value.place))
    assert found == [("unsupported_field", "n"), ("invalid_request", "n")]


def test_unknown_fields_of_an_open_type_are_kept() -> None:
    assert read(Open, {"model": "m", "new": 1}).model_extra == {"new": 1}


@pytest.mark.parametrize(
    ("least", "inside"),
    [("[0", ",0"), ("[[]", ",[]"), ('[{"a": 0}', ',{"a": 0}')],
    ids=["flat", "arrays", "objects"],
)
def test_the_number_of_values_is_limited(least: str, inside: str) -> None:
    each = 2 if "a" in inside else 1
    most = (MAX_VALUES - 1) // each
    decoded(f'{{"parts": {least + inside * (most - 1)}]}}'.encode())
    with pytest.raises(RequestError, match="more than 131,072 values") as caught:
        decoded(f'{{"parts": {least + inside * most}]}}'.encode())
    assert (caught.value.status, caught.value.cause) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        (r'{"a": "x\ud83d", "\udc00": ["\uDFFF"]}', {"a": "x�", "�": ["�"]}),
        (r'{"a": "\\ud83d"}', {"a": r"\ud83d"}),
    ],
    ids=["pair", "half", "escaped"],
)
def test_halves_of_characters_are_replaced(text: str, value: dict[str, object]) -> None:
    assert decoded(text.encode()) == value


class Said(Wire):
    type: Literal["said"]
    said: str
    more: str


class Shown(Wire):
    type: Literal["shown"]
    inner: Body


class Union(Wire):
    blocks: list[Annotated[Said | Shown, Field(discriminator="type")]] | str


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (5, "blocks: input should be a valid list"),
        ([{"type": "said", "said": 1, "more": ""}], "blocks[0].said: input should be a valid str"),
        ([{"type": "said", "more": ""}], "blocks[0].said is missing"),
        ([{"type": "said", "said": ""}], "blocks[0].more is missing"),
        ([{"type": "said", "said": "", "more": "", "x": 1}], "unknown field blocks[0].x"),
        ([{"type": None}], "blocks[0].type is missing"),
        ([{"said": ""}], "blocks[0].type is missing"),
        ([None], "blocks[0]: input should be an object"),
        ([{"type": "none"}], "blocks[0].type: 'none' is none of 'said', 'shown'"),
        ([{"type": "shown", "inner": {"model": "m"}}], "blocks[0].inner.parts is missing"),
    ],
)
def test_branches_of_a_union_are_no_place(blocks: object, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(Union, {"blocks": blocks})
    assert caught.value.message.startswith(said)
