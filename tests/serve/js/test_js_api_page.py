"""docs/api.md: its JavaScript runs as it stands, with the official packages, and prints what the page says."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.pages import Example, examples
from serve.real import real_server


@pytest.fixture(scope="module")
def url(default_model: Path) -> Iterator[str]:
    with real_server(default_model) as url:
        yield url


@pytest.mark.parametrize("example", examples("api.md", "js"), ids=lambda e: e.name)
def test_javascript_prints_what_the_page_says(
    example: Example, node: str, node_modules: Path, url: str, tmp_path: Path
) -> None:
    (tmp_path / "node_modules").symlink_to(node_modules)
    (tmp_path / "example.mjs").write_text(example.at(url))
    done = subprocess.run(
        [node, "example.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    example.check(done.stdout)


@pytest.mark.parametrize("example", examples("clients.md", "js"), ids=lambda e: e.name)
def test_javascript_to_paste_is_javascript(
    example: Example, node: str, node_modules: Path, tmp_path: Path
) -> None:
    (tmp_path / "node_modules").symlink_to(node_modules)
    (tmp_path / "example.mjs").write_text(example.code)
    subprocess.run([node, "example.mjs"], cwd=tmp_path, check=True, timeout=120)
