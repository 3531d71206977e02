"""How fast prompts are read, of late, from what was measured alone. Pure."""

from __future__ import annotations

FEWEST = 64  # tokens read in one go, below which a prefill says nothing
SHARE = 0.3  # of the newest prefill in what is known
SPREAD = (
    512.0  # tokens by which depths have to differ before a difference in cost is put down to them
)


class Pace:
    """The cost of a token as a straight line over its position: the projections, and attention to all before it.

    The line is the least squares of the prefills seen, older ones counting less, with its slope drawn to zero where
    their depths are close together, and never below it.
    """

    def __init__(self, cost: float | None = None) -> None:
        """cost: seconds a token at any position, for a beginning; None: not known."""
        self._sums = (0.0,) * 5  # of weights, depths, costs, squared depths, depths with costs
        if cost is not None:
            self._sums = (1.0, 0.0, cost, 0.0, 0.0)

    def learn(self, begin: int, end: int, seconds: float) -> None:
        """Positions from `begin` to below `end` were read in so many seconds."""
        if end - begin < FEWEST or seconds <= 0:
            return
        depth, cost = (begin + end) / 2, seconds / (end - begin)
        share = SHARE if self._sums[0] else 1.0
        new = (1.0, depth, cost, depth * depth, depth * cost)
        self._sums = tuple(  # type: ignore[assignment]
            (1 - share) * old + share * value for old, value in zip(self._sums, new, strict=True)
        )

    def seconds(self, begin: int, end: int) -> float | None:
        """What reading positions from `begin` to below `end` takes; None where nothing is known."""
        weight, depths, costs, squares, both = self._sums
        if not weight:
            return None
        depth, cost = depths / weight, costs / weight
        slope = (both / weight - depth * cost) / (squares / weight - depth * depth + SPREAD**2)
        slope = max(0.0, min(slope, cost / depth if depth else 0.0))
        flat = cost - slope * depth
        return flat * (end - begin) + slope * (end * end - begin * begin) / 2
