"""Rules of a conversation that every dialect shares."""

from __future__ import annotations

import pytest

from headrace.serve.failure import RequestError
from headrace.serve.history import arranged, joined, with_instructions
from headrace.serve.request import Text, ToolCall, Turn

USER = Turn("user", (Text("Hello"),))
A, B = ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")
CALLS = Turn("assistant", calls=(A, B))


def result(call_id: str, text: str = "1") -> Turn:
    return Turn("tool", (Text(text),), call_id=call_id)


def test_results_take_the_order_of_their_calls() -> None:
    turns = (USER, CALLS, result("b"), result("a"))
    assert arranged(turns, "messages") == (USER, CALLS, result("a"), result("b"))


def test_ids_may_recur_in_a_later_turn() -> None:
    turns = (USER, CALLS, result("b"), result("a"), CALLS, result("a"), result("b"), USER)
    assert [turn.call_id for turn in arranged(turns, "messages")] == [
        None,
        None,
        "a",
        "b",
        None,
        "a",
        "b",
        None,
    ]


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ((USER, CALLS, result("a")), "without a result: 'b'"),
        ((USER, CALLS, result("a"), USER, result("b")), "without a result: 'b'"),
        ((USER, CALLS, result("a"), result("a"), result("b")), "'a' has two results"),
        ((USER, CALLS, result("c")), "'c' answers no call"),
        ((USER, result("a")), "'a' answers no call"),
        ((USER, Turn("assistant", calls=(A, A))), "the same id"),
        ((USER, Turn("assistant", (Text("Hi"),))), "nothing is asked"),
        ((), "is empty"),
    ],
)
def test_what_cannot_be_paired_is_refused(turns: tuple[Turn, ...], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        arranged(turns, "messages")
    assert (caught.value.status, caught.value.place) == (400, "messages")


def test_instructions_in_front_become_one_and_later_ones_the_users() -> None:
    one, two, late = (Turn("system", (Text(text),)) for text in ("One.", "Two.", "Late."))
    assert with_instructions((one, two, USER, late), before="First.") == (
        Turn("system", (Text("First.\n\nOne.\n\nTwo."),)),
        USER,
        Turn("user", (Text("Late."),)),
    )
    assert with_instructions((USER,)) == (USER,)


HEADER = "x-anthropic-billing-header: cc_version=2.1.270.abc; cch=00000;"


@pytest.mark.parametrize(
    "blocks", [(HEADER, "Be kind."), (f"{HEADER}\n", "Be kind."), (f"{HEADER}\n\nBe kind.",)]
)
def test_a_first_line_that_always_changes_is_left_out(blocks: tuple[str, ...]) -> None:
    """In front of the instructions, whatever block it came in; anywhere else it is text."""
    kind = Turn("system", (Text("Be kind."),))
    parts = tuple(map(Text, blocks))
    assert with_instructions((Turn("system", parts), USER)) == (kind, USER)
    assert with_instructions((*(Turn("system", (part,)) for part in parts), USER)) == (kind, USER)
    assert with_instructions((USER,), before="\n".join(blocks)) == (kind, USER)
    asked = Turn("user", (Text(HEADER),))
    assert with_instructions((Turn("system", (Text(HEADER),)), asked)) == (asked,)
    late = Turn("system", (Text(f"Be kind.\n{HEADER}"),))
    assert with_instructions((late, USER)) == (late, USER)


@pytest.mark.parametrize("before", ["", " ", "\t", "\n", "\r\n  "])
@pytest.mark.parametrize("line", [HEADER, HEADER.upper(), HEADER.title()])
def test_that_line_is_known_in_any_case_and_behind_blanks(line: str, before: str) -> None:
    kind = Turn("system", (Text("  Be kind."),))
    said = Turn("system", (Text(f"{before}{line}\n\n  Be kind."),))
    assert with_instructions((said, USER)) == (kind, USER)
    other = Turn("system", (Text(f"{before}my-{line}\nBe kind."),))
    assert with_instructions((other, USER)) == (other, USER)


def test_neighbours_of_one_role_are_joined_and_results_are_not() -> None:
    said = Turn("assistant", (Text("Well"),), reasoning="Hm", calls=(A,))
    turns = (USER, USER, said, Turn("assistant", calls=(B,)), result("a"), result("b"))
    assert joined(turns) == (
        Turn("user", (Text("Hello"), Text("\n\n"), Text("Hello"))),
        Turn("assistant", (Text("Well"),), reasoning="Hm", calls=(A, B)),
        result("a"),
        result("b"),
    )


def test_a_long_run_of_one_role_and_many_calls_take_linear_time() -> None:
    many = 40_000
    [turn] = joined([USER] * many)
    assert len(turn.parts) == 2 * many - 1
    calls = tuple(ToolCall(str(i), "f", "{}") for i in range(many))
    results = [result(call.id, call.id) for call in reversed(calls)]
    turns = arranged([USER, Turn("assistant", calls=calls), *results], "messages")
    assert [turn.text for turn in turns[2:]] == [call.id for call in calls]
