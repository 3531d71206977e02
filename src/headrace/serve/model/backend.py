"""The backend that generates with a loaded model: requests to prompts, grammars and tickets, tickets to events."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headrace.errors import CancelledError, HeadraceError, InputError
from headrace.llm import LLM
from headrace.options import How
from headrace.serve.dialect import Card
from headrace.serve.failure import RequestError, UnknownNameError
from headrace.serve.model.admission import check_items, closing, room, too_late
from headrace.serve.model.describe import card, now
from headrace.serve.model.profiles import sampling_params
from headrace.serve.model.reader import Reader
from headrace.serve.model.worker import Job, Worker
from headrace.serve.request import Effort, Request, ToolCall, Turn
from headrace.text.grammar import Grammar, GrammarCompiler
from headrace.text.tools.constraint import answer_grammar
from headrace.text.tools.formats import detect
from headrace.text.tools.prompt import conversation

log = logging.getLogger(__name__)

PREPARERS = 2  # threads that render, tokenize and compile
TAIL_TOKENS = 32  # of a prompt, where open reasoning shows


@dataclass(frozen=True)
class _Prompt:
    """What the model reads, and how its answer begins."""

    ids: list[int]
    reasoning_open: bool


class ModelBackend:
    """Serves one model. `close` it before the model."""

    def __init__(
        self,
        llm: LLM,
        name: str,
        *,
        version: str,
        max_prefill_wait: float | None = None,
        reuse: bool = True,
        speculate: int | str = "off",
    ) -> None:
        """max_prefill_wait: seconds to the first token; None: any. reuse, speculate: see `GenerateOptions`."""
        self._llm = llm
        self._format = detect(llm.artifact.template, llm.tokenizer.control_names)
        self._card = card(
            llm,
            name,
            self._format,
            created=int(time.time()),
            version=version,
            max_prefill_wait=max_prefill_wait,
        )
        self._longest = max_prefill_wait
        self._how: How = {"reuse": reuse, "speculate": speculate}  # type: ignore[typeddict-item]
        self._compiler = GrammarCompiler(llm.tokenizer)
        self._pool = ThreadPoolExecutor(PREPARERS, "headrace-prepare")
        self._preparing: dict[Job, None] = {}
        self._closed = False
        self._worker = Worker(llm.turns)
        self._worker.start()

    @property
    def card(self) -> Card:
        """See `Backend`."""
        return now(self._card, self._llm, self._worker.pace.seconds(0, self._card.context_window))

    @property
    def counts(self) -> tuple[int, int]:
        """Generations that run, and that wait, those that are being prepared included."""
        preparing = sum(not job.gone for job in tuple(self._preparing))
        running, waiting = self._worker.counts
        return running, waiting + preparing

    def submit(self, request: Request, *, request_id: str, arrived: float) -> Job:
        """See `Backend`."""
        job = Job(asyncio.get_running_loop(), arrived, self._longest)
        self._preparing[job] = None
        try:
            self._pool.submit(self._begin, job, request, request_id)
        except RuntimeError:  # it was shut down
            self._drop(job, closing())
        return job

    async def count(self, request: Request) -> int:
        """See `Backend`."""
        if self._closed:
            raise closing()
        left = threading.Event()

        def look() -> None:
            if left.is_set():
                raise CancelledError("the client has left")
            if self._closed:
                raise closing()

        loop = asyncio.get_running_loop()
        work = partial(self._prompt, self._usable(request), look)
        try:
            return len((await loop.run_in_executor(self._pool, work)).ids)
        finally:
            left.set()

    def close(self) -> None:
        """End what runs and waits. The model stays open."""
        self._closed = True
        self._worker.stop()
        self._pool.shutdown(cancel_futures=True)
        for job in tuple(self._preparing):
            self._drop(job, closing())
        self._worker.close()

    def _begin(self, job: Job, request: Request, request_id: str) -> None:
        """From a request to a ticket, in a thread that may take its time."""
        try:
            self._prepare(job, request, request_id)
            self._check(job)
        except BaseException as error:
            if not isinstance(error, HeadraceError):
                log.error("a request could not be prepared", exc_info=error)
            self._drop(job, error)
        else:
            self._worker.add(job)
            self._preparing.pop(job, None)

    def _drop(self, job: Job, error: BaseException) -> None:
        """It ends before it was the worker's."""
        self._preparing.pop(job, None)
        job.fail(error)

    def _check(self, job: Job) -> None:
        """Whether a job still has to be prepared. Raises what its client is told, if one is there."""
        if job.gone:
            raise CancelledError("the client has left")
        if self._closed:
            raise closing()
        if job.late and job.longest is not None:
            raise too_late(job.longest)

    def _prepare(self, job: Job, request: Request, request_id: str) -> None:
        self._check(job)
        asked = self._usable(request)
        adapter = self._adapter(request.model)
        prompt = self._prompt(asked, partial(self._check, job))
        self._check(job)
        window = self._window(asked)
        room_left = room(len(prompt.ids), window, asked.limit, self._card.default_limit)
        grammar = self._grammar(asked, prompt)
        self._check(job)
        job.by_window = room_left.by_window
        job.reader = self._reader(asked, prompt, grammar, request_id)
        params = sampling_params(asked, room_left.tokens)
        how: How = {**self._how, "adapter": adapter, "grammar": grammar}
        job.ticket = self._llm.ticket(prompt.ids, params, how)

    def _usable(self, request: Request) -> Request:
        """The request without what this model does not do."""
        return request if self._card.reasoning else replace(request, effort=None)

    def _window(self, request: Request) -> int:
        return min(self._card.context_window, request.window or self._card.context_window)

    def _adapter(self, name: str) -> str | None:
        if name not in self._card.names:
            raise UnknownNameError(name, self._card.names)
        return name.removeprefix(self._card.name).removeprefix("+") or None

    def _prompt(self, request: Request, look: Callable[[], None]) -> _Prompt:
        """look: raises when nobody waits for it any more."""
        look()
        tools = () if request.choice.mode == "none" else request.tools
        check_items(len(request.turns), len(tools), self._window(request))
        if request.raw is not None:
            return _Prompt(self._llm.prompt_ids(request.raw, raw=True, look=look), False)
        messages, declared = conversation(
            self._format,
            [_message(turn) for turn in request.turns],
            tools,
            choice=request.choice.name or request.choice.mode,
            parallel=request.parallel_calls,
        )
        variables = _variables(self._card.reasoning, request.effort)
        look()
        ids = self._llm.chat_ids(messages, tools=declared, variables=variables, look=look)
        return _Prompt(ids, self._reasons(ids))

    def _reasons(self, ids: list[int]) -> bool:
        """Whether a prompt ends within reasoning."""
        tail = self._llm.tokenizer.decode(ids[-TAIL_TOKENS:], skip_special=False)
        return self._format.opens_reasoning(tail)

    def _grammar(self, request: Request, prompt: _Prompt) -> Grammar | None:
        choice, answer = request.choice, request.answer
        may_reason = False if request.effort is not None else None
        return answer_grammar(
            self._compiler,
            self._format,
            tools=request.tools,
            choice=choice.name or choice.mode,
            parallel=request.parallel_calls,
            answer={"text": None, "json": "json"}.get(answer.kind, answer.schema),
            reasoning_open=prompt.reasoning_open or may_reason,
        )

    def _reader(
        self, request: Request, prompt: _Prompt, grammar: Grammar | None, request_id: str
    ) -> Reader:
        return Reader(
            self._llm.tokenizer,
            self._format,
            request,
            reasoning_open=prompt.reasoning_open,
            continues=request.raw is not None or grammar is not None,
            new_id=lambda index: f"{request_id[:20]}{index:04x}",
        )


def _variables(reasons: bool, effort: Effort | None) -> dict[str, object]:
    """What templates of models that reason ask for; each takes what it knows."""
    if not reasons:
        return {}
    levels = {"xhigh": "high", "max": "high"}
    level = {} if effort is None else {"reasoning_effort": levels.get(effort, effort)}
    return {"enable_thinking": effort is not None, **level}


def _message(turn: Turn) -> dict[str, Any]:
    """A turn as chat templates want it."""
    if turn.images:
        raise InputError("the model reads no images")
    out: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.reasoning:
        out["reasoning_content"] = turn.reasoning
    if turn.calls:
        out["tool_calls"] = [_call(call) for call in turn.calls]
    if turn.role == "tool":
        out["tool_call_id"] = turn.call_id or ""
        if turn.tool_name:
            out["name"] = turn.tool_name  # else `conversation` finds that of its call
    return out


def _call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"the arguments of the tool call {call.id!r:.100} are no JSON object")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
