"""The simulated rule of alignment reuses what it says, and replays are the same prompts in every mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench import reuse
from headrace.artifact.container import Artifact
from headrace.llm import LLM


def test_the_rule_of_alignment() -> None:
    earlier = [list(range(100)), [*range(50), 7, 7, 7]]
    assert reuse.aligned([*range(70), 0, 0], earlier, 16) == 64
    assert reuse.aligned(list(range(65)), earlier, 64) == 64
    assert reuse.aligned(list(range(64)), earlier, 64) == 0  # its last token has to be read
    assert reuse.aligned(list(range(200)), earlier, 32) == 96
    assert reuse.aligned([5, 6], earlier, 1) == 0
    assert reuse.aligned([0, 1, 2], [], 1) == 0


@pytest.mark.parametrize("name", ["a chat with a system message", "edits in a text"])
def test_modes_read_what_they_say_and_answer_alike(
    tiny_artifact: Callable[[str], Artifact], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "SYSTEM", reuse.SYSTEM[:300])
    monkeypatch.setattr(reuse, "TEXT", reuse.ARTICLE[:300])
    with LLM(tiny_artifact("llama").path, threads=1, max_context=1024) as llm:
        exact, aligned, cold = (
            reuse.replayed(llm, reuse.REPLAYS[name], mode, 64) for mode in reuse.MODES
        )
    assert exact.fingerprint == aligned.fingerprint == cold.fingerprint
    assert cold.read_tokens == cold.prompt_tokens == exact.prompt_tokens
    assert exact.read_tokens < aligned.read_tokens < cold.read_tokens
