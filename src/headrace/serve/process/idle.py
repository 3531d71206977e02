"""How long a server has been of no use, and whether it should stop by itself. Pure: times come from the caller."""

from __future__ import annotations


class IdleClock:
    """Counts from when the last request ended and the last registered process was gone.

    limit: seconds after which a server stops; None: never. now: by any clock that does not go back, in seconds.
    """

    def __init__(self, now: float, limit: float | None) -> None:
        self.limit = limit
        self.active = 0  # requests
        self._clients = 0
        self._since = now  # nothing is in use

    def begin(self) -> None:
        """A request begins."""
        self.active += 1

    def end(self, now: float) -> None:
        """One ends."""
        self.active -= 1
        self._since = now

    def clients(self, count: int, now: float) -> None:
        """So many processes run that are registered."""
        if count or self._clients:
            self._since = now
        self._clients = count

    def idle_seconds(self, now: float) -> float:
        """Since when there was neither; 0 while there is either."""
        return 0.0 if self.active or self._clients else max(0.0, now - self._since)

    def due(self, now: float) -> bool:
        """Whether to stop."""
        return self.limit is not None and self.idle_seconds(now) >= self.limit
