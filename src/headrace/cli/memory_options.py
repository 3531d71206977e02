"""The memory options of every command that has them: one place for flags, help and the simulated machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from headrace.cli.whole import WHOLE, WHOLE_OR_AUTO
from headrace.errors import SettingError
from headrace.memory.inputs import PlanOptions, gigabytes
from headrace.memory.machine import Machine, read_machine, simulated, usable_cores


@Parameter(name="*")
@dataclass(frozen=True)
class MemoryOptions:
    """Flags of the memory options. `None` is not given."""

    memory_gb: Annotated[
        float | None,
        Parameter(
            help=(
                "Total memory of the process in GB (10^9 bytes): fixed, and never exceeded. What "
                "the model, the context and a margin leave holds experts."
            )
        ),
    ] = None

    memory_limit_gb: Annotated[
        float | None,
        Parameter(
            help=(
                "A ceiling in GB (10^9 bytes) under which the pool of experts shrinks and grows "
                "with what others need. Not together with the fixed sizes."
            )
        ),
    ] = None

    experts_per_layer: Annotated[
        int | None,
        WHOLE,
        Parameter(
            help=(
                "Size of the pool of experts, as experts for each layer; the pool is one for all "
                "layers. Beats --pool-gb and --memory-gb."
            )
        ),
    ] = None

    pool_gb: Annotated[
        float | None,
        Parameter(help="Size of the pool of experts in GB (10^9 bytes). Beats --memory-gb."),
    ] = None

    max_ram_percent: Annotated[
        float | None,
        Parameter(
            help=(
                "Largest share of memory that an automatic size may take: 70 if not given. It "
                "lowers --memory-limit-gb too, and has no effect on a fixed size."
            )
        ),
    ] = None

    max_context: Annotated[
        Literal["auto"] | int,
        WHOLE_OR_AUTO,
        Parameter(
            help=(
                "Positions to make room for, at most the model's own; auto takes what costs no "
                "experts."
            )
        ),
    ] = "auto"

    def options(self) -> PlanOptions:
        """The same for the planner. Raises SettingError."""
        return PlanOptions(
            memory_gb=self.memory_gb,
            memory_limit_gb=self.memory_limit_gb,
            experts_per_layer=self.experts_per_layer,
            pool_gb=self.pool_gb,
            max_ram_percent=self.max_ram_percent,
            max_context=self.max_context,
        )


DEFAULT_MEMORY = MemoryOptions()


@Parameter(name="*")
@dataclass(frozen=True)
class SimOptions:
    """Flags of a machine to plan for in place of this one."""

    sim_ram: Annotated[
        float | None,
        Parameter(
            help=(
                "Plan for a machine with this much memory in GB (10^9 bytes), all of it free. Its"
                " processors and disk stay this machine's."
            )
        ),
    ] = None

    sim_available: Annotated[
        float | None,
        Parameter(help="How much of --sim-ram is free, in GB."),
    ] = None

    def machine(self) -> Machine:
        """The machine to plan for: simulated, or this one as it is now. Raises SettingError."""
        if self.sim_ram is None:
            if self.sim_available is not None:
                raise SettingError("sim_available needs sim_ram")
            return read_machine()
        free = self.sim_available
        return simulated(
            gigabytes("sim_ram", self.sim_ram),
            None if free is None else gigabytes("sim_available", free) if free else 0,
            usable_cores(),
        )


DEFAULT_SIM = SimOptions()
