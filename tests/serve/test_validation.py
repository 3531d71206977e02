"""Bodies as typed values, or refusals that name the field."""

from __future__ import annotations

import pytest

from headrace.serve.failure import RequestError
from headrace.serve.validation import MAX_DEPTH, OpenWire, Wire, decoded, read


class Part(Wire):
    type: str
    text: str | None = None


class Body(Wire):
    model: str
    parts: list[Part] | str
    limit: int | None = None


class Open(OpenWire):
    model: str


def test_a_body_is_read() -> None:
    value = decoded(b'{"model": "m", "parts": [{"type": "text", "text": null}], "limit": null}')
    assert read(Body, value) == Body(model="m", parts=[Part(type="text")])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff{}", "not UTF-8 at byte 0"),
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "a key occurs twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -1e999}', "-1e999 is out of the range"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"a": ["\\ud83d"]}', "half of a surrogate pair"),
        (b'{"\\udE00": 1}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested deeper"),
    ],
)
def test_what_is_no_body_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        decoded(body)


def test_escaped_characters_are_read() -> None:
    assert decoded(b'{"a": "\\ud83d\\ude00\\n", "b": 1e30}') == {"a": "\U0001f600\n", "b": 1e30}


@pytest.mark.parametrize(
    ("value", "said", "place"),
    [
        ({"parts": ""}, "model is missing", "model"),
        ({"model": "m", "parts": "", "n": 1}, "unknown field n", "n"),
        ({"model": 1, "parts": ""}, "model: input should be a valid string", "model"),
        ({"model": "m", "parts": "", "limit": "1"}, "limit: input should be a valid integer", "limit"),
        ({"model": "m", "parts": [{"type": "text", "x": 1}]}, "unknown field parts[0].x", "parts[0].x"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(value: dict[str, object], said: str, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(Body, value)
    assert caught.value.message.startswith(said)
    assert caught.value.place == place


def test_unknown_fields_of_an_open_type_are_kept() -> None:
    assert read(Open, {"model": "m", "new": 1}).model_extra == {"new": 1}
