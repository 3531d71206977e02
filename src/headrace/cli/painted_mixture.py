"""Painted mixtures: experts in a file, read by a real stream into pools of several sizes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.artifact.records import RECORD_ALIGNMENT, LayerRecords
from headrace.cli import painted
from headrace.engine.mixture import Mixture
from headrace.errors import FileError
from headrace.experts.stream import ExpertStream, StreamOptions
from headrace.kernels.program import Backend, Program, Runner
from headrace.kernels.select import native_module

# A prompt that sweeps, a pass of a few rows, and steps that ask for experts and guess them.
PASSES: painted.Passes = ((34, 5), (1, 3), (1, 0), (1, 1), (1, 0))


@dataclass(frozen=True)
class Pool:
    """A pool by name; without options it holds every expert."""

    name: str
    options: StreamOptions | None = None


POOLS = (
    Pool("all experts in memory"),
    Pool("a pool of 5 experts", StreamOptions(5, 5, reserve=2, sweep_slots=2)),
)


@dataclass(frozen=True, eq=False)
class PaintedMixture:
    """A painted model whose experts lie in a file."""

    program: Program
    records: tuple[LayerRecords, ...]

    def outcome(self, backend: Backend, pool: Pool) -> painted.Outcome:
        """What a backend computes while its experts come and go."""
        shape = self.program.shape
        total = sum(r.num_experts for r in self.records)
        options = pool.options or StreamOptions(total, total)
        native = None if backend.name == "reference" else native_module()
        stream = ExpertStream(
            self.records, shape.num_layers, shape.num_experts, options, native=native
        )

        def bind(runner: Runner) -> painted.Run:
            run = Mixture(self.program, runner, stream).run
            return partial(run, marks=(len(self.program.ops),), admit=True)

        with closing(stream):
            return painted.outcome(self.program, backend, PASSES, bind)


def paint(case: painted.Case, path: Path) -> PaintedMixture:
    """Paint a mixture, its experts into a file at `path`. Raises FileError."""
    model = painted.paint(case)
    try:
        return PaintedMixture(model.program, tuple(_written(model, path)))
    except OSError as error:
        raise FileError(path, "write", error.strerror or str(error)) from None


def _written(model: painted.Painted, path: Path) -> list[LayerRecords]:
    out = []
    with path.open("wb") as file:
        for layer, records in model.records.items():
            assert file.tell() % RECORD_ALIGNMENT == 0
            layout = model.layouts[layer]
            out.append(LayerRecords(layer, path, file.tell(), len(records), layout))
            file.write(records.tobytes())
    return out
