"""Requests to stop the process: SIGTERM, Ctrl-C and a closed terminal, and Ctrl-Break on Windows.

A signal within a second of a request repeats it: ``timeout`` sends two, one to the process and one
to its group, and a terminal or a service manager may add its own. The second one used to interrupt
the orderly end that the first had begun. A later signal is a new request, which ends the process at
once.

``interrupt`` raises KeyboardInterrupt wherever the main thread is. Inside another library this can
be lost, turned into another error, or leave a queue without its notice: a run then went on, or
waited two minutes for a thread. So records are written under ``interrupts_held``, and the rounds
call ``raise_if_interrupted`` between them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

REPEAT_SECONDS = 1.0
STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    if hasattr(signal, name)
)
STOPPED_STATUS = 130
before_end: list[Callable[[], object]] = []
"""Called before the process ends at once, as to show a terminal's cursor again."""


class _Interrupts:
    """Whether ``interrupt`` was called, and how many blocks of the main thread hold it back."""

    was_requested = False
    num_holding = 0


class StopRequests:
    """A signal handler that calls ``stop`` at the first request and ``again`` at each later one.

    | seconds since the last request of this process | calls |
    | --- | --- |
    | there was none | ``stop`` |
    | less than 1 | nothing, even if another handler took that request |
    | 1 or more | ``again`` |
    """

    _requested_at: float | None = None  # of the class: one process has one sequence of requests

    def __init__(
        self,
        stop: Callable[[], object],
        again: Callable[[], object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``again`` is ``end_at_once`` by default."""
        self._stop = stop
        self._again = end_at_once if again is None else again
        self._clock = clock
        self._is_stopping = False

    def __call__(self, *_: object) -> None:
        """Handle a signal."""
        now, before = self._clock(), StopRequests._requested_at
        if before is not None and now - before < REPEAT_SECONDS:
            return
        StopRequests._requested_at = now
        if self._is_stopping:
            self._again()
            return
        self._is_stopping = True
        self._stop()


def interrupt() -> None:
    """Raise KeyboardInterrupt, as Python does at Ctrl-C, or at the end of ``interrupts_held``."""
    _Interrupts.was_requested = True
    if not _Interrupts.num_holding:
        raise KeyboardInterrupt


def interrupt_at_once() -> None:
    """Raise KeyboardInterrupt also under ``interrupts_held``: for a second request."""
    raise KeyboardInterrupt


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold interrupts back in the main thread, for writing that must not be cut in the middle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _Interrupts.num_holding += 1
    try:
        yield
    finally:
        _Interrupts.num_holding -= 1
    raise_if_interrupted()


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt in the main thread if one was held back, or lost in a library."""
    is_main = threading.current_thread() is threading.main_thread()
    if _Interrupts.was_requested and not _Interrupts.num_holding and is_main:
        raise KeyboardInterrupt


def is_interrupted() -> bool:
    """Return whether ``interrupt`` was called, also if another library lost the interrupt."""
    return _Interrupts.was_requested


def end_at_once() -> None:
    """End the process without any further step."""
    for restore in before_end:
        restore()
    log.warning("second request to stop: ending at once, nothing more is sent or stored")
    logging.shutdown()
    os._exit(STOPPED_STATUS)


def interrupt_at_stop_signals() -> None:
    """Raise KeyboardInterrupt at a stop signal until the process ends; for a command's ``main``."""
    _install(StopRequests(interrupt))


@contextmanager
def at_stop_signals(requests: StopRequests) -> Iterator[None]:
    """Let ``requests`` handle the stop signals; only the main thread of a process can do so.

    An ignored signal stays ignored: a shell without job control starts background processes so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _install(requests)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _Interrupts.was_requested = False


def _install(requests: StopRequests) -> dict[signal.Signals, Any]:
    """Set the handler of each stop signal that is not ignored; return the handlers before."""
    _Interrupts.was_requested = False
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    known = {n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in known:
        signal.signal(number, requests)
    return known
