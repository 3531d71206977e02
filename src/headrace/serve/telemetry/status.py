"""The state of the server as its endpoints tell it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headrace.serve.dialect import Memory
from headrace.serve.request import Json

SERVER = "headrace"
STATUS = "/headrace/status"
METRICS = "/metrics"
QUIET = (STATUS, METRICS, "/health")  # who only looks does not use the server


@dataclass(frozen=True)
class Facts:
    """What holds as long as the server runs."""

    version: str
    pid: int
    port: int
    model: str
    context_window: int
    started_at: int  # Unix seconds
    idle_exit_minutes: float | None = None


def status(
    facts: Facts,
    memory: Memory,
    *,
    active: int,
    clients: int,
    idle_seconds: float,
    stopping: bool,
) -> Json:
    """The body of the status."""
    use = {
        "active_requests": active,
        "clients": clients,
        "idle_seconds": int(idle_seconds),
        "stopping": stopping,
        "memory_source": memory.source,
        "memory_target_gb": memory.target_gb,
        "memory_limit_gb": memory.limit_gb,
    }
    return {"server": SERVER, **{k: _whole(v) for k, v in (asdict(facts) | use).items()}}


def _whole(value: Any) -> Any:
    """12 for 12.0, as people write it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
