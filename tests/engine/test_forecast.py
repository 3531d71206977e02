"""A fitted forecast guesses better on states that it has not seen, belongs to one artifact, and changes no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny
from headrace.artifact.container import Artifact, open_artifact
from headrace.artifact.convert import convert
from headrace.artifact.forecast import FORECAST_NAME, read_forecast, write_forecast
from headrace.artifact.sources import ConvertOptions
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec
from headrace.engine.engine import Engine
from headrace.engine.forecast import LayerFit, Stored, agreement, fit
from headrace.errors import FileError
from headrace.experts.stream import StreamOptions
from headrace.values import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(40)]
OPTIONS = StreamOptions(slots=12, max_slots=32, reserve=6)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny.make(tmp_path_factory.mktemp("forecast") / "qwen3_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def fits(artifact: Artifact) -> list[LayerFit]:
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 256, 200).tolist() for _ in range(6)]
    with Engine(artifact, max_context=256, experts=OPTIONS) as engine:
        return list(fit(engine, texts))


def test_the_fit_guesses_no_worse(fits: list[LayerFit]) -> None:
    assert [f.layer for f in fits] == [1]
    assert fits[0].fitted > fits[0].plain
    assert fits[0].rank > 0


def test_it_is_used_and_changes_no_token(artifact: Artifact, fits: list[LayerFit]) -> None:
    def run() -> tuple[list[int], str, float]:
        with Engine(open_artifact(artifact.path), max_context=256, experts=OPTIONS) as engine:
            params = SamplingParams(temperature=1.0, seed=3, max_tokens=60)
            tokens = [t.id for t in engine.generate(PROMPT, params)]
            assert engine.stats is not None
            experts = engine.stats.experts
            assert experts is not None
            assert experts.guessed > 0
            return tokens, engine.stats.fingerprint, experts.guessed_right / experts.guessed

    plain = run()
    write_forecast(artifact, {f.layer: f.router for f in fits})
    try:
        fitted = run()
        stored = read_forecast(artifact)
        assert {i: [a.tolist() for a in parts] for i, parts in stored.items()} == {
            f.layer: [a.tolist() for a in f.router] for f in fits
        }
    finally:
        (artifact.path / FORECAST_NAME).unlink()
    assert fitted[:2] == plain[:2]
    assert fitted[2] != plain[2]  # other guesses were made


def _spoil(path: Path, place: int) -> None:
    body = bytearray(path.read_bytes())
    body[place] ^= 0xFF
    path.write_bytes(body)


def _write_named(path: Path, artifact: Artifact, name: str, router: Stored) -> None:
    """A forecast file of one layer with a name of our own."""
    arrays = {
        f"{name}.codes": router[0],
        f"{name}.exponents": router[1],
        "identity": np.frombuffer(bytes.fromhex(artifact.identity), np.uint8),
    }
    kinds = {"int16": "I16", "int32": "I32", "uint8": "U8"}
    with path.open("wb") as file:
        writer = TensorFileWriter(
            file, [TensorSpec(n, kinds[str(a.dtype)], a.shape) for n, a in arrays.items()]
        )
        for key, array in arrays.items():
            writer.write(key, array)


def test_layers_fitted_in_any_number_of_passes_are_the_same(tmp_path: Path) -> None:
    deep = tiny.make(tmp_path / "deep", "qwen3_moe", num_hidden_layers=4)
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 256, 100).tolist() for _ in range(5)]
    found = []
    for at_once in (None, 1, 2):
        with Engine(deep, max_context=256) as engine:
            found.append(list(fit(engine, texts, layers_at_once=at_once)))
    assert [f.layer for f in found[0]] == [1, 2, 3]
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert (one.layer, one.rank, one.plain, one.fitted) == (
                same.layer,
                same.rank,
                same.plain,
                same.fitted,
            )
            assert [a.tolist() for a in one.router] == [a.tolist() for a in same.router]


def test_a_conversion_keeps_the_forecast_of_the_same_artifact(
    tmp_path: Path, fits: list[LayerFit]
) -> None:
    made = tiny.make(tmp_path / "model", "qwen3_moe")
    write_forecast(made, {f.layer: f.router for f in fits})
    path = made.path / FORECAST_NAME
    kept, source = path.read_bytes(), tmp_path / "model-source"
    assert convert(source, made.path).identity == made.identity
    assert path.read_bytes() == kept
    again = convert(source, made.path, ConvertOptions(bits=8))
    assert again.identity != made.identity
    assert not path.exists()
    convert(source, made.path)
    path.write_bytes(kept[:100])
    convert(source, made.path)
    assert not path.exists()


def test_a_forecast_of_another_model_or_a_broken_one_is_refused(
    artifact: Artifact, fits: list[LayerFit], tiny_artifact: Callable[[str], Artifact]
) -> None:
    path = artifact.path / FORECAST_NAME
    try:
        write_forecast(artifact, {f.layer: f.router for f in fits})
        _spoil(path, -1)
        with pytest.raises(FileError, match="another artifact"):
            read_forecast(artifact)
        codes, exponents = fits[0].router
        for wrong, cause in (
            ((codes[:-1], exponents), "I16"),
            ((codes, exponents[:-1]), "I32"),
            ((codes, exponents + 1000), "exponents"),
            ((np.full_like(codes, -32768), exponents), "codes"),
        ):
            write_forecast(artifact, {1: wrong})
            with pytest.raises(FileError, match=cause) as caught:
                read_forecast(artifact)
            assert "fit-forecast" in str(caught.value.hint)
        for name in ("layers.0", "layers.999", "layers.²", "layers." + "9" * 5000, "layers.01"):
            _write_named(path, artifact, name, fits[0].router)
            with pytest.raises(FileError, match="not one of a forecast"):
                read_forecast(artifact)
        whole = path.read_bytes()
        for body in (whole[:50], whole[:-1], b"", b"garbage" * 100):
            path.write_bytes(body)
            with pytest.raises(FileError) as caught:
                Engine(artifact, max_context=256, experts=OPTIONS)
            assert "remove" in str(caught.value.hint)
            Engine(replace(artifact, with_forecast=False), max_context=256, experts=OPTIONS).close()
    finally:
        path.unlink()
    assert read_forecast(tiny_artifact("llama")) == {}


def test_agreement() -> None:
    wanted = np.array([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    assert agreement(wanted, wanted, 2) == 1.0
    assert agreement(-wanted, wanted, 2) == 0.0
    assert agreement(wanted[::-1] * 0, wanted, 2) == 0.5  # ties to the lower index
