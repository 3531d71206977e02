"""What a schema says of numbers, in a form that the library follows exactly, and what it cannot follow.

The library lets a whole exclusive bound through where the other one is less than 1 away, reckons with doubles, and
joins what several subschemas say only after it has read each. So each is put right by itself. Knows no grammar.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

Json = dict[str, Any]

NEAR = 10**18  # a range beyond it has no digits that the library can count
# Of decimals of 15 digits that end here, or sooner, the library's reader of numbers makes the nearest double.
_LAST_DIGIT = -22
_FAR = 2.0**63 - 1024  # the largest double below its integers' end
MAX_RESIDUES = 1024  # of whole numbers; in wide ranges 2,000 are too many expressions for tokens of four digits
MAX_STATES = 20_000  # of one multiple, fractions included
MAX_ALL_STATES = 32_000  # of all multiples of a schema: the lexer holds 50,000
_FACTOR = 1 << 32  # what the library's products of multiples must stay below
_INTEGERS = 1 << 53  # up to it every integer is a double
_SIDES = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))


def tighten(node: Json) -> None:
    """Make the bounds of one subschema those that the library follows, in place.

    What satisfies it stays the same, but for numbers that are nearer to an exclusive bound than its 15th digit, or than
    1e-22 to zero, which a reader of doubles may round onto it, and for those beyond 2**63 where there is a bound.
    """
    step = _step(node)
    whole = _is_whole(node)
    if whole and step is not None:
        step = Fraction(step.numerator)
        node["multipleOf"] = int(step)
    for inclusive, exclusive, sign in _SIDES:
        found = _bound(node, inclusive, exclusive, sign)
        if found is None:
            continue
        bound, strict = found
        unit = Fraction(1) if whole and step is None else step
        # Bounds from above are those from below of the negative numbers.
        if strict and not whole and _is_followed(sign * bound):
            if isinstance(node[exclusive], bool):
                del node[inclusive]
            node[exclusive] = bound
            continue
        node.pop(exclusive, None)
        least = _least(sign * bound, strict, unit)
        node[inclusive] = sign * (int(least) if least.is_integer() else least)


def _is_followed(bound: float | int) -> bool:
    """Whether the library follows an exclusive bound from below as it is: where all digits behind it are nearer to
    zero. An inclusive one would ask for more digits there: 0.9 would have to be 0.90.
    """
    return -_INTEGERS < bound < 0 and _least(bound, False, None) == bound


def _least(bound: float | int, strict: bool, unit: Fraction | None) -> float:
    """The least number of short decimals that is at or above a bound, or above it if `strict`.

    unit: it is a multiple of this one, too.
    """
    decimal = Decimal(repr(bound))
    digit = max(_LAST_DIGIT, decimal.adjusted() - 14) if decimal else _LAST_DIGIT
    exact = Fraction(decimal)
    unit = Fraction(10) ** min(0, digit) if unit is None else unit
    exact = unit * (exact // unit + 1 if strict else -(-exact // unit))
    least = float(max(exact, Fraction(-_FAR)))
    # Integers count as they stand: here in the library's shortest decimals, and in a reader's.
    while abs(least) >= _INTEGERS and min(Fraction(least), Fraction(Decimal(repr(least)))) < exact:
        least = math.nextafter(least, math.inf)
    return least + 0.0  # no negative zero


def _bound(
    node: Json, inclusive: str, exclusive: str, sign: int
) -> tuple[int | float, bool] | None:
    """The bound of one side, and whether it is exclusive; None where there is none that is a number."""
    wide, narrow = node.get(inclusive), node.get(exclusive)
    if isinstance(narrow, bool):  # draft 4: what the other keyword's bound is
        return (wide, narrow) if _is_number(wide) else None
    if not _is_number(narrow):
        return (wide, False) if narrow is None and _is_number(wide) else None
    if wide is None or (_is_number(wide) and sign * wide <= sign * narrow):
        return narrow, True
    return (wide, False) if _is_number(wide) else None


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(node: Json) -> bool:
    """Whether its numbers are integers."""
    types = node.get("type")
    return types == "integer" or (
        isinstance(types, list) and "integer" in types and "number" not in types
    )


def _step(node: Json) -> Fraction | None:
    step = node.get("multipleOf")
    return Fraction(step) if _is_number(step) and step > 0 else None


def fault(node: Json) -> tuple[str, str] | None:
    """The keyword of one subschema that cannot be followed, and why; None where all can.

    Who checks a multiple divides doubles, which is exact for binary fractions alone.
    """
    step = node.get("multipleOf")
    if _is_number(step):
        cause = _step_fault(step, _is_whole(node))
        if cause:
            return "multipleOf", f"multipleOf: {cause}"
    for inclusive, exclusive, sign in _SIDES:
        for keyword in (inclusive, exclusive):
            bound = node.get(keyword)
            if not _is_number(bound):
                continue
            if sign * bound >= NEAR:
                return keyword, f"{keyword}: {bound!r:.60} is beyond {sign * NEAR:,}"
    return None


def _step_fault(step: float | int, whole: bool) -> str:
    if step <= 0:
        return f"{step!r:.60} is not above zero"
    if isinstance(step, float) and Fraction(repr(step)) != Fraction(step):
        return f"{step!r} is neither an integer nor a binary fraction, such as 0.25"
    exact = Fraction(step)
    if states(Fraction(exact.numerator) if whole else exact) is None:
        return (
            f"{step!r:.60} has more remainders than can be followed ({MAX_RESIDUES:,} of integers)"
        )
    return ""


def states(step: Fraction) -> int | None:
    """How many remainders of a multiple a walk along its digits can meet; None for too many."""
    digits = (step.denominator - 1).bit_length()  # a binary fraction has as many decimals
    scaled = int(step * 10**digits)
    met = [scaled // math.gcd(scaled, 10 ** (digits - at)) for at in range(digits + 1)]
    return sum(met) if met[0] <= MAX_RESIDUES and sum(met) <= MAX_STATES else None


def joined_fault(steps: Iterable[Fraction]) -> str:
    """Why several multiples cannot be followed at once; empty where they can."""
    known = sorted(set(steps))
    if len(known) < 2:
        return ""
    digits = max((step.denominator - 1).bit_length() for step in known)
    scaled = [int(step * 10**digits) for step in known]
    together = math.lcm(*scaled)
    if together * max(scaled) < _FACTOR and states(Fraction(together, 10**digits)) is not None:
        return ""
    return "multipleOf: several at one place have too many remainders together"


def step_of(node: Json) -> Fraction | None:
    """The multiple that a checked subschema asks for."""
    step = _step(node)
    return Fraction(step.numerator) if step is not None and _is_whole(node) else step
