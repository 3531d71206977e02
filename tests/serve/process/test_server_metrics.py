"""What Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.serve.events import Finished, Started, TextDelta, Usage
from headrace.serve.telemetry.account import Account
from headrace.serve.telemetry.metrics import Metrics


def metrics() -> Metrics:
    return Metrics(
        counts=lambda: (3, 2),
        cache_bytes={"memory": lambda: 4096, "disk": lambda: 10},
        active=lambda: 5,
    )


def values(found: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Of the text form, as a scraper reads it."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(found.text())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_generation_is_counted() -> None:
    found = metrics()
    account = Account(0.0, dialect="ollama", endpoint="/api/chat", status=200, submitted=0.0)
    account.heard(Started(20, 8), 1.0)
    account.heard(TextDelta("x"), 2.0)
    account.heard(Finished("stop", Usage(20, 8, 5, 0, 1.0, 0.5)), 3.0)
    found.count(account)
    told = values(found)
    assert told["headrace_requests_total", ("ollama", "/api/chat", "200")] == 1
    assert told["headrace_prompt_tokens_total", ("ollama",)] == 20
    assert told["headrace_cached_tokens_total", ("ollama",)] == 8
    assert told["headrace_generated_tokens_total", ("ollama",)] == 5
    assert told["headrace_first_token_seconds_bucket", ("1.0",)] == 0
    assert told["headrace_first_token_seconds_bucket", ("2.5",)] == 1
    assert told["headrace_first_token_seconds_sum", ()] == 2.0
    assert told["headrace_decode_tokens_per_second_sum", ()] == 8.0


def test_gauges_are_read_when_somebody_looks() -> None:
    told = values(metrics())
    assert told["headrace_active_requests", ()] == 5
    assert told["headrace_generations_running", ()] == 3
    assert told["headrace_generations_waiting", ()] == 2
    assert told["headrace_prefix_cache_bytes", ("memory",)] == 4096
    assert told["headrace_prefix_cache_bytes", ("disk",)] == 10


def test_a_client_that_left_has_a_status_of_its_own_and_no_tokens() -> None:
    found = metrics()
    account = Account(0.0, dialect="ollama", endpoint="/api/chat", submitted=0.0)
    account.end(5.0)
    found.count(account)
    told = values(found)
    assert told["headrace_requests_total", ("ollama", "/api/chat", "client_gone")] == 1
    assert ("headrace_prompt_tokens_total", ("ollama",)) not in told
    assert told["headrace_first_token_seconds_count", ()] == 0


def test_two_servers_count_apart() -> None:
    one, other = metrics(), metrics()
    one.count(Account(0.0, endpoint="/health", status=200))
    assert values(one)["headrace_requests_total", ("server", "/health", "200")] == 1
    assert ("headrace_requests_total", ("server", "/health", "200")) not in values(other)
