"""docs/embed.md runs as it stands, and its tables name every cause and every public name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import loras
import tiny
from embed.test_lifecycle import every_error
from headrace import embed
from headrace.embed import errors

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "embed.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "model", "llama", vocab_size=259)  # no token without text
    adapter = loras.make(tmp_path / "adapter", model)
    names: dict[str, Any] = {"folder": model.path, "adapter_folder": adapter.path}
    for block in BLOCKS:
        exec(compile(block, "docs/embed.md", "exec"), names)
    names["threads"].shutdown()
    assert all(names["texts"])
    tokens = [t for t in names["answer"] if t not in names["schema"].ends]
    assert json.loads(names["model"].tokenizer.decode(tokens)) in (
        {"adult": True},
        {"adult": False},
    )


@pytest.mark.parametrize("error", sorted(every_error(), key=lambda e: e.code), ids=lambda e: e.code)
def test_every_cause_is_in_the_table(error: type[errors.EmbedError]) -> None:
    groups = {c for c in every_error() if errors.EmbedError in (c, *c.__bases__)}
    if error is errors.EmbedError:
        assert {e.__name__ for e in groups} <= {"EmbedError", *re.findall(r"`(\w+)`", PAGE)}
    elif error not in groups or error is errors.AllocationError:
        assert f"`{error.__name__}` (`{error.code}`)" in PAGE


def test_every_public_name_is_told() -> None:
    for name in embed.__all__:
        assert re.search(rf"\b{name}\b", PAGE), name


def test_every_name_of_the_tables_exists() -> None:
    """Of the right-hand column: functions, classes, and members of these."""
    rows = [line.split("|")[2] for line in PAGE.splitlines() if line.startswith("|")]
    found = {n for row in rows for n in re.findall(r"`([A-Z]\w+)(?:\.(\w+))?", row)}
    places = {**vars(errors), **vars(embed)}
    for name, member in found:
        if name.startswith(("SSLM", "Gpu", "Sslm", "None")):
            continue
        assert name in places or name in ("FileError", "ExpertReadError"), name
        if member:
            thing = places[name]
            fields = getattr(thing, "__dataclass_fields__", {})
            assert hasattr(thing, member) or member in fields, (name, member)
