"""Reads the answers in clients' replies, and says how long they are awaited.

Each answer is what a plan or a request wanted, or a Dropout. A plan's answers are awaited to their
limit: devices have unlike speed. The phases of a conversation are short, and one member that
answers each at the last moment would hold every round. So once enough have answered, the others
have ``FACTOR`` times the median answer's time, and a floor: a small device beside laptops takes
several times as long to mask a large vector.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from flwr.app import Message, RecordDict

from headwater.common.errors import HeadwaterError, LateUpdate
from headwater.common.flower import records
from headwater.common.messages import ReadyReport
from headwater.server.fleet import Dropout
from headwater.server.flower.registration import Registration, check_name

FACTOR, FLOOR_SECONDS = 10.0, 2.0


class Named(Protocol):
    """An answer, which says whose it is."""

    @property
    def name(self) -> str: ...


Answer = TypeVar("Answer", bound=Named)


def read_answer(
    name: str,
    reply: Message,
    read: Callable[[str, RecordDict], Answer],
    registration: Registration,
) -> Answer | Dropout:
    """Return the answer that ``read`` finds in a client's reply, or why there is none."""
    try:
        answer = read(name, records.reply_content(reply))
        check_name(answer.name, name)
    except HeadwaterError as error:
        registration.note_error(name, error)
        return Dropout(name=name, error=error)
    return answer


def with_seconds(ready: ReadyReport, start_seconds: float) -> ReadyReport:
    """Return a report with the seconds since its plan was sent; a simulated one has its own."""
    if ready.seconds is not None:
        return ready
    return ready.model_copy(update={"seconds": time.monotonic() - start_seconds})


def check_in_time(name: str, seconds: float, timeout_seconds: float | None) -> None:
    """Check a virtual clock's seconds against the deadline; the grid checks real seconds.

    Raises:
        LateUpdate: they exceed it.
    """
    if timeout_seconds is not None and seconds > timeout_seconds:
        raise LateUpdate(f"{name} took {seconds:.1f} s, the deadline is {timeout_seconds:.1f} s")


class Patience:
    """The wait for one exchange's answers."""

    def __init__(
        self,
        limit_seconds: float | None,
        *,
        enough: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limit_seconds`` is the longest wait, None for any; ``enough`` may shorten it."""
        self._limit = math.inf if limit_seconds is None else limit_seconds
        self._enough = math.inf if enough is None else enough
        self._clock, self._start = clock, clock()
        self._times: list[float] = []

    def note_answer(self) -> None:
        """Note that an answer has come now."""
        self._times.append(self._clock() - self._start)

    @property
    def left_seconds(self) -> float:
        """The seconds for which the next answer is awaited, at least 0."""
        wait = self._limit
        if len(self._times) >= max(self._enough, 1):
            wait = min(wait, max(FACTOR * statistics.median(self._times), FLOOR_SECONDS))
        return max(self._start + wait - self._clock(), 0.0)
