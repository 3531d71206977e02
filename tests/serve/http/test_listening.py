"""What a server listens on."""

from __future__ import annotations

import socket

import pytest

from headrace.errors import SettingError
from headrace.serve.http.server import listening


def test_a_port_in_use_is_named() -> None:
    with listening(port=0) as first:
        port = first.getsockname()[1]
        with pytest.raises(SettingError, match=f"port {port} of 127.0.0.1 is in use"):
            listening(port=port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("198.51.100.1", 0)])
def test_what_cannot_be_listened_on_is_named(host: str, port: int) -> None:
    with pytest.raises(SettingError, match=f"cannot listen on {host} port {port}"):
        listening(host, port)


def test_loopback_is_the_default_and_answers_go_out_at_once() -> None:
    with listening(port=0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.proto == socket.IPPROTO_TCP
