"""Who may ask: hosts, origins, keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.errors import SettingError
from headrace.serve.app import create_app
from headrace.serve.events import Finished, Started, TextDelta, Usage
from headrace.serve.http.guard import Policy, host_allowed, origin_allowed, policy_for
from serve.http.plain import plain
from serve.http.wired import asked, request, wired
from serve.scripted import ScriptedBackend

SCRIPT = [Started(3, 0), TextDelta("Hello"), Finished("stop", Usage(3, 0, 1))]
HERE = ("127.0.0.1", 11434)


@pytest.mark.parametrize(
    ("host", "server", "allowed"),
    [
        ("localhost", HERE, True),
        ("localhost:11434", HERE, True),
        ("LocalHost:11434", HERE, True),
        ("localhost:", HERE, True),
        ("127.0.0.1", HERE, True),
        ("127.0.0.1:11434", HERE, True),
        ("[::1]:11434", HERE, True),
        ("[::1]", ("::1", 11434), True),
        ("192.168.0.7:11434", ("192.168.0.7", 11434), True),
        ("192.168.0.7:11434", ("::ffff:192.168.0.7", 11434), True),
        ("[fe80::1]:11434", ("fe80::1%eth0", 11434), True),
        ("box.example", HERE, True),
        ("box.example:99", HERE, True),
        ("two.example:99", HERE, True),
        ("two.example", HERE, False),
        ("two.example:98", HERE, False),
        ("localhost:80", HERE, False),
        ("127.0.0.1:80", HERE, False),
        ("192.168.0.7:11434", HERE, False),
        ("0.0.0.0:11434", HERE, False),
        ("127.0.0.2:11434", HERE, False),
        ("2130706433", HERE, False),
        ("evil.example", HERE, False),
        ("evil.example:11434", HERE, False),
        ("localhost.evil.example", HERE, False),
        ("localhost@evil.example", HERE, False),
        ("localhost:11434:11434", HERE, False),
        ("localhost, evil.example", HERE, False),
        ("::1", HERE, False),
        ("", HERE, False),
        ("localhost", None, True),
    ],
)
def test_hosts(host: str, server: tuple[str, int] | None, allowed: bool) -> None:
    assert host_allowed(host, server, Policy(("box.example", "two.example:99"))) is allowed


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost", True),
        ("http://localhost:3000", True),
        ("https://127.0.0.1:8443", True),
        ("http://[::1]:5173", True),
        ("https://box.example", True),
        ("null", False),
        ("file://", False),
        ("http://localhost.evil.example", False),
        ("http://evil.example", False),
        ("http://localhost:3000/path", False),
        ("http://localhost http://evil.example", False),
        ("ftp://localhost", False),
        ("", False),
    ],
)
def test_origins(origin: str, allowed: bool) -> None:
    assert origin_allowed(origin, Policy(("box.example",))) is allowed


def test_beyond_loopback_a_key_is_demanded() -> None:
    assert policy_for("127.0.0.1") == policy_for("localhost") == policy_for("::1") == Policy()
    assert policy_for("0.0.0.0", api_key="k", allow_hosts=["Box.Example:1"]) == Policy(
        ("box.example:1",), "k"
    )
    for host in ("0.0.0.0", "::", "192.168.0.7", "box.example"):
        with pytest.raises(SettingError, match="beyond loopback"):
            policy_for(host)
    with pytest.raises(SettingError, match="printable"):
        policy_for("127.0.0.1", api_key="a b")
    with pytest.raises(SettingError, match="no host name"):
        policy_for("127.0.0.1", allow_hosts=["http://x"])
    assert "secret" not in repr(Policy((), "secret"))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with wired(create_app(ScriptedBackend(SCRIPT), [plain()])) as port:
        yield port


@pytest.fixture(scope="module")
def keyed() -> Iterator[int]:
    app = create_app(ScriptedBackend(SCRIPT), [plain()], policy=Policy((), "right-key"))
    with wired(app) as port:
        yield port


@pytest.mark.parametrize(
    "path", ["/plain/model", "/plain/ask", "/health", "/nowhere", "/openapi.json"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_a_foreign_host_gets_nothing(port: int, method: str, path: str) -> None:
    got = asked(port, request(method, path, host="evil.example"))
    assert (got.status, got.json.get("code") or got.json["error"]["code"]) == (
        403,
        "forbidden_host",
    )
    assert "access-control-allow-origin" not in got.headers


def test_the_host_may_have_the_port(port: int) -> None:
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "127.0.0.1"):
        assert asked(port, request("GET", "/plain/model", host=host)).status == 200


def test_a_local_page_is_named_and_no_other(port: int) -> None:
    origin = "http://localhost:3000"
    got = asked(port, request("POST", "/plain/ask", b'{"text": ""}', f"Origin: {origin}"))
    assert got.json == {"text": "Hello"}
    assert got.headers["access-control-allow-origin"] == origin
    assert got.headers["vary"] == "Origin"
    exposed = got.headers["access-control-expose-headers"].split(", ")
    assert {"x-headrace-ignored-fields", "x-request-id", "request-id"} <= set(exposed)
    assert "access-control-allow-origin" not in asked(port, request("GET", "/plain/model")).headers


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request("GET", "/nowhere", b"", "Origin: http://localhost:1"), 404),
        (request("PUT", "/plain/ask", b"", "Origin: http://localhost:1"), 405),
        (request("POST", "/plain/ask", b"[", "Origin: http://localhost:1"), 400),
        (
            request("POST", "/plain/ask", b"", "Origin: http://localhost:1", "Content-Length: 1"),
            400,
        ),
        (
            request(
                "GET", "/plain/ask", b"", "Origin: http://localhost:1", "Content-Length: 99999999"
            ),
            413,
        ),
        (
            request("GET", "/plain/ask", b"", "Origin: http://localhost:1", "X: " + "x" * 70_000),
            431,
        ),
    ],
)
def test_a_local_page_can_read_errors(port: int, data: bytes, status: int) -> None:
    got = asked(port, data)
    assert got.status == status
    assert got.headers["access-control-allow-origin"] == "http://localhost:1"


def test_a_foreign_page_is_refused(port: int) -> None:
    for origin in ("https://evil.example", "null"):
        got = asked(port, request("POST", "/plain/ask", b'{"text": ""}', f"Origin: {origin}"))
        assert (got.status, got.json["code"]) == (403, "forbidden_origin")
        assert "access-control-allow-origin" not in got.headers


def preflight(origin: str, *more: str) -> bytes:
    asking = (
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: content-type, x-api-key",
    )
    return request("OPTIONS", "/plain/ask", b"", f"Origin: {origin}", *asking, *more)


def test_preflight(port: int, keyed: int) -> None:
    for at in (port, keyed):
        got = asked(
            at, preflight("http://localhost:3000", "Access-Control-Request-Private-Network: true")
        )
        assert (got.status, got.body) == (204, b"")
        assert got.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert got.headers["access-control-allow-methods"] == "POST, HEAD, OPTIONS"
        assert got.headers["access-control-allow-headers"] == "content-type, x-api-key"
        assert got.headers["access-control-allow-private-network"] == "true"
        foreign = asked(at, preflight("https://evil.example"))
        assert foreign.status == 403
        assert not {name for name in foreign.headers if name.startswith("access-control")}


@pytest.mark.parametrize(
    ("field", "status"),
    [
        ("Authorization: Bearer right-key", 200),
        ("Authorization: bearer right-key", 200),
        ("x-api-key: right-key", 200),
        ("Authorization: Bearer wrong\r\nx-api-key: right-key", 200),
        ("Authorization: Bearer right-key2", 401),
        ("Authorization: Basic right-key", 401),
        ("Authorization: right-key", 401),
        ("Authorization: Bearer", 401),
        ("x-api-key: \xff", 401),
        ("x-api-key:", 401),
        ("X: y", 401),
    ],
)
def test_keys(keyed: int, field: str, status: int) -> None:
    got = asked(keyed, request("POST", "/plain/ask", b'{"text": ""}', field))
    assert got.status == status
    if status == 401:
        assert got.json == {"wrong": "a valid API key is needed", "code": "invalid_api_key"}
        assert got.headers["www-authenticate"] == "Bearer"


def test_health_needs_no_key_and_nothing_else_is_open(keyed: int) -> None:
    assert asked(keyed, request("GET", "/health")).json == {"status": "ok"}
    for path in ("/openapi.json", "/nowhere", "/health/x", "/plain/model", "//health"):
        assert asked(keyed, request("GET", path)).status == 401
