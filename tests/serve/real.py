"""A server over the real default model, as `headrace serve` makes it, for what a page promises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from headrace.llm import LLM
from headrace.serve.app import create_app
from headrace.serve.dialects import anthropic, gateway, ollama, openai_chat, openai_responses
from headrace.serve.model.backend import ModelBackend
from serve.served import served

DIALECTS = (openai_chat, openai_responses, anthropic, ollama, gateway)


@contextmanager
def real_server(model: Path) -> Iterator[str]:
    """The base URL of a server of smollm2:135m, whose artifact `model` is."""
    with (
        LLM(model, threads=2, max_context=2048) as llm,
        closing(ModelBackend(llm, "smollm2:135m", version="0.1.0")) as backend,
        served(create_app(backend, DIALECTS)) as url,
    ):
        yield url
