"""What Prometheus reads at /metrics. Every server has a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from headrace.serve.telemetry.account import GONE, Account

MEDIA_TYPE = CONTENT_TYPE_LATEST
FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)  # s
DECODE_RATE = (0.5, 1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)  # tokens a second


class Metrics:
    """Counters of requests that ended, and gauges that are read when somebody looks.

    counts: generations that run, and that wait; cache_bytes: of prefixes by where they are kept; active: requests in
    hand. Called from whichever thread answers.
    """

    def __init__(
        self,
        *,
        counts: Callable[[], tuple[int, int]],
        cache_bytes: Mapping[str, Callable[[], int]],
        active: Callable[[], int],
    ) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter(
            "requests", "Requests that ended", ("dialect", "endpoint", "status")
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts", ("dialect",))
        self._cached = self._counter(
            "cached_tokens", "Tokens of prompts that were not read again", ("dialect",)
        )
        self._new = self._counter("generated_tokens", "Tokens of answers", ("dialect",))
        self._first = Histogram(
            "headrace_first_token_seconds",
            "From a request to the first token of its answer",
            registry=self._registry,
            buckets=FIRST_TOKEN,
        )
        self._rate = Histogram(
            "headrace_decode_tokens_per_second",
            "Rate of an answer behind its first token",
            registry=self._registry,
            buckets=DECODE_RATE,
        )
        self._gauge("active_requests", "Requests in hand", active)
        self._gauge("generations_running", "Generations that run", lambda: counts()[0])
        self._gauge("generations_waiting", "Generations that wait in line", lambda: counts()[1])
        cache = Gauge(
            "headrace_prefix_cache_bytes", "Kept prefixes", ["tier"], registry=self._registry
        )
        for tier, size in cache_bytes.items():
            cache.labels(tier).set_function(size)

    def count(self, account: Account) -> None:
        """A request has ended."""
        status = GONE if account.status is None else str(account.status)
        self._requests.labels(account.dialect, account.endpoint, status).inc()
        if account.started is not None:
            self._prompt.labels(account.dialect).inc(account.prompt_tokens)
            self._cached.labels(account.dialect).inc(account.cached_tokens)
            self._new.labels(account.dialect).inc(account.new_tokens)
        if account.first_token_seconds is not None:
            self._first.observe(account.first_token_seconds)
        if account.decode_rate is not None:
            self._rate.observe(account.decode_rate)

    def text(self) -> str:
        """All of them in Prometheus' text form."""
        return generate_latest(self._registry).decode()

    def values(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """All of them as values: name, labels, value."""
        for family in self._registry.collect():
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def _counter(self, name: str, about: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"headrace_{name}", about, labels, registry=self._registry)

    def _gauge(self, name: str, about: str, read: Callable[[], float]) -> None:
        Gauge(f"headrace_{name}", about, registry=self._registry).set_function(read)
