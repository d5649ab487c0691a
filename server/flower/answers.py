"""Reads the answers in clients' replies: each is what a plan or a request wanted, or a Dropout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from flwr.app import Message, RecordDict

from headwater.common.errors import HeadwaterError, LateUpdate
from headwater.common.flower import records
from headwater.common.messages import ReadyReport
from headwater.server.fleet import Dropout
from headwater.server.flower.registration import Registration, check_name


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
