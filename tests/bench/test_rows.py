"""A recorded row is complete, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.rows import RowError
from bench_rows import every_kind, row, run

from bench import rows


def test_rows_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "speed.jsonl"
    written = list(every_kind())
    rows.append(path, written[:3])
    rows.append(path, written[3:])
    assert rows.read(path) == written


def test_a_line_carries_what_a_reader_needs() -> None:
    value = json.loads(row("speed", "prefill 512").to_json())
    assert value["median"] == 2.0
    assert value["samples"] == [1.0, 3.0, 2.0]
    assert {"date", "command", "commit", "machine"} == set(value["run"])


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert rows.read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"samples": []}, "no samples"),
        ({"samples": [1.0, float("nan")], "median": 1.0}, "not finite"),
        ({"kind": "guess"}, "kind is 'guess'"),
        ({"median": 9.0}, "median 9.0"),
        ({"surplus": 1}, "surplus"),
        ({"unit": None, "run": {}}, "missing"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(
    tmp_path: Path, change: dict[str, object], cause: str
) -> None:
    path = tmp_path / "speed.jsonl"
    good = row("speed", "prefill 512").to_json()
    path.write_text(f"{good}\n{json.dumps({**json.loads(good), **change})}\n")
    with pytest.raises(RowError, match=r"speed\.jsonl, line 2") as refused:
        rows.read(path)
    assert cause in str(refused.value)


def test_a_missing_key_is_refused() -> None:
    value = json.loads(row("speed", "prefill 512").to_json())
    del value["versions"]
    with pytest.raises(RowError, match="keys"):
        rows.from_json(json.dumps(value))


def test_the_newest_run_counts() -> None:
    old, new = run("2026-01-01T00:00:00+00:00"), run("2026-02-01T00:00:00+00:00")
    found = [row("speed", "prefill 512", run=r) for r in (old, new, old)]
    assert rows.latest(found) == [found[1]]


def test_the_newest_run_counts_for_each_number_of_threads() -> None:
    old, new = run("2026-01-01T00:00:00+00:00"), run("2026-02-01T00:00:00+00:00")
    one, two = (row("speed", "prefill 512", run=old, threads=n) for n in (1, 2))
    newer = row("speed", "prefill 512", run=new, threads=2)
    assert rows.latest([one, two, newer]) == [one, newer]
