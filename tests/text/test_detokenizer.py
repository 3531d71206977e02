"""Streaming text: no half characters, nothing frozen, and the pieces are the whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from text_corpus import CORPUS, INVALID

from headrace.text.detokenizer import Detokenizer


def stream(chunks: list[bytes], lead: str = "keep") -> list[str]:
    detokenizer = Detokenizer(chunks.__getitem__, lead)  # type: ignore[arg-type]
    return [detokenizer.push(i) for i in range(len(chunks))] + [detokenizer.flush()]


@given(st.lists(st.binary(max_size=5), max_size=30))
@settings(max_examples=500, deadline=None)
def test_pieces_concatenate_to_the_whole(chunks: list[bytes]) -> None:
    assert "".join(stream(chunks)) == b"".join(chunks).decode("utf-8", "replace")


@given(st.text(), st.integers(1, 3))
def test_valid_text_never_shows_a_replacement_character(text: str, size: int) -> None:
    data = text.replace("\ufffd", "").encode("utf-8", "ignore")
    pieces = stream([data[i : i + size] for i in range(0, len(data), size)])
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces).encode() == data


def test_every_character_appears_with_its_last_byte() -> None:
    for text in CORPUS:
        data = text.encode()
        for end, piece in enumerate(stream([bytes([b]) for b in data])[:-1], 1):
            assert bool(piece) == (end == len(data) or data[end] & 0xC0 != 0x80)


def test_an_invalid_byte_does_not_freeze_the_stream() -> None:
    assert stream([b"\xff", b"a", b"\xe2\x82", b"b", b"\x80", b"c"]) == [
        "\ufffd", "a", "", "\ufffdb", "\ufffd", "c", "",
    ]  # fmt: skip
    for data in INVALID:
        assert "".join(stream([bytes([b]) for b in data])) == data.decode("utf-8", "replace")


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    assert stream([b"\xf0\x9f", b"\x98"]) == ["", "", "\ufffd"]


def test_only_the_first_piece_loses_its_dummy_space() -> None:
    assert stream([b"", b" a", b" b"], "one") == ["", "a", " b", ""]
    assert stream([b"  a", b" b"], "one") == [" a", " b", ""]
    assert stream([b"  a", b" b"], "all") == ["a", " b", ""]
    assert stream([b" a", b" b"]) == [" a", " b", ""]
