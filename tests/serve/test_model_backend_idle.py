"""What a backend holds once a generation has ended."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

from headrace.artifact.container import Artifact
from headrace.llm import LLM
from headrace.serve.events import Finished
from headrace.serve.model.backend import ModelBackend
from headrace.serve.request import Request, Text, Turn
from serve.http.wired import wait


def test_an_idle_backend_holds_nothing_of_what_was_asked(
    tiny_artifact: Callable[[str], Artifact],
) -> None:
    with LLM(tiny_artifact("llama").path, threads=1) as llm:
        backend = ModelBackend(llm, "tiny", version="1")

        async def asked() -> weakref.ref[object]:
            request = Request("tiny", (Turn("user", (Text("abc"),)),), limit=3)
            job = backend.submit(request, request_id="0" * 32, arrived=0.0)
            while (event := await job.next()) is not None:
                if isinstance(event, Finished):
                    break
            assert event is not None
            return weakref.ref(job)

        try:
            left = asyncio.run(asked())
            wait(lambda: backend.counts == (0, 0))
            wait(lambda: gc.collect() >= 0 and left() is None)
        finally:
            backend.close()
