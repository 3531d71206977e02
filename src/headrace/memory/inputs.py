"""What a plan is made from besides the machine: facts of a model and the wishes of a user. Frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from headrace.errors import InputError, SettingError
from headrace.memory.machine import MAX_BYTES

GB = 10**9  # as in every memory option
POSITION_BYTES = 128  # a token id in the lists of a prompt, a sequence and an answer
MAX_CONTEXT = 1 << 24
_MAX_COUNT = 1 << 24
DEFAULT_RAM_PERCENT = 70.0


def gigabytes(name: str, value: float) -> int:
    """Decimal gigabytes as bytes. Raises SettingError for what is no possible amount."""
    _check_number(name, value)
    if not math.isfinite(value) or value <= 0 or value > MAX_BYTES / GB:
        raise SettingError(f"{name} is {value:g}; it must be a positive number of GB")
    return round(value * GB)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{name} is {value!r:.40}; it must be a number")


@dataclass(frozen=True)
class Workspace:
    """Memory of the computation itself, in bytes: a fixed part, one for a row of a pass, one for a position, one for a
    further sequence.

    A row of a mixture has `pairs_per_row` pairs with an expert, of which a pass holds `max_pairs` at once; a pass of
    more needs sums for its rows.
    """

    fixed: int = 0
    per_row: int = 0
    per_position: int = 0
    per_pair: int = 0
    pairs_per_row: int = 0
    max_pairs: int = 0
    sums_per_row: int = 0
    per_sequence: int = 0  # that may run beside the first, besides its keys and values

    def beside(self, sequences: int, context: int) -> int:
        """Bytes for so many sequences beside the first."""
        return sequences * (self.per_sequence + POSITION_BYTES * context)

    def nbytes(self, rows: int, context: int) -> int:
        pairs = rows * self.pairs_per_row
        sums = self.sums_per_row * rows if pairs > self.max_pairs else 0
        held = self.per_pair * min(pairs, self.max_pairs) + sums
        return self.fixed + self.per_row * rows + self.per_position * context + held


@dataclass(frozen=True)
class ModelFacts:
    """What a plan must know of a model. Sizes in bytes; a dense model has no experts and no slots.

    expert_slot_bytes: the largest record of one expert. text_bytes: the tokenizer in memory.
    Raises InputError for figures that contradict each other or are out of bounds.
    """

    dense_bytes: int
    kv_bytes_per_token: int
    context: int
    workspace: Workspace = Workspace()
    expert_slot_bytes: int = 0
    num_moe_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    text_bytes: int = 0

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "workspace"}
        sizes |= {f"workspace.{f.name}": getattr(self.workspace, f.name) for f in fields(Workspace)}
        for name, value in sizes.items():
            most = _MAX_COUNT if name in _COUNTS else MAX_BYTES
            if type(value) is not int or not 0 <= value <= most:
                raise InputError(f"model facts: {name} is {value!r:.40}; it must be 0 to {most}")
        if self.context < 1:
            raise InputError("model facts: context is 0; it must be at least 1")
        experts = (self.expert_slot_bytes, self.num_moe_layers, self.num_experts, self.top_k)
        if any(experts) and (not all(experts) or self.top_k > self.num_experts):
            raise InputError(
                f"model facts: {self.num_moe_layers} layers, {self.num_experts} experts of"
                f" {self.expert_slot_bytes} bytes and {self.top_k} used contradict each other"
            )

    @property
    def num_slots(self) -> int:
        """How many experts there are in all layers."""
        return self.num_moe_layers * self.num_experts


_COUNTS = {"context", "num_moe_layers", "num_experts", "top_k"}


@dataclass(frozen=True)
class PlanOptions:
    """The memory options. GB are decimal, 10^9 bytes. Raises SettingError.

    experts_per_layer beats pool_gb, which beats memory_gb; memory_limit_gb stands alone.
    max_ram_percent: of automatic targets; None is 70 of the automatic one, and no bound of a limit's.
    retained_contexts: whole conversations that stay in memory besides the running ones. parallel: generations that may
    each fill a window of max_context at the same time; more share these windows as far as they go.
    """

    memory_gb: float | None = None
    memory_limit_gb: float | None = None
    experts_per_layer: int | None = None
    pool_gb: float | None = None
    max_ram_percent: float | None = None
    max_context: Literal["auto"] | int = "auto"
    retained_contexts: int = 0
    parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("memory_gb", "memory_limit_gb", "pool_gb"):
            if getattr(self, name) is not None:
                gigabytes(name, getattr(self, name))
        self._whole("experts_per_layer", 1, _MAX_COUNT)
        if self.max_ram_percent is not None:
            _check_number("max_ram_percent", self.max_ram_percent)
            self._within("max_ram_percent", 1, 100)
        self._whole("retained_contexts", 0, 1024, optional=False)
        self._whole("parallel", 1, 1024, optional=False)
        if self.max_context != "auto":
            self._whole("max_context", 1, MAX_CONTEXT, optional=False, word="auto or ")
        fixed = [
            n for n in ("memory_gb", "experts_per_layer", "pool_gb") if getattr(self, n) is not None
        ]
        if self.memory_limit_gb is not None and fixed:
            raise SettingError(
                f"memory_limit_gb cannot be combined with {fixed[0]}",
                hint="the first is a ceiling under which the pool adapts, the other fixes a size",
            )

    def _whole(
        self, name: str, low: int, high: int, *, optional: bool = True, word: str = ""
    ) -> None:
        value = getattr(self, name)
        if type(value) is not int and not (optional and value is None):
            raise SettingError(f"{name} is {value!r:.40}; it must be {word}a whole number")
        self._within(name, low, high)

    def _within(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:  # also refuses NaN
            raise SettingError(f"{name} is {value}; it must be between {low} and {high}")

    @property
    def source(self) -> str:
        """The option that decides the size, by precedence; `auto` where none is given."""
        order = ("experts_per_layer", "pool_gb", "memory_gb", "memory_limit_gb")
        return next((name for name in order if getattr(self, name) is not None), "auto")


def ignored(options: PlanOptions) -> list[str]:
    """Notes on what the precedence of the options leaves without effect."""
    fixed, source = ("experts_per_layer", "pool_gb", "memory_gb"), options.source
    order = (*fixed[1:], "max_ram_percent")
    given = [n for n in order if n != source and getattr(options, n) is not None]
    return [f"{name} has no effect beside {source}" for name in given if source in fixed]
