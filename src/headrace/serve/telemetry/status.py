"""The state of the server as its endpoints tell it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headrace.serve.request import Json

SERVER = "headrace"
STATUS = "/headrace/status"
METRICS = "/metrics"
QUIET = (STATUS, METRICS, "/health")  # who only looks does not use the server


@dataclass(frozen=True)
class Memory:
    """How memory was planned: the option that sized the plan, or auto; the process's target, if it has one; the
    ceiling of an adaptive one, if it was given. GB are 10^9 bytes."""

    memory_source: str = "auto"
    memory_target_gb: float | None = None
    memory_limit_gb: float | None = None


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
    memory: Memory = Memory()


def status(facts: Facts, *, active: int, clients: int, idle_seconds: float, stopping: bool) -> Json:
    """The body of the status."""
    use = {
        "active_requests": active,
        "clients": clients,
        "idle_seconds": int(idle_seconds),
        "stopping": stopping,
    }
    told = asdict(facts)
    memory = told.pop("memory")
    return {"server": SERVER, **{k: _whole(v) for k, v in (told | use | memory).items()}}


def _whole(value: Any) -> Any:
    """12 for 12.0, as people write it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
