"""What a memory plan means for the experts of an engine: the sizes of their stream, and who resizes its pool."""

from __future__ import annotations

from headrace.experts.stream import ExpertStream, StreamOptions
from headrace.memory.governor import Governor
from headrace.memory.ledger import Plan


def stream_options(plan: Plan) -> StreamOptions:
    """Forecasts take their slots from the pool of the stream, which the plan counts apart."""
    slots = plan.pool_slots + plan.lookahead_slots
    return StreamOptions(slots, slots, plan.lookahead_slots, plan.sweep_slots)


def governor(plan: Plan, stream: ExpertStream | None) -> Governor | None:
    """Who resizes the pool between generations; None where nothing may be resized."""
    return Governor(plan, _Pool(plan, stream)) if stream is not None and plan.adaptive else None


class _Pool:
    """The experts' pool as the governor sees it: without the slots of the lookahead."""

    def __init__(self, plan: Plan, stream: ExpertStream) -> None:
        self._plan = plan
        self._stream = stream

    def resize(self, slots: int) -> None:
        self._stream.resize(slots + self._plan.lookahead_slots)
