"""Keeps a run going when its own output cannot be written: a full disk, a reader that has gone.

A run may print to a log on a disk that fills, or into a pipe whose reader ends. Its rounds do not
depend on that. Python's own streams would raise in whatever code prints, in the user's task as
well, and rich ends the process. So the standard streams are replaced by ``LastingStream``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

log = logging.getLogger(__name__)


class LastingStream:
    """A text stream whose writes and flushes never raise ``OSError``.

    | the stream | then |
    | --- | --- |
    | cannot be written for a while (no space) | each write tries again; the log counts failures |
    | has no reader any more | nothing more is written |

    The first failure is logged once, so that the other stream tells it. Everything else is the
    stream's own: descriptor, encoding, whether it is a terminal.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        """``name`` is what a message calls it."""
        self.stream = stream
        self._name = name
        self._num_failures = 0
        self._is_written = False
        """Whether the stream took a text after the last failure."""
        self._has_reader = True

    def write(self, text: str) -> int:
        """Write a text, if the stream can take it; return its length in any case."""
        if self._has_reader:
            try:
                self.stream.write(text)
            except OSError as error:
                self._failed(error)
            else:
                self._is_written = True
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write out what is buffered; what cannot be written now may be written later."""
        if not self._has_reader:
            return
        try:
            self.stream.flush()
        except OSError as error:
            self._failed(error)
            return
        if self._num_failures and self._is_written:
            number, self._num_failures = self._num_failures, 0
            log.warning("%s failed %d times: lines of it may be missing", self._name, number)

    def settle(self) -> None:
        """Write out what is buffered, or drop it: Python would end with status 120 because of it.

        Then the descriptor leads nowhere: nothing else of this process could be written either.
        """
        self.flush()
        if self._num_failures or not self._has_reader:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _failed(self, error: OSError) -> None:
        self._num_failures += 1
        self._is_written = False
        self._has_reader = not isinstance(error, BrokenPipeError)
        if self._num_failures == 1:
            log.warning(
                "%s cannot be written (%s); the run goes on without it", self._name, error.strerror
            )


_STREAMS = {"stdout": "the standard output", "stderr": "the standard error stream"}
_lock = threading.Lock()
_num_inside = 0
_replaced: dict[str, TextIO | None] = {}


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let the standard streams fail without an error meanwhile; threads may overlap."""
    global _num_inside
    with _lock:
        _num_inside += 1
        if _num_inside == 1:
            _replace()
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                _restore()


def _replace() -> None:
    _open_descriptors()
    for attribute, name in _STREAMS.items():
        stream = _replaced[attribute] = getattr(sys, attribute)
        if stream is None:  # it was closed when Python started
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
            _replaced[attribute] = stream
        setattr(sys, attribute, cast(TextIO, LastingStream(stream, name)))


def _restore() -> None:
    for attribute, stream in _replaced.items():
        found = getattr(sys, attribute)
        if isinstance(found, LastingStream) and found.stream is stream:
            found.settle()
            setattr(sys, attribute, stream)


def _open_descriptors() -> None:
    """Open a standard descriptor that is closed, or a file of the run would get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
