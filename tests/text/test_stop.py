"""Stop strings: nothing of them and nothing after them is shown, however the text is cut."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.stop import StopStrings

ALPHABET = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    stop = StopStrings(stops)
    shown = "".join(map(stop.push, pieces))
    return shown + stop.flush(), stop.stopped


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the stop string that ends first, of those that end together the longest."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end - len(stop)], stop


@given(ALPHABET, STOPS, st.lists(st.integers(0, 40)))
@settings(max_examples=1000, deadline=None)
def test_any_cut_gives_the_defined_text(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert run(stops, pieces) == expected(stops, text)


@given(ALPHABET, STOPS)
def test_text_is_held_only_while_it_could_become_a_stop(text: str, stops: list[str]) -> None:
    stop, shown = StopStrings(stops), ""
    for end, char in enumerate(text, 1):
        shown += stop.push(char)
        if stop.stopped is not None:
            return
        held = text[len(shown) : end]
        assert not held or any(s.startswith(held) and s != held for s in stops)


def test_a_stop_string_across_pieces_does_not_leak() -> None:
    stop = StopStrings(["</answer>"])
    assert [stop.push(p) for p in ["yes </", "ans", "wer", "> more", "x"]] == [
        "yes ",
        "",
        "",
        "",
        "",
    ]
    assert stop.stopped == "</answer>"
    assert stop.flush() == ""


def test_a_near_miss_is_shown() -> None:
    stop = StopStrings(["STOP"])
    assert [stop.push(p) for p in ["STO", "RE", " ST"]] == ["", "STORE", " "]
    assert stop.flush() == "ST"
    assert stop.stopped is None


def test_without_stop_strings_everything_passes() -> None:
    assert run([], ["a", "", "b"]) == ("ab", None)


def test_long_text_takes_linear_time() -> None:
    shown, stopped = run(["a" * 1000 + "b"], ["a" * 100_000])
    assert shown == "a" * 100_000
    assert stopped is None


def test_looking_ahead_changes_nothing() -> None:
    stops = StopStrings(["ab", "\n\n"])
    assert stops.push("xa") == "x"
    assert stops.would_stop("b")
    assert not stops.would_stop("c\n")
    assert stops.would_stop("c\n\nd")
    assert not stops.would_stop("")
    assert stops.stopped is None
    assert stops.push("c") == "ac"
    assert stops.push("\n") == ""
    assert stops.would_stop("\n")
    assert stops.flush() == "\n"


def test_many_stop_strings_at_once() -> None:
    stops = ["a" * length + "b" for length in range(1, 65)]
    assert run(stops, ["a" * 100, "cb", "a" * 9, "b"]) == ("a" * 100 + "cb", "a" * 9 + "b")
