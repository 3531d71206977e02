"""Who goes into the next pass, with how many rows, and who may begin: decisions as pure functions of values.

Knows numbers of rows and pages; no tokens, no clock, no engine. The same values give the same decisions, so a run can
be replayed from what was asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

READING_PART = 4  # beside generations that write, prompts take this part of a pass: 1/4


@dataclass(frozen=True)
class Claim:
    """What a generation that runs wants of the next pass.

    due: tokens to read before it can pick again, one at least. drafts: most that it would read behind them. reading:
    it has picked nothing yet. served: the number of the last pass that had rows of it. most: rows that it may have at
    most, for a prompt whose reader gave up during longer passes.
    """

    due: int
    drafts: int = 0
    reading: bool = False
    served: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Grant:
    """Rows of the next pass: of the claim at `index`, so many tokens that are due, and drafts at most."""

    index: int
    rows: int
    drafts: int = 0


def share(claims: Sequence[Claim], capacity: int, logit_capacity: int) -> list[Grant]:
    """Divide a pass of `capacity` rows, of which `logit_capacity` give logits.

    Every claim takes a row and a row of logits at least, or waits; those that waited longest come first, so none waits
    for ever. One that writes comes before one that reads a prompt, but never takes the last place from it. What is left
    goes to drafts, and then, in equal shares, to prompts and forced spans; while somebody writes, these get
    1/READING_PART of the pass at most, so that a token never takes as long as a whole pass.
    """
    order = sorted(range(len(claims)), key=lambda i: (claims[i].served, i))
    writing = [i for i in order if not claims[i].reading]
    places = min(capacity, logit_capacity, len(claims))
    waiting = [i for i in order if claims[i].reading]
    first = writing[: max(places - bool(waiting), 1)]
    if places == 1:
        first = [i for i in order[:1] if not claims[i].reading]
    chosen = first + waiting[: places - len(first)]
    rows, logits = capacity - len(chosen), logit_capacity - len(chosen)
    drafts = fill([claims[i].drafts for i in first], min(rows, logits))
    rows -= sum(drafts)
    if first:
        rows = min(rows, max(capacity // READING_PART - (len(chosen) - len(first)), 0))
    more = fill([_most(claims[i]) - 1 for i in chosen], rows)
    drafts += [0] * (len(chosen) - len(first))
    return [Grant(*parts) for parts in zip(chosen, (1 + m for m in more), drafts, strict=True)]


def _most(claim: Claim) -> int:
    return claim.due if claim.most is None else max(1, min(claim.due, claim.most))


def fill(wants: Sequence[int], total: int) -> list[int]:
    """Shares of `total` that are equal but for those who want less."""
    given, left = [0] * len(wants), max(total, 0)
    for number, index in enumerate(sorted(range(len(wants)), key=lambda i: wants[i])):
        given[index] = min(wants[index], left // (len(wants) - number))
        left -= given[index]
    return given


@dataclass(frozen=True)
class Holder:
    """A generation that was admitted: pages that it may come to hold, and whether it stands still because nobody takes
    its tokens."""

    pages: int
    paused: bool = False


@dataclass(frozen=True)
class Admission:
    """How many of those who wait begin, in their order, and which holders, by index, first give up their pages."""

    count: int
    evicted: tuple[int, ...] = ()


def admit(waiting: Sequence[int], holders: Sequence[Holder], num_pages: int) -> Admission:
    """Who begins: the first of `waiting`, which are the pages that each may need, as long as all that may be needed is
    there. So nobody who began ever lacks a page.

    A holder that stands still gives way, the latest first, where that lets somebody begin; nobody overtakes.
    """
    free = num_pages - sum(holder.pages for holder in holders)
    still = [i for i, holder in enumerate(holders) if holder.paused]
    evicted: list[int] = []
    count = 0
    for pages in waiting:
        giving, room = [], free
        while still and room < pages:
            giving.append(still.pop())
            room += holders[giving[-1]].pages
        if room < pages:
            break
        evicted += giving
        free = room - pages
        count += 1
    return Admission(count, tuple(evicted))
