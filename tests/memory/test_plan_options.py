"""Options of a plan: what cannot be is refused by its name, and what has no effect is noted."""

from __future__ import annotations

import pytest

from headrace.errors import SettingError
from headrace.memory.inputs import PlanOptions
from headrace.memory.ledger import Plan
from headrace.memory.plan import plan
from memory.model import MACHINE, MIXTURE


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["memory_gb", "memory_limit_gb", "pool_gb"])
def test_impossible_sizes(name: str, value: float) -> None:
    with pytest.raises(SettingError, match=name):
        PlanOptions(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"experts_per_layer": 0},
        {"max_ram_percent": 0},
        {"max_ram_percent": 101},
        {"max_ram_percent": float("nan")},
        {"max_context": 0},
        {"max_context": "much"},
        {"retained_contexts": -1},
        {"memory_limit_gb": 4, "memory_gb": 4},
        {"memory_limit_gb": 4, "pool_gb": 4},
        {"memory_limit_gb": 4, "experts_per_layer": 4},
    ],
)
def test_options_that_cannot_be(options: dict[str, float]) -> None:
    with pytest.raises(SettingError):
        PlanOptions(**options)


def test_every_option_without_effect_is_noted() -> None:
    def notes(**options: float) -> list[str]:
        made = plan(MACHINE, MIXTURE, PlanOptions(**options))
        assert isinstance(made, Plan)
        return [n for n in made.notes if "no effect" in n]

    for size in ({"memory_gb": 4}, {"pool_gb": 1}, {"experts_per_layer": 16}):
        assert notes(**size) == []
        assert notes(**size, max_ram_percent=50) == [
            f"max_ram_percent has no effect beside {next(iter(size))}"
        ]
    assert notes(max_ram_percent=50) == notes(memory_limit_gb=4, max_ram_percent=50) == []
    assert len(notes(experts_per_layer=16, pool_gb=1, memory_gb=4, max_ram_percent=50)) == 3


@pytest.mark.parametrize("value", [True, False, 2.5, "4", b"4", [4], {}, complex(1), float("nan")])
@pytest.mark.parametrize(
    "name",
    [
        "memory_gb", "memory_limit_gb", "pool_gb", "max_ram_percent", "experts_per_layer", "max_context",
        "retained_contexts",
    ],
)  # fmt: skip
def test_options_of_another_type(name: str, value: object) -> None:
    numbers = ("memory_gb", "memory_limit_gb", "pool_gb", "max_ram_percent")
    if value == 2.5 and name in numbers:
        assert getattr(PlanOptions(**{name: value}), name) == 2.5
        return
    with pytest.raises(SettingError, match=name):
        PlanOptions(**{name: value})
    for required in ("max_context", "retained_contexts"):
        with pytest.raises(SettingError, match=required):
            PlanOptions(**{required: None})
