"""A server's term of a shared run: taken, renewed in a thread, and checked by each commit.

The thread replaces the record four times in ``term_seconds``. If it finds another holder, or cannot
reach the store for ``term_seconds``, the term has ended: ``check`` raises, and so does each commit.

A store on a network's file system may also not answer at all, for as long as its server is away.
Then no thread that asks it can do anything, and the devices would stay with this server for as
long. So another thread ends the process, once the store has not answered for two terms, and 10 s.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from headwater.common.errors import CheckpointCorrupt, TermEnded
from headwater.server.standby.state_store import StateStore
from headwater.server.standby.term_record import NAME, TermRecord

log = logging.getLogger(__name__)

BEATS_PER_TERM = 4
SILENT_LOOKS = 8  # counted, as the clock also goes on in a process that is stopped
MIN_SILENT_SECONDS = 10.0

Change = Callable[[TermRecord], TermRecord]


class Lease:
    """This process's term, until it ends or is released."""

    def __init__(
        self,
        store: StateStore,
        record: TermRecord,
        version: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        end_process: Callable[[int], object] = os._exit,
        min_silent_seconds: float = MIN_SILENT_SECONDS,
    ) -> None:
        """Hold the term whose record was just written; see ``take``.

        ``end_process`` is called, with the exit status, if the store does not answer for two terms,
        and for ``min_silent_seconds``.
        """
        self.record = record
        self._store = store
        self._version = version
        self._clock = clock
        self._renewed_at = clock()
        self._ended: TermEnded | None = None
        self._lock = threading.Lock()
        self._has_stopped = threading.Event()
        self._is_released = threading.Event()
        self._end_process = end_process
        self._silent_seconds = max(2 * record.term_seconds, min_silent_seconds)
        self._thread = threading.Thread(target=self._renew, name="term", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="term watch", daemon=True)

    @staticmethod
    def take(
        store: StateStore, before: TermRecord, version: str | None, *, term_seconds: float
    ) -> Lease | None:
        """Begin the next term; None if another server was faster, or the holder is alive.

        Raises:
            OSError: the store cannot be reached.
        """
        holder = f"{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(4)}"
        record = before.taken_by(holder, term_seconds=term_seconds)
        taken = store.write_if_unchanged(NAME, record.to_bytes(), version)
        return None if taken is None else Lease(store, record, taken)

    def start(self) -> None:
        """Start to renew the term."""
        self._thread.start()
        self._watcher.start()

    def check(self) -> None:
        """Check that this server may serve, as far as is known without asking the store.

        Raises:
            TermEnded: it may not.
        """
        if self._ended is not None:
            raise self._ended

    def commit(self, change: Change) -> None:
        """Replace the record by a changed one; once this returns, the change counts in every term.

        Raises:
            TermEnded: another server has a later term; nothing has changed.
            OSError: the store cannot be reached; it may have changed all the same.
        """
        self.check()
        self._replace(change)

    def release(self, change: Change) -> None:
        """Stop renewing, and write the record's last change if the term has not ended.

        If the store does not answer, the watch ends the process.
        """
        self._has_stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            if self._ended is None:
                self._replace(change)
        except (TermEnded, OSError) as error:
            log.warning("term %d was not released: %s", self.record.term, error)
        finally:
            self._is_released.set()

    def _renew(self) -> None:
        has_failed = False
        while self._ended is None:
            if self._has_stopped.wait(self.record.term_seconds / BEATS_PER_TERM):
                return
            try:
                self._replace(lambda record: record)
                has_failed = False
            except TermEnded:
                return
            except CheckpointCorrupt as error:
                self._ended = TermEnded(f"term {self.record.term} of this server ended: {error}")
                return
            except OSError as error:
                if not has_failed:
                    log.warning("the shared state cannot be reached: %s", error)
                has_failed = True
                self._end_if_lapsed(error)

    def _watch(self) -> None:
        renewed_at, num_silent = self._renewed_at, 0
        while not self._is_released.wait(self._silent_seconds / SILENT_LOOKS):
            if self._ended is not None:
                return
            num_silent = num_silent + 1 if self._renewed_at == renewed_at else 0
            renewed_at = self._renewed_at
            if num_silent >= SILENT_LOOKS:
                log.error(
                    "the shared state has not answered for %g s: this process ends, so that its "
                    "devices find the other server; start it again with --standby",
                    self._silent_seconds,
                )
                self._end_process(1)
                return

    def _end_if_lapsed(self, error: OSError) -> None:
        seconds = self._clock() - self._renewed_at
        if seconds >= self.record.term_seconds:
            self._ended = TermEnded(
                f"term {self.record.term} could not be renewed for {seconds:.0f} s: the shared "
                f"state cannot be reached: {error}"
            )

    def _replace(self, change: Change) -> None:
        """Replace the record by compare and swap.

        Raises:
            TermEnded: it has changed.
            OSError: the store cannot be reached.
        """
        with self._lock:
            record = replace(change(self.record), beat=self.record.beat + 1)
            begun_at = self._clock()
            version = self._store.write_if_unchanged(NAME, record.to_bytes(), self._version)
            if version is None:
                version = self._version_if_own(record)
            self.record, self._version, self._renewed_at = record, version, begun_at

    def _version_if_own(self, record: TermRecord) -> str:
        """Return the version if the record in the store is this term's own.

        A store over a network may have written it although the answer was lost.

        Raises:
            TermEnded: it is not.
        """
        found = self._store.read(NAME)
        there = TermRecord() if found is None else TermRecord.of(found[0])
        if found is not None and (there.term, there.holder) == (record.term, record.holder):
            if there == record:
                return found[1]
            # An earlier write, whose answer was lost: this one is still to come.
            version = self._store.write_if_unchanged(NAME, record.to_bytes(), found[1])
            if version is not None:
                return version
        self._ended = TermEnded(
            f"term {record.term} of this server has ended: {there.holder} has term {there.term}"
        )
        raise self._ended
