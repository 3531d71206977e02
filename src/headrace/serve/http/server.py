"""How the server listens: uvicorn with the connections of `protocol`."""

from __future__ import annotations

import errno
import socket

import uvicorn

from headrace.errors import SettingError
from headrace.serve.http.answer import App
from headrace.serve.http.protocol import Limits, protocol_class

HOST = "127.0.0.1"
PORT = 11434
BACKLOG = 1024  # connections that nobody has accepted yet
ACCEPTED = 32  # at a time, so that those before them are read first


def listening(host: str = HOST, port: int = PORT) -> socket.socket:
    """A socket that listens. Raises SettingError, which names what is in use or not there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it, an answer takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise SettingError(
                f"port {port} of {host} is in use", hint="give another --port"
            ) from None
        raise SettingError(f"cannot listen on {host} port {port}: {error}") from None
    return listener


class Server(uvicorn.Server):
    """Accepts few connections at a time, and lets many wait for it: asyncio has one number for both."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def server(app: App, limits: Limits | None = None) -> uvicorn.Server:
    """A server for `server.run(sockets=[listening()])`."""
    limits = limits or Limits()
    config = uvicorn.Config(
        app,
        http=protocol_class(app, limits),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        backlog=ACCEPTED,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.idle_seconds,
        h11_max_incomplete_event_size=1 << 20,  # the gate has measured the head
        timeout_graceful_shutdown=limits.grace_seconds,
    )
    return Server(config)
