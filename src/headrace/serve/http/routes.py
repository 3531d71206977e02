"""Which endpoint a path and a method mean, and in which dialect's shape an error of a path is told. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from headrace.serve.dialect import Endpoint, ErrorBody
from headrace.serve.events import Failure
from headrace.serve.request import Json

_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")


@dataclass
class Place:
    """A path: its endpoints by method, and the shape of its errors."""

    pattern: tuple[str, ...]
    error: ErrorBody
    endpoints: dict[str, Endpoint] = field(default_factory=dict)

    @property
    def dialect(self) -> str:
        """The name of the module that shapes its errors; this one's for what is no dialect's."""
        return self.error.__module__.rpartition(".")[2]

    @property
    def methods(self) -> tuple[str, ...]:
        """What may be asked, for the Allow field."""
        return (*self.endpoints, "HEAD", "OPTIONS")


def plain_error(what: Failure) -> Json:
    """An error of a path that no dialect has."""
    kind = "invalid_request_error" if what.status < 500 else "api_error"
    return {"error": {"message": what.text, "type": kind, "code": what.code}}


class Table:
    """All paths of a server; the first dialect that comes near to an unknown path lends the shape of its error."""

    def __init__(self, dialects: Sequence[ModuleType], own: Sequence[Endpoint] = ()) -> None:
        self.places: list[Place] = []
        for dialect in dialects:
            for endpoint in dialect.ENDPOINTS:
                self._add(endpoint, dialect.error)
        for endpoint in own:
            self._add(endpoint, plain_error)
        self.places.sort(key=lambda place: [part.startswith("{") for part in place.pattern])

    def _add(self, endpoint: Endpoint, error: ErrorBody) -> None:
        pattern = _parts(endpoint.path)
        known = (place for place in self.places if place.pattern == pattern)
        place = next(known, None)
        if place is None:
            place = Place(pattern, error)
            self.places.append(place)
        assert endpoint.method not in place.endpoints, f"{endpoint.path} is there twice"
        place.endpoints[endpoint.method] = endpoint

    def find(self, path: str) -> tuple[Place, Mapping[str, str]] | None:
        """The place of a path and its parameters. A slash at the end does not count."""
        parts = _parts(path)
        for place in self.places:
            if (found := _matched(place.pattern, parts)) is not None:
                return place, found
        return None

    def error(self, path: str) -> ErrorBody:
        """The shape of an error: the dialect's that shares most of the path's beginning."""
        parts, most = _parts(path), 0
        best: ErrorBody = plain_error
        for place in self.places:
            if (shared := _shared(place.pattern, parts)) > most:
                best, most = place.error, shared
        return best


def _parts(path: str) -> tuple[str, ...]:
    return tuple(path.removesuffix("/").split("/")[1:])


def _matched(pattern: tuple[str, ...], parts: tuple[str, ...]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for i, want in enumerate(pattern):
        parameter = _PARAMETER.fullmatch(want)
        if i >= len(parts) or (not parts[i] if parameter else parts[i] != want):
            return None
        if parameter and parameter[2]:
            return found | {parameter[1]: "/".join(parts[i:])}
        if parameter:
            found[parameter[1]] = parts[i]
    return found if len(parts) == len(pattern) else None


def _shared(pattern: tuple[str, ...], parts: tuple[str, ...]) -> int:
    for i, (want, part) in enumerate(zip(pattern, parts, strict=False)):
        if want != part and not _PARAMETER.fullmatch(want):
            return i
    return min(len(pattern), len(parts))
