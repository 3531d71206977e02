"""Models behind a server, opened once a module."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.llm import LLM
from serve.model.asking import Server, serving


@pytest.fixture(scope="module")
def real(default_model: Path) -> Iterator[LLM]:
    """The default model, which answers in words."""
    with LLM(default_model, threads=2, max_context=1024, parallel=4) as model:
        yield model


@pytest.fixture(scope="module")
def real_server(real: LLM) -> Iterator[Server]:
    with serving(real) as server:
        yield server


@pytest.fixture(scope="session")
def wild_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A random model with room for long prompts."""
    path = tmp_path_factory.mktemp("wild") / "artifact"
    return tiny.make(path, "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def wild(wild_artifact: Artifact) -> Iterator[LLM]:
    """A random model whose tokens are bytes: it takes every turn that a grammar allows."""
    with LLM(wild_artifact.path, threads=1, max_context=2048, parallel=4) as model:
        yield model


@pytest.fixture(scope="module")
def wild_server(wild: LLM) -> Iterator[Server]:
    with serving(wild) as server:
        yield server


@pytest.fixture(scope="session")
def endless_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A random model of a long window, without an end token that it could pick."""
    path = tmp_path_factory.mktemp("endless") / "artifact"
    return tiny.make(path, "llama", max_position_embeddings=65_536, eos_token_id=None)


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def make_thinking(path: Path, *, end_weight: float) -> Artifact:
    """A random model whose template opens reasoning where it is asked for; the tags are control tokens of its own.

    end_weight: how much it likes to end reasoning, or not to.
    """
    checkpoint = tiny.write_checkpoint(path / "source", "llama", max_position_embeddings=4096)
    source = json.loads((checkpoint / "tokenizer.json").read_text())
    for token in ("<think>", "</think>"):
        last = source["added_tokens"][-1]
        source["added_tokens"].append({**last, "id": last["id"] + 1, "content": token})
    (checkpoint / "tokenizer.json").write_text(json.dumps(source))
    (checkpoint / "chat_template.jinja").write_text(THINKING)
    state = tiny.state(json.loads((checkpoint / "config.json").read_text()))
    state["model.embed_tokens.weight"][source["added_tokens"][-1]["id"]] *= end_weight
    tiny.write_tensors(checkpoint / "model.safetensors", state)
    return convert(checkpoint, path / "artifact")


@pytest.fixture(scope="session")
def thinking_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_thinking(tmp_path_factory.mktemp("thinking"), end_weight=0.0)


@pytest.fixture(scope="module")
def brief_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It thinks little."""
    artifact = make_thinking(tmp_path_factory.mktemp("brief"), end_weight=4.0)
    with (
        LLM(artifact.path, threads=1, max_context=2048, parallel=4) as model,
        serving(model) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def thinking(thinking_artifact: Artifact) -> Iterator[LLM]:
    with LLM(thinking_artifact.path, threads=1, max_context=2048, parallel=4) as model:
        yield model


@pytest.fixture(scope="module")
def thinking_server(thinking: LLM) -> Iterator[Server]:
    with serving(thinking) as server:
        yield server
