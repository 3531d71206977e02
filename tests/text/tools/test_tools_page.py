"""docs/tools.md runs as it stands, and its table has every row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.text.tools.formats import FORMATS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "tools.md").read_text("utf-8")


def test_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/tools.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "[Said(text='Let me see.'), CallBegun(index=0, name='weather'), CallPiece"
    )
    assert second.endswith("""CallDone(index=0, arguments='{"city": "Paris"}')]""")


def test_every_row_is_in_its_table() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE) == [row.name for row in FORMATS]
