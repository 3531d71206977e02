"""`headrace doctor`: the machine, the plan that `run` would load by, and what is here. Loads no model."""

from __future__ import annotations

import json as json_text
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headrace import config, locate
from headrace.artifact.manifest import MANIFEST_NAME, Manifest, read_manifest
from headrace.artifact.room import free_bytes
from headrace.cli import failure
from headrace.cli.memory_options import DEFAULT_MEMORY, DEFAULT_SIM, MemoryOptions, SimOptions
from headrace.cli.whole import WHOLE
from headrace.errors import FileError, InputError, UnknownModelError
from headrace.llm import DEFAULT_MODEL
from headrace.memory.estimate import Estimate, estimate
from headrace.memory.facts import kernel_threads, model_facts, plan_model
from headrace.memory.inputs import ModelFacts
from headrace.memory.ledger import Plan, Refusal
from headrace.memory.machine import Machine
from headrace.memory.speed import DiskSpeed, measure_disk, measure_memory

_BUSY = 10.0  # percent of the last ten seconds that something waited for memory


@dataclass(frozen=True)
class Installed:
    """A model under the home folder: where it is, and how much of the disk it takes."""

    path: str
    nbytes: int


@dataclass(frozen=True)
class Report:
    """Everything that `doctor` shows. `result` is what `run` would be given with the same options."""

    machine: Machine
    model: str
    path: str | None
    facts: ModelFacts | None
    result: Plan | Refusal | None
    disk: DiskSpeed | None
    memory_bytes_per_s: int | None
    estimate: Estimate | None
    home: str
    free_disk_bytes: int
    installed: tuple[Installed, ...]
    warnings: tuple[str, ...]


def doctor(
    model: str | None = None,
    *,
    memory: MemoryOptions = DEFAULT_MEMORY,
    sim: SimOptions = DEFAULT_SIM,
    threads: Annotated[int | None, WHOLE] = None,
    draft_model: str | None = None,
    parallel: Annotated[int, WHOLE] = 1,
    measure: bool = True,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Show the machine, the memory plan of a model and what is downloaded, without loading anything.

    The exit code is 2 where there is no plan: nothing fits, or a model that is named must be converted or pulled
    first.

    Parameters
    ----------
    model
        A name, an artifact, or a file that was converted before; smollm2:135m if not given.
    threads
        Threads of the kernels to plan for; every usable processor if not set.
    draft_model
        A draft model that is loaded beside it.
    parallel
        Generations that may each fill a context at the same time, as `LLM(parallel=)`.
    measure
        Read a part of the model past the page cache, and memory, to expect a speed.
    json
        Print one JSON object; sizes in bytes. Flags that cannot be are {"error": ...}.
    """
    report = examine(
        model,
        memory,
        sim,
        threads=threads,
        parallel=parallel,
        draft_model=draft_model,
        measure=measure,
    )
    if json:
        print(json_text.dumps(as_json(report), indent=1))
    else:
        from headrace.cli import doctor_view

        doctor_view.show(report)
    if isinstance(report.result, Refusal):
        failure.tell(report.result.message, report.result.hint)
        return InputError.exit_code
    if report.result is None and model is not None:
        failure.tell(f"{model} is not ready here, so there is no plan", _first_step(model))
        return InputError.exit_code
    return 0


def examine(
    model: str | None,
    memory: MemoryOptions,
    sim: SimOptions,
    *,
    threads: int | None = None,
    draft_model: str | None = None,
    parallel: int = 1,
    measure: bool,
) -> Report:
    """Look at everything; reads manifests and, to measure, some bytes of one weight file."""
    options, machine = replace(memory.options(), parallel=parallel), sim.machine()
    name = DEFAULT_MODEL if model is None else model
    path, home = locate.found(name), config.load().home
    facts = result = disk = expected = None
    bandwidth = measure_memory(machine.cores) if measure else None
    warnings = _pressure_warnings(machine)
    draft = None if draft_model is None else _ready(draft_model)
    if path is None:
        warnings.append(f"{name} is not ready here, so there is no plan: {_first_step(name)}")
    else:
        manifest = read_manifest(path / MANIFEST_NAME)
        facts = model_facts(path, threads=kernel_threads(threads, machine))
        warnings += _file_warnings(path, manifest)
        disk = _disk(path, manifest) if measure else None
        machine = replace(machine, disk_bytes_per_s=disk.bytes_per_s if disk else None)
        result = plan_model(path, options, machine, threads=threads, draft=draft)
    if isinstance(result, Plan) and facts is not None:
        expected = estimate(
            result,
            facts,
            disk_bytes_per_s=machine.disk_bytes_per_s,
            memory_bytes_per_s=bandwidth,
        )
        warnings += result.notes
    return Report(
        machine=machine,
        model=name,
        path=None if path is None else str(path),
        facts=facts,
        result=result,
        disk=disk,
        memory_bytes_per_s=bandwidth,
        estimate=expected,
        home=str(home),
        free_disk_bytes=free_bytes(home),
        installed=tuple(_installed(home)),
        warnings=tuple(warnings),
    )


def _ready(name: str) -> Path:
    """The artifact of a draft model. Raises UnknownModelError where it is not ready."""
    if (path := locate.found(name)) is None:
        raise UnknownModelError(f"{name} is not ready here", hint=_first_step(name))
    return path


def _first_step(name: str) -> str:
    """What makes a model ready that is not converted or not here."""
    if Path(name).expanduser().exists():
        return f"convert it first: headrace convert {shlex.quote(name)} ARTIFACT, and plan for that"
    return f"get it first: headrace pull {name}"


def _pressure_warnings(machine: Machine) -> list[str]:
    found = [p.some_avg10 for p in (machine.pressure, machine.group_pressure) if p is not None]
    if max(found, default=0.0) < _BUSY:
        return []
    return [f"programs waited for memory in {max(found):.0f} % of the last ten seconds"]


def _file_warnings(path: Path, manifest: Manifest) -> list[str]:
    """What a load would refuse: files that are missing or have another size."""
    out = []
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            out.append(f"{file} is missing")
        elif file.stat().st_size != entry.nbytes:
            out.append(f"{file} has {file.stat().st_size:,} bytes, not {entry.nbytes:,}")
    return out


def _disk(path: Path, manifest: Manifest) -> DiskSpeed | None:
    """The speed of the disk under a model's largest file; None where that cannot be read."""
    if not manifest.files:
        return None
    largest = max(manifest.files, key=lambda name: manifest.files[name].nbytes)
    try:
        return measure_disk(path / largest)
    except FileError:
        return None


def _installed(home: Path) -> list[Installed]:
    """Artifacts under the home folder, by name; one that cannot be read is not counted."""
    out = []
    for folder in ("models", "converted"):
        for manifest in sorted((home / folder).glob(f"*/{MANIFEST_NAME}")):
            try:
                files = read_manifest(manifest).files
            except InputError:
                continue
            out.append(Installed(str(manifest.parent), sum(f.nbytes for f in files.values())))
    return out


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs: `plan` or `refusal` is null, and both without a model."""
    machine, result = report.machine, report.result
    body = asdict(report)
    del body["result"]
    body["machine"] |= {
        name: getattr(machine, name) for name in ("capacity_bytes", "usable_bytes", "budget_bytes")
    }
    body["plan"] = asdict(result) if isinstance(result, Plan) else None
    body["refusal"] = asdict(result) if isinstance(result, Refusal) else None
    return body
