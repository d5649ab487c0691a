"""Signals to stop: repeats within a second are one request, and a later one ends at once."""

from __future__ import annotations

import signal

import pytest

from headwater.common.system.stop_signals import (
    REPEAT_SECONDS,
    STOP_SIGNALS,
    StopRequests,
    at_stop_signals,
    interrupt,
    raise_if_interrupted,
)


class Clock:
    """A clock that the test moves."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def no_earlier_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopRequests, "_requested_at", None)


def test_a_second_signal_within_a_second_is_the_same_request() -> None:
    calls: list[str] = []
    clock = Clock()
    requests = StopRequests(
        lambda: calls.append("stop"), lambda: calls.append("again"), clock=clock
    )
    requests(signal.SIGTERM, None)
    clock.seconds += REPEAT_SECONDS - 0.01
    requests(signal.SIGTERM, None)
    assert calls == ["stop"]


def test_a_later_signal_is_a_new_request() -> None:
    calls: list[str] = []
    clock = Clock()
    requests = StopRequests(
        lambda: calls.append("stop"), lambda: calls.append("again"), clock=clock
    )
    for _ in range(3):
        requests(signal.SIGTERM, None)
        clock.seconds += REPEAT_SECONDS
    assert calls == ["stop", "again", "again"]


def test_a_repeat_is_ignored_by_the_handler_that_is_restored() -> None:
    """The process ends soon after its work has; the second signal may come in between."""
    clock = Clock()
    calls: list[str] = []
    outer = StopRequests(interrupt, clock=clock)
    inner = StopRequests(lambda: calls.append("stop"), clock=clock)
    inner(signal.SIGTERM, None)
    clock.seconds += 0.5
    outer(signal.SIGTERM, None)
    assert calls == ["stop"]


def test_handlers_are_set_for_the_time_of_the_work_and_ignored_signals_stay_ignored() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    requests = StopRequests(interrupt)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with at_stop_signals(requests):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is requests
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])


def test_an_interrupt_is_pythons_own() -> None:
    requests = StopRequests(interrupt)
    with at_stop_signals(requests), pytest.raises(KeyboardInterrupt):
        requests(signal.SIGINT, None)


def test_an_interrupt_ends_no_later_work_of_the_process() -> None:
    with at_stop_signals(StopRequests(interrupt)):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
    raise_if_interrupted()
