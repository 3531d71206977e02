"""A server as a process: what it listens on, the lock, the order in which it starts and ends, and what ends it.

Knows no model: `run` is given what opens one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import uvicorn

from headrace.errors import SettingError
from headrace.memory.allocator import give_back_large_blocks
from headrace.serve.app import create_app
from headrace.serve.backend import Backend
from headrace.serve.http.guard import policy_for
from headrace.serve.http.server import HOST, PORT, Server, listening, server
from headrace.serve.process import lock
from headrace.serve.process.asking import described
from headrace.serve.process.attendant import Attendant
from headrace.serve.process.ending import Signals
from headrace.serve.process.lock import Holder
from headrace.serve.telemetry.log import logging_to
from headrace.serve.telemetry.status import Facts

GRACE = 2  # seconds for answers to reach their clients once the server stops
TICK = 1.0  # seconds between looks at the idle clock
MAX_IDLE_MINUTES = 10_080

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Site:
    """Where and how a server is reached. idle_exit: minutes without use after which it stops; None: never."""

    model: str
    home: Path
    host: str = HOST
    port: int = PORT
    api_key: str | None = field(default=None, repr=False)
    allow_hosts: Sequence[str] = ()
    idle_exit: float | None = None
    log_json: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise SettingError(f"--port {self.port} is not between 0 and 65535")
        if self.idle_exit is not None and not 0 < self.idle_exit <= MAX_IDLE_MINUTES:
            raise SettingError(
                f"--idle-exit {self.idle_exit:g} is not between 0 and {MAX_IDLE_MINUTES}"
            )


@dataclass(frozen=True)
class Opened:
    """A backend and what is told of it. counts: generations that run, and that wait; cache_bytes: see `Metrics`."""

    backend: Backend
    dialects: Sequence[ModuleType]
    counts: Callable[[], tuple[int, int]]
    cache_bytes: Mapping[str, Callable[[], int]] = field(default_factory=dict)


def run(site: Site, opening: Callable[[], AbstractContextManager[Opened]]) -> int:
    """Serve until something ends it; the exit code. Everything is closed by then.

    The port and the lock are taken before anything is opened. Raises SettingError, ModelBusyError, and what opening
    raises.
    """
    give_back_large_blocks()
    policy = policy_for(site.host, api_key=site.api_key, allow_hosts=site.allow_hosts)
    with Signals() as signals, logging_to(sys.stderr, json=site.log_json):
        try:
            with _listening(site) as listener:
                port = listener.getsockname()[1]
                with (
                    lock.alone(site.home, Holder(os.getpid(), port, site.model)),
                    opening() as opened,
                ):
                    attendant = Attendant(
                        _facts(site, port, opened),
                        counts=opened.counts,
                        cache_bytes=opened.cache_bytes,
                        memory=lambda: opened.backend.card.memory,
                    )
                    app = create_app(
                        opened.backend, opened.dialects, policy=policy, observer=attendant
                    )
                    config = server(app).config
                    asyncio.run(_serve(config, listener, attendant, signals, site))
        except KeyboardInterrupt:
            if signals.first is None:
                raise
        if signals.first is not None:
            log.info("stopped by %s", signals.name)
    return signals.exit_code


async def _serve(
    config: uvicorn.Config,
    listener: socket.socket,
    attendant: Attendant,
    signals: Signals,
    site: Site,
) -> None:
    loop, serving = asyncio.get_running_loop(), Serving(config)

    def end() -> None:
        attendant.stop()
        serving.should_exit = True

    def ask() -> None:
        with suppress(RuntimeError):  # the loop has ended: so has what is asked for
            loop.call_soon_threadsafe(end)

    watching = asyncio.ensure_future(_attend(serving, attendant, listener, site, end))
    with signals.asking(ask):
        try:
            await serving.serve(sockets=[listener])
        finally:
            watching.cancel()


class Serving(Server):
    """A server that leaves signals to `Signals`."""

    def __init__(self, config: uvicorn.Config) -> None:
        config.timeout_graceful_shutdown = GRACE
        super().__init__(config)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


async def _attend(
    serving: Serving,
    attendant: Attendant,
    listener: socket.socket,
    site: Site,
    end: Callable[[], None],
) -> None:
    """Say that the server is there, tell of what takes long, and end it when it was idle for long enough."""
    while not serving.started:
        await asyncio.sleep(0.01)
    log.info("serving %s on %s", site.model, _url(listener))
    tick = min(TICK, (site.idle_exit or 1) * 6)
    while True:
        await asyncio.sleep(tick)
        attendant.beat()
        if site.idle_exit is not None and attendant.due():
            log.info(
                "stopping: no request and no registered process for %g minutes", site.idle_exit
            )
            end()
            return


def _listening(site: Site) -> socket.socket:
    """The socket. Raises SettingError, which names a headrace server that has the port."""
    try:
        return listening(site.host, site.port)
    except SettingError:
        who = described(site.home, site.host, site.port)
        if who is None:
            raise
        raise SettingError(
            f"port {site.port} of {site.host} is in use by {who}",
            hint=f"give another --port, or end it: headrace stop --port {site.port}",
        ) from None


def _facts(site: Site, port: int, opened: Opened) -> Facts:
    card = opened.backend.card
    return Facts(
        version=card.version,
        pid=os.getpid(),
        port=port,
        model=card.name,
        context_window=card.context_window,
        started_at=int(time.time()),
        idle_exit_minutes=site.idle_exit,
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
