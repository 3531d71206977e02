"""When a server is idle, and for how long."""

from __future__ import annotations

import pytest

from headrace.serve.process.idle import IdleClock


def test_a_server_is_idle_from_its_start_on() -> None:
    clock = IdleClock(10.0, 60.0)
    assert clock.idle_seconds(25.0) == 15.0
    assert not clock.due(69.9)
    assert clock.due(70.0)


def test_without_a_limit_it_never_stops() -> None:
    assert not IdleClock(0.0, None).due(1e9)


def test_a_request_is_use_until_the_last_one_ends() -> None:
    clock = IdleClock(0.0, 60.0)
    clock.begin()
    clock.begin()
    clock.end(50.0)
    assert clock.idle_seconds(500.0) == 0.0
    assert not clock.due(500.0)
    clock.end(501.0)
    assert clock.idle_seconds(511.0) == 10.0
    assert clock.due(561.0)


def test_a_registered_process_is_use_until_it_is_gone() -> None:
    clock = IdleClock(0.0, 60.0)
    clock.clients(2, 30.0)
    assert not clock.due(1000.0)
    clock.clients(1, 1000.0)
    assert clock.idle_seconds(1100.0) == 0.0
    clock.clients(0, 1200.0)
    assert clock.idle_seconds(1230.0) == 30.0
    clock.clients(0, 1240.0)
    assert clock.idle_seconds(1240.0) == 40.0


def test_a_request_that_ends_beside_a_process_begins_nothing() -> None:
    clock = IdleClock(0.0, 1.0)
    clock.begin()
    clock.clients(1, 1.0)
    clock.end(2.0)
    assert clock.idle_seconds(100.0) == 0.0


@pytest.mark.parametrize("now", [0.0, 3.0])
def test_time_before_the_last_use_is_no_negative_idleness(now: float) -> None:
    assert IdleClock(5.0, 1.0).idle_seconds(now) == 0.0
