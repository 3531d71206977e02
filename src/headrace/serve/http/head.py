"""The head of an HTTP/1 request, read strictly: what could mean two things is refused. Pure; knows no socket.

Limits count the whole head, however it was cut into packets. After RFC 9110 and RFC 9112.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.serve.failure import INVALID, RequestError

MAX_HEAD = 64 << 10  # bytes, with the blank line
MAX_FIELDS = 1000
MAX_BODY = 32 << 20  # bytes
MAX_EMPTY = 4  # lines in front of a request

_END = re.compile(rb"\n\r?\n")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_LENGTH = re.compile(rb"0*([0-9]+)")
_ORIGIN = re.compile(rb"\r\n[Oo]rigin:[ \t]*([\x21-\x7e]+)[ \t]*\r\n")
_ABSOLUTE = re.compile(r"https?://([^/?#@]+)(/[^?#]*)?(\?.*)?", re.IGNORECASE)

Fields = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class Head:
    """A request without its body. target: path and query; host: whom it is for, of an absolute target or the Host
    field; fields: names in lower case; length: bytes of the body."""

    method: str
    target: str
    host: str | None
    fields: Fields
    length: int
    minor: int

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def field(self, name: bytes) -> str | None:
        """A field's first value."""
        return next((value.decode("latin-1") for key, value in self.fields if key == name), None)

    @property
    def wire(self) -> bytes:
        """The head in its plainest form: path as target, one Host, no space around values, no zero before a length."""
        host = () if self.host is None else ((b"host", self.host.encode("latin-1")),)
        length = str(self.length).encode()
        fields = (
            *host,
            *(
                (name, length if name == b"content-length" else value)
                for name, value in self.fields
                if name != b"host"
            ),
        )
        lines = [f"{self.method} {self.target} HTTP/1.{self.minor}".encode()]
        lines += [name + b": " + value for name, value in fields]
        return b"\r\n".join([*lines, b"", b""])


def end_of_head(data: bytes | bytearray, start: int = 0) -> int:
    """Where the first byte behind the blank line is, or -1. start: how much was looked at before."""
    found = _END.search(data, max(0, start - 2))
    return found.end() if found else -1


def begins_well(data: bytes | bytearray) -> bool:
    """Whether bytes may be the beginning of a head; a TLS handshake may not."""
    return data in (b"", b"\r") or _TOKEN.match(data) is not None


def path_of(data: bytes | bytearray) -> str:
    """The path of a head that may be incomplete or wrong, to choose the shape of an error; empty if there is none."""
    words = bytes(data[:4096]).split(b"\r\n", 1)[0].split(b" ")
    if len(words) < 2 or not words[1].startswith(b"/"):
        return ""
    return words[1].decode("latin-1").partition("?")[0]


def origin_of(data: bytes | bytearray) -> str | None:
    """The Origin of a head that may be incomplete or wrong."""
    found = _ORIGIN.search(data)
    return found[1].decode() if found else None


def read_head(raw: bytes) -> Head:
    """A head from its bytes, up to the blank line and with it. Raises RequestError with the status to answer."""
    lines = raw.split(b"\r\n")
    if len(lines) < 3 or lines[-2:] != [b"", b""]:
        raise RequestError("the lines of the head have to end with CR LF")
    line = _LINE.fullmatch(lines[0])
    if line is None:
        raise RequestError("the request line is malformed")
    if line[3] != b"1" or line[4] not in (b"0", b"1"):
        raise RequestError("this server speaks HTTP/1.1", status=505, code="version_not_supported")
    if len(lines) - 3 > MAX_FIELDS:
        raise RequestError(
            f"the request has more than {MAX_FIELDS:,} headers",
            status=431,
            code="headers_too_large",
        )
    minor = int(line[4])
    fields = tuple(_field(line) for line in lines[1:-2])
    target, authority = _target(line[1].decode(), line[2].decode())
    hosts = [value for name, value in fields if name == b"host"]
    if len(hosts) > 1 or (minor and not hosts):
        raise RequestError("the head has to have one Host field")
    host = authority or (hosts[0].decode("latin-1") if hosts else None)
    _expectation(fields, minor)
    return Head(line[1].decode(), target, host, fields, _length(fields, minor), minor)


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    value = value.strip(b" \t")
    if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise RequestError("a header line is malformed")
    return name.lower(), value


def _target(method: str, target: str) -> tuple[str, str | None]:
    """Path and query, and the authority that an absolute target names."""
    if target.startswith("/") or (method == "OPTIONS" and target == "*"):
        return target, None
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise RequestError("the target of the request is malformed")
    return (absolute[2] or "/") + (absolute[3] or ""), absolute[1]


def _length(fields: Fields, minor: int) -> int:
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
    if codings and (lengths or not minor):
        raise RequestError("Transfer-Encoding beside Content-Length, or in HTTP/1.0")
    if codings == [b"chunked"]:
        raise RequestError(
            "a chunked body is not accepted; send Content-Length instead",
            status=411,
            code="length_required",
        )
    if codings:
        raise RequestError("unknown Transfer-Encoding", status=501, code="unsupported")
    if not lengths:
        return 0
    digits = _LENGTH.fullmatch(lengths[0])
    if len(lengths) > 1 or digits is None:
        raise RequestError("Content-Length has to be one number", code=INVALID)
    if len(digits[1]) > len(str(MAX_BODY)) or int(digits[1]) > MAX_BODY:
        raise too_large()
    return int(digits[1])


def _expectation(fields: Fields, minor: int) -> None:
    wrong = [v for name, v in fields if name == b"expect" and v.lower() != b"100-continue"]
    if wrong and minor:
        raise RequestError("unknown expectation", status=417, code="expectation_failed")


def too_large() -> RequestError:
    """A body over the limit."""
    return RequestError(
        f"the body is larger than {MAX_BODY:,} bytes", status=413, code="request_too_large"
    )


def head_too_large() -> RequestError:
    """A head over the limit."""
    return RequestError(
        f"the request's headers are larger than {MAX_HEAD:,} bytes",
        status=431,
        code="headers_too_large",
    )
