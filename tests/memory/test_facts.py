"""Facts come from the manifest alone and agree with what loading really allocates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact
from headrace.artifact.manifest import Manifest
from headrace.artifact.records import layer_layout
from headrace.engine.engine import Engine
from headrace.errors import FileError, SettingError, UnsupportedError
from headrace.kernels.program import PAGE_TOKENS
from headrace.llm import LLM
from headrace.memory.facts import model_facts, plan_model
from headrace.memory.inputs import PlanOptions
from headrace.memory.ledger import Plan
from memory.model import MACHINE


@pytest.fixture
def artifact(tiny_artifact: Callable[[str], Artifact]) -> Artifact:
    return tiny_artifact("llama")


def test_a_dense_model(artifact: Artifact) -> None:
    facts = model_facts(artifact, threads=2)
    weights = [p for p in artifact.path.iterdir() if p.name.startswith("dense-")]
    assert facts.dense_bytes == sum(p.stat().st_size for p in weights)
    assert facts.context == 1024
    assert facts.num_slots == 0
    with Engine(artifact, threads=1) as engine:
        assert facts.kv_bytes_per_token * PAGE_TOKENS == engine.shape.page_bytes


def test_every_way_to_name_a_model_gives_the_same(artifact: Artifact) -> None:
    ways = [artifact, artifact.manifest, artifact.path, artifact.path / "manifest.json"]
    assert len({model_facts(way, threads=2) for way in ways}) == 1
    made = plan_model(artifact.path, PlanOptions(memory_gb=1), MACHINE)
    assert isinstance(made, Plan)
    assert made == plan_model(artifact.manifest, PlanOptions(memory_gb=1), MACHINE)


def test_threads_are_those_of_a_load(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """As given, else as the settings say, else one for each processor of the machine."""

    def made(threads: int | None = None) -> Plan:
        return plan_model(
            artifact, PlanOptions(memory_gb=1), MACHINE, threads=threads
        ).for_loading()

    assert made() == made(MACHINE.cores) != made(64)
    monkeypatch.setenv("HEADRACE_THREADS", "64")
    assert made() == made(64)
    assert made(MACHINE.cores) != made()
    with LLM(artifact.path, memory=PlanOptions(memory_gb=1)) as llm:
        assert llm.plan.ledger.workspace == made().ledger.workspace
        assert getattr(llm.engine.backend, "threads", 64) == 64
    for threads in (0, -1, 1025, 1.5, True):
        with pytest.raises(SettingError, match="threads"):
            made(threads)  # type: ignore[arg-type]


def test_no_weight_is_opened(artifact: Artifact, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(artifact.manifest.to_bytes())
    assert model_facts(tmp_path, threads=2) == model_facts(artifact, threads=2)


def _mixture(manifest: Manifest) -> Manifest:
    entry = {"format": "q4m", "shape": [64, 64], "group": 32}
    experts = {
        f"layers.{layer}.experts.{part}": {**entry, "shape": [64 << layer, 64]}
        for layer in (0, 1)
        for part in ("gate_up", "down")
    }
    mixture = {"num_experts": 8, "top_k": 2, "ffn_size": 32, "normalise": True}
    config = {**manifest.config, "experts": mixture}
    return replace(manifest, tensors={**manifest.tensors, **experts}, config=config)


def test_a_mixture_takes_its_largest_record(artifact: Artifact) -> None:
    manifest = _mixture(artifact.manifest)
    facts = model_facts(manifest, threads=2)
    assert (facts.num_moe_layers, facts.num_experts, facts.top_k) == (2, 8, 2)
    assert facts.expert_slot_bytes == layer_layout(manifest, 1).nbytes
    assert facts.expert_slot_bytes > layer_layout(manifest, 0).nbytes
    assert facts.num_slots == 16
    dense = model_facts(artifact.manifest, threads=2).workspace
    assert facts.workspace.per_row > dense.per_row


def test_a_mixture_without_its_figures_is_refused(artifact: Artifact) -> None:
    manifest = _mixture(artifact.manifest)
    tensors = {k: v for k, v in manifest.tensors.items() if k != "layers.1.experts.down"}
    with pytest.raises(FileError, match=r"layers\.1\.experts\.down"):
        model_facts(replace(manifest, tensors=tensors), threads=2)
    for key in ("num_experts", "top_k"):
        mixture = {**manifest.config["experts"], key: 0}
        odd = replace(manifest, config={**manifest.config, "experts": mixture})
        with pytest.raises(FileError, match=key):
            model_facts(odd, threads=2)


@pytest.mark.parametrize("key", ["context", "num_layers", "head_dim", "ffn_size", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, "64", True, 1 << 40])
def test_a_hostile_configuration_is_refused_by_name(
    artifact: Artifact, key: str, value: object
) -> None:
    manifest = replace(artifact.manifest, config={**artifact.manifest.config, key: value})
    with pytest.raises(FileError, match=key):
        model_facts(manifest, threads=2)


def test_a_manifest_of_another_version(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 999}')
    with pytest.raises(UnsupportedError):
        plan_model(tmp_path, PlanOptions(), MACHINE)
