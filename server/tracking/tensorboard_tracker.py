"""The TensorBoard log, which each run with a folder writes into it: a scalar for each figure.

It writes TensorBoard's event files without TensorFlow, torch's wrapper or a thread. Of a run
without a last round only the latest files stay (``headwater.server.operations.log_limits``).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from headwater.common.settings.schema import Settings
from headwater.common.system.printable import printable_name
from headwater.server.operations.log_limits import MAX_EVENT_BYTES, delete_oldest
from headwater.server.operations.round_log import EVENTS
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import RoundRow

log = logging.getLogger(__name__)


class TensorboardTracker(Observer):
    """Writes a run's figures for TensorBoard; without its package, or on a full disk, none."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._num_files = 0
        self._num_bytes = 0
        self._file: Any = None
        self._event: Any = None
        self._summary: Any = None
        self._records: Any = None
        self._is_bounded = self._has_failed = False

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        """Begin a file in the run's folder; a resumed run has one of its own."""
        if settings.out is None:
            return
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            log.warning("no TensorBoard log: pip install 'headwater[server]' writes one")
            return
        self._event, self._summary, self._records = Event, Summary, RecordWriter
        self._folder, self._is_bounded = settings.out / EVENTS, settings.num_rounds is None

    def on_round(self, row: RoundRow) -> None:
        """Write the round's numbers and metrics, with the round as their step."""
        if self._folder is None:
            return
        values = [
            self._summary.Value(tag=printable_name(name), simple_value=value)
            for name, value in {**row.figures(), "effective_batch_size": row.weight}.items()
        ]
        with self._failures_logged_once():
            self._write(self._folder, step=row.round, summary=self._summary(value=values))

    def ended(self) -> None:
        """Close the file."""
        with self._failures_logged_once():
            if self._file is not None:
                self._file.close()

    @contextmanager
    def _failures_logged_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                log.warning("no TensorBoard log in %s: %s", self._folder, error.strerror)
            self._has_failed = True

    def _write(self, folder: Path, **fields: Any) -> None:
        """Write an event, into a new file where there is none, or a bounded one is full."""
        now = time.time()
        if self._file is None or (self._is_bounded and self._num_bytes >= MAX_EVENT_BYTES):
            if self._file is not None:
                self._file.close()
            folder.mkdir(exist_ok=True)
            name = f"{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{self._num_files}"
            self._file = (folder / f"events.out.tfevents.{name}").open("wb")
            self._num_files += 1
            self._num_bytes = 0
            if self._is_bounded:
                delete_oldest(folder)
            self._write(folder, file_version="brain.Event:2")
        event = self._event(wall_time=now, **fields).SerializeToString()
        self._records(self._file).write(event)
        self._file.flush()
        self._num_bytes += len(event)
