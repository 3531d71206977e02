"""docs/api.md: its examples run as they stand and print what it says, and its tables are those of the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.serve.dialect import DEFAULT_LIMIT
from headrace.serve.dialects import anthropic, gateway, ollama, openai_chat
from headrace.serve.images import MAX_ASPECT, MAX_BYTES, MAX_PIXELS
from headrace.serve.model.profiles import CHAT, STRICT, THINKING, TOOLS, Profile
from serve import fields
from serve.pages import Example, examples
from serve.real import DIALECTS, real_server

TEXT = fields.PAGE.read_text("utf-8")
OWN = ("GET /health", "GET /openapi.json")  # of the server, in no dialect


@pytest.fixture(scope="module")
def url(default_model: Path) -> Iterator[str]:
    with real_server(default_model) as url:
        yield url


def printed(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("example", examples("api.md", "sh"), ids=lambda e: e.name)
def test_curl_prints_what_the_page_says(example: Example, url: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    example.check(printed(["sh", "-c", example.at(url)], tmp_path))


@pytest.mark.parametrize("example", examples("api.md", "python"), ids=lambda e: e.name)
def test_python_prints_what_the_page_says(example: Example, url: str, tmp_path: Path) -> None:
    example.check(printed([sys.executable, "-c", example.at(url)], tmp_path))


def test_the_program_of_the_readme_answers(url: str, tmp_path: Path) -> None:
    (example,) = [e for e in examples("../README.md", "python") if "base_url" in e.code]
    assert printed([sys.executable, "-c", example.at(url)], tmp_path).strip()


def test_every_dialect_has_curl_and_an_sdk() -> None:
    for title, *_ in fields.PARTS.values():
        part = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
        assert part, title
        assert "```sh\ncurl" in part[1], title
        assert "```python\n" in part[1] or "```js\n" in part[1], title


def test_the_tables_are_fresh() -> None:
    assert fields.page(TEXT) == TEXT, "PYTHONPATH=tests python -m serve.fields"
    assert fields.OBJECTS.read_text("utf-8") == fields.objects()


def test_every_body_has_its_table() -> None:
    marked = set(re.findall(r"<!-- fields (\w+)\.(\w+) -->", TEXT))
    wanted = {
        (dialect, name)
        for dialect, (_, bodies, shown) in fields.PARTS.items()
        for name in (*bodies, *shown)
    }
    assert marked == wanted - {("ollama", "ShowBody")}


def test_every_object_that_a_table_names_is_explained() -> None:
    for dialect, (title, bodies, shown) in fields.PARTS.items():
        tables = [fields.table(fields.kind(dialect, name)) for name in (*bodies, *shown)]
        part = fields.objects().partition(f"## {title}\n")[2].partition("\n## ")[0]
        named = set(re.findall(r"`([A-Z]\w+)`", "\n".join([*tables, part])))
        explained = set(re.findall(r"^\| `(\w+)` \|", part, re.M))
        assert named - set(shown) == explained, title


def test_every_endpoint_is_listed() -> None:
    part = TEXT.partition("## Endpoints\n")[2].partition("\n## ")[0]
    listed = re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", part)
    served = [
        f"{endpoint.method} {endpoint.path.replace(':path}', '}')}"
        for dialect in DIALECTS
        for endpoint in dialect.ENDPOINTS
    ]
    assert sorted(listed) == sorted([*served, *OWN])


@pytest.mark.parametrize(
    ("kind", "profile"),
    [
        ("with tools", TOOLS),
        ("that reasons", THINKING),
        ("with a format of the answer", STRICT),
        ("any other", CHAT),
    ],
)
def test_the_defaults_of_sampling(kind: str, profile: Profile) -> None:
    values = (
        profile.temperature,
        profile.top_p,
        profile.top_k,
        profile.min_p,
        profile.presence_penalty,
        profile.repetition_penalty,
    )
    assert f"| {kind} | {' | '.join(f'{value:g}' for value in values)} |" in TEXT


def test_how_answers_end() -> None:
    rows = {
        "the model was done": "stop",
        "a stop sequence, which is left out": "stop_sequence",
        "tools are called": "tool_calls",
        "its limit": "length",
        "the window": "context",
    }
    for title, reason in rows.items():
        (row,) = re.findall(rf"^\| {title} \|(.*)\|$", TEXT, re.M)
        chat, _, messages, lines, gate = (cell.strip() for cell in row.split("|"))
        assert chat == f"`{openai_chat.REASONS[reason]}`"
        assert messages == f"`{anthropic.STOPS[reason]}`"
        assert lines == ("`length`" if reason in ("length", "context") else "`stop`")
        assert gate == f"`{gateway.UNIFIED[reason]}`"


def test_every_code_of_an_error_is_one_of_the_code() -> None:
    part = TEXT.partition("### Errors\n")[2].partition("\n[http]")[0]
    codes = re.findall(r"^\| [\d, ]+ \| `(\w+)` \|", part, re.M)
    assert len(codes) == 11
    source = Path(headrace.__file__).parent
    files = [*source.rglob("serve/**/*.py"), source / "errors.py"]
    written = "".join(path.read_text("utf-8") for path in files)
    assert [code for code in codes if f'"{code}"' not in written] == []


def test_the_limits_of_length_and_images() -> None:
    assert (
        f"at most {DEFAULT_LIMIT:,} tokens; on\nOllama's endpoints {ollama.DEFAULT_LIMIT}." in TEXT
    )
    assert f"{MAX_BYTES >> 20} MiB and {MAX_PIXELS:,} pixels each" in TEXT
    assert f"no side more than {MAX_ASPECT} times the other" in TEXT
