"""The page is made of the rows, and says where a target is missed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench.figures import Figures
from bench.tables import NOTHING
from bench_rows import every_kind

from bench import page, plots, report, rows

PLOTS = ("speed", "bandwidth", "load", "quality", "step", "stream")


@pytest.fixture
def figures() -> Figures:
    return Figures(every_kind())


def test_ratios_are_to_the_fastest_build(figures: Figures) -> None:
    assert figures.ratio("prefill 512", "llama.cpp (AVX2) Q4_1", 1) == 3.0
    assert figures.least_ratio("prefill 512", "Q4_1", 1) == 2.0
    assert figures.least_ratio("prefill 512", "Q4_0", 2) == 1.5
    assert figures.least_ratio("prefill 512", "Q8_0", 1) is None


def test_decode_is_compared_with_the_bandwidth(figures: Figures) -> None:
    assert figures.bytes_per_token(16) == 1_000_000
    assert figures.read_rate(16, 1) == pytest.approx(0.3)
    assert figures.bandwidth(2) == 1.0


def test_targets_say_what_was_met(figures: Figures) -> None:
    met = {t.name: t.met for t in figures.targets()}
    assert met == {
        "prefill 512, over llama.cpp Q4_1": False,
        "decode at 16, over llama.cpp Q4_1": True,
        "decode at 1,000, over llama.cpp Q4_1": True,
        "prefill 512, over llama.cpp Q4_0": False,
        "decode at 16, over llama.cpp Q4_0": False,
        "decode at 1,000, over llama.cpp Q4_0": False,
        "decode at 16, share of the read bandwidth": False,
        "start to first token, whole process": True,
        "Python's share of a greedy decode step": True,
        "KL to float32": True,
        "perplexity": False,
    }


def test_the_page_shows_every_system_and_section(figures: Figures) -> None:
    text = page.page(figures)
    assert "{{" not in text
    assert NOTHING not in text
    assert "| headrace | 300.0 | 300.0 | 300.0 |" in text
    assert "| llama.cpp (AMX) Q4_0 | 200.0 (1.50x) | 200.0 (1.50x) | 200.0 (1.50x) |" in text
    assert "| prefill 512, over llama.cpp Q4_1 | at least 3.00x | 2.00x | 2.00x | **no** |" in text
    assert "| compile | 0.000500 | 0.000900 | 0.000990 | 0.001000 | 8 |" in text
    assert "| greedy, 1 thread | 1.0% | 80 µs | 20 of 100, 7 spans | 90.0 | 80.0 |" in text
    assert "| KL under the adapter | 0.0110 | 95.0% |" in text
    assert "| set another adapter | 0.002 (0.001% of a reload) |" in text
    assert "| Project head | 2.000 | 66.7% | 30.0 | 15.0 |" in text
    assert "| headrace | 100.0 | 400.0 (4.00x) |" in text
    assert all(f"img/{name}.svg" in text for name in PLOTS)


def test_without_rows_the_page_says_so() -> None:
    text = page.page(Figures([]))
    assert text.count(NOTHING) == 14
    assert "## Targets" not in text
    assert ".svg" not in text


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    for found in every_kind():
        name = {"bandwidth": "speed", "ablation": "ablations"}.get(found.kind, found.kind)
        rows.append(results / f"{name}.jsonl", [found])
    texts = []
    for number in "12":
        docs = tmp_path / number
        report.write(results, docs)
        files = [docs / "benchmarks.md", *(docs / "img" / f"{name}.svg" for name in PLOTS)]
        texts.append([f.read_text() for f in files])
    assert texts[0] == texts[1]
    for svg in texts[0][1:]:
        ElementTree.fromstring(svg)


def test_plots_without_rows_are_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.draw(Figures([]), tmp_path)
    assert list(tmp_path.iterdir()) == []
