"""Clients that people use read what they are told, also when they send too much."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

import httpx
import pytest
import requests

from headrace.serve.app import create_app
from headrace.serve.events import Finished, Started, TextDelta, Usage
from headrace.serve.http.guard import Policy
from headrace.serve.http.head import MAX_BODY
from serve.http.plain import plain
from serve.scripted import ScriptedBackend
from serve.served import served

SCRIPT = [Started(3, 0), TextDelta("Hello"), Finished("stop", Usage(3, 0, 1))]
LARGE = b"x" * (MAX_BODY + (8 << 20))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(create_app(ScriptedBackend(SCRIPT), [plain()], policy=Policy((), "key"))) as url:
        yield url


def of_httpx(url: str, body: bytes, key: str) -> tuple[int, bytes]:
    got = httpx.post(url, content=body, headers={"x-api-key": key}, timeout=30)
    return got.status_code, got.content


def of_requests(url: str, body: bytes, key: str) -> tuple[int, bytes]:
    got = requests.post(url, data=body, headers={"x-api-key": key}, timeout=30)
    return got.status_code, got.content


def of_urllib(url: str, body: bytes, key: str) -> tuple[int, bytes]:
    asked = urllib.request.Request(url, body, {"x-api-key": key})
    try:
        with urllib.request.urlopen(asked, timeout=30) as got:
            return got.status, got.read()
    except urllib.error.HTTPError as got:
        return got.code, got.read()


def of_curl(url: str, body: bytes, key: str) -> tuple[int, bytes]:
    line = [
        "curl",
        "-sS",
        "-m",
        "30",
        "-w",
        "%{http_code}",
        "-H",
        f"x-api-key: {key}",
        "--data-binary",
        "@-",
        url,
    ]
    out = subprocess.run(line, input=body, capture_output=True, check=True).stdout
    return int(out[-3:]), out[:-3]


CLIENTS = [of_httpx, of_requests, of_urllib]
CLIENTS += [of_curl] if shutil.which("curl") else []


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("path", "body", "key", "status"),
    [
        ("/plain/ask", b'{"text": "Hi"}', "key", 200),
        ("/plain/ask", b'{"text": "Hi"}', "no", 401),
        ("/plain/ask", LARGE, "key", 413),
        ("/plain/ask", LARGE[:MAX_BODY], "no", 401),
        ("/plain/nowhere", LARGE[:MAX_BODY], "key", 404),
    ],
)
def test_they_read_the_answer(
    url: str, client: object, path: str, body: bytes, key: str, status: int
) -> None:
    code, text = client(url + path, body, key)  # type: ignore[operator]
    assert code == status
    assert json.loads(text).get("text" if status == 200 else "code")


def test_who_sends_chunks_is_told_what_to_send(url: str) -> None:
    for size in (10, 20 << 20):
        parts = (b"x" * 65536 for _ in range(-(-size // 65536)))
        got = httpx.post(url + "/plain/ask", content=parts, headers={"x-api-key": "key"})
        assert (got.status_code, got.json()["code"]) == (411, "length_required")
