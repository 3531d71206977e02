"""Who may ask: the Host that a request is for, the page that it comes from, and the key that it brings. Pure.

A page of a foreign site can reach a server on loopback, by its own name if that name is made to resolve to 127.0.0.1
(DNS rebinding; no Origin then). So Host is always checked, and Origin wherever there is one.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.errors import SettingError
from headrace.serve.failure import RequestError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = ("/health",)  # without a key
EXPOSED = "x-headrace-ignored-fields, x-request-id, request-id, retry-after"

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{0,5}))?")
_ORIGIN = re.compile(r"https?://(.+)")
_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z, -]{1,4096}")

Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Policy:
    """hosts: names that are served beside loopback and the address itself, each with a port or for any port."""

    hosts: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)


def policy_for(host: str, *, api_key: str | None = None, allow_hosts: Sequence[str] = ()) -> Policy:
    """The policy of a server that listens on `host`. Raises SettingError: beyond loopback a key is demanded."""
    if api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", api_key):
        raise SettingError("the API key has to be printable ASCII without spaces")
    if api_key is None and not is_loopback(host):
        raise SettingError(
            f"--host {host} is beyond loopback and no API key is set", hint="give --api-key"
        )
    for name in allow_hosts:
        if _split(name) is None:
            raise SettingError(f"--allow-host {name!r:.100} is no host name or address")
    return Policy(tuple(name.lower() for name in allow_hosts), api_key)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check(
    path: str,
    headers: Mapping[str, str],
    server: tuple[str, int | None] | None,
    policy: Policy,
) -> None:
    """Raises RequestError for whoever may not ask. headers: names in lower case; server: the local address."""
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not host_allowed(host, server, policy):
        raise RequestError(
            f"the host {host!r:.200} is not served here",
            status=403,
            code="forbidden_host",
            hint="--allow-host adds a name",
        )
    if origin is not None and not origin_allowed(origin, policy):
        raise RequestError(
            f"the origin {origin!r:.200} is not allowed", status=403, code="forbidden_origin"
        )
    if policy.api_key is not None and path not in OPEN_PATHS and not _key(headers, policy.api_key):
        raise RequestError("a valid API key is needed", status=401, code="invalid_api_key")


def host_allowed(host: str, server: tuple[str, int | None] | None, policy: Policy) -> bool:
    """Whether a Host field names this server: loopback or the address itself, with its port or none; or an allowed
    name."""
    found = _split(host)
    if found is None:
        return False
    name, port = found
    address, own = server or ("", None)
    if port in ("", str(own)) and (name in LOOPBACK or name == _literal(address)):
        return True
    return name in policy.hosts or f"{name}:{port}" in policy.hosts


def origin_allowed(origin: str, policy: Policy) -> bool:
    """Whether a page may read answers: of loopback or an allowed host, on any port."""
    found = _ORIGIN.fullmatch(origin.lower())
    place = _split(found[1]) if found else None
    if place is None:
        return False
    allowed = {_split(name) or ("", "") for name in policy.hosts}
    return place[0] in LOOPBACK or place[0] in {name for name, _ in allowed}


def cors(origin: str | None, policy: Policy) -> Pairs:
    """Headers that let a page read the answer: they name it, and no other."""
    if origin is None:
        return ()
    if not origin_allowed(origin, policy):
        return (("vary", "Origin"),)
    return (
        ("access-control-allow-origin", origin),
        ("access-control-expose-headers", EXPOSED),
        ("vary", "Origin"),
    )


def preflight(headers: Mapping[str, str], methods: Sequence[str]) -> Pairs:
    """Headers beside `cors` that allow what a browser asks for in advance."""
    asked = headers.get("access-control-request-headers", "")
    out = [("access-control-allow-methods", ", ".join(methods)), ("access-control-max-age", "600")]
    if _NAMES.fullmatch(asked):
        out.append(("access-control-allow-headers", asked))
    if headers.get("access-control-request-private-network") == "true":
        out.append(("access-control-allow-private-network", "true"))
    return out


def _key(headers: Mapping[str, str], key: str) -> bool:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", "")]
    given += [bearer.strip()] if scheme.lower() == "bearer" else []
    right = [hmac.compare_digest(text.encode("latin-1", "replace"), key.encode()) for text in given]
    return any(right)


def _split(host: str) -> tuple[str, str] | None:
    """Name and port, empty if there is none; None if it is neither."""
    found = _HOST.fullmatch(host.lower())
    return (found[1], found[2] or "") if found else None


def _literal(address: str) -> str:
    """An address as a Host field has it."""
    plain = address.removeprefix("::ffff:").partition("%")[0]
    return f"[{plain}]" if ":" in plain else plain
