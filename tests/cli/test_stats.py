"""What a report says of a generation's experts."""

from __future__ import annotations

from headrace.cli.stats import RunFacts, lines
from headrace.values import ExpertStats, GenerationStats


def test_waiting_is_a_share_of_the_time_of_all_threads() -> None:
    """Two threads that both wait for three of ten seconds waited six seconds of their twenty."""
    experts = ExpertStats(100, 25, 50_000_000, 1_000_000, 6.0, 40, 30)
    done = GenerationStats(8, 9, 4.0, 6.0, None, "ab", "length", experts=experts)
    shown = list(lines(done, RunFacts("id", "portable", 2, 0.1)))
    assert "experts: 100 used, 75.0% in memory, 75% guessed" in shown[2]
    assert shown[2].endswith("read 50 MB (1 in vain), threads waited 30% of their time")


def test_a_generation_without_time_waited_nothing() -> None:
    experts = ExpertStats(0, 0, 0, 0, 0.0, 0, 0)
    done = GenerationStats(8, 0, 0.0, 0.0, None, "ab", "cancelled", experts=experts)
    assert any("waited 0%" in line for line in lines(done, RunFacts("id", "portable", 2, 0.1)))
