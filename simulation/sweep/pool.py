"""The processes of a sweep: as many runs at a time as there are jobs, each in a process that stays.

A process that dies costs the run that it was at, which is told as failed, and is replaced. All end
with this one, however that ends: their input is a pipe from here (``headwater.simulation.sweep.grid.worker``).
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headwater.simulation.sweep.grid import SweptRun
from headwater.simulation.sweep.worker import LOG, Ended

PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """News of a run: a round, or with ``ended`` set how it ended."""

    run: SweptRun
    round: int = 0
    line: str = ""
    ended: Ended | None = None


News = Told | Exception | None
"""What a job says: of a run, of a fault of its own, or that it is through."""


def run_all(runs: Sequence[SweptRun], *, jobs: int) -> Generator[Told, None, None]:
    """Run all runs and yield what they tell; when this is left, no process is.

    A run that was cut goes on from its checkpoint.
    """
    waiting: queue.SimpleQueue[SweptRun] = queue.SimpleQueue()
    for run in runs:
        waiting.put(run)
    news: queue.SimpleQueue[News] = queue.SimpleQueue()
    slots = [_Slot(waiting, news) for _ in range(min(jobs, len(runs)))]
    for slot in slots:
        slot.thread.start()
    num_working = len(slots)
    try:
        while num_working:
            told = news.get()
            if isinstance(told, Exception):
                raise told
            if told is None:
                num_working -= 1
            else:
                yield told
    finally:
        for slot in slots:
            slot.stop()
        for slot in slots:
            slot.thread.join(PATIENCE_SECONDS)
            if slot.thread.is_alive():
                slot.kill()
                slot.thread.join()


class _Slot:
    """One job: takes run after run from the queue and has a process of its own do them."""

    def __init__(
        self,
        waiting: queue.SimpleQueue[SweptRun],
        news: queue.SimpleQueue[News],
    ) -> None:
        self.thread = threading.Thread(target=self._work, daemon=True)
        self._waiting, self._news = waiting, news
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False

    def _work(self) -> None:
        try:
            while not self._is_stopped:
                try:
                    run = self._waiting.get_nowait()
                except queue.Empty:
                    break
                self._do(run)
        except Exception as error:
            self._news.put(error)
        finally:
            self.stop()
            self._reap()
            self._news.put(None)

    def stop(self) -> None:
        """Let the process end; a run that it is at keeps what it has committed."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()

    def kill(self) -> None:
        """End the process at once."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _do(self, run: SweptRun) -> None:
        process = self._started()
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError, ValueError):  # it has died, or was told to stop
            process.stdin.write(json.dumps(run.settings.model_dump(mode="json")) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            told = json.loads(line)
            if "ended" in told:
                self._news.put(Told(run=run, line=told["message"], ended=told["ended"]))
                return
            self._news.put(Told(run=run, round=told["round"], line=told["line"]))
        status = self._reap()
        if not self._is_stopped:
            said = f"its process ended with status {status}; see {run.folder / LOG}"
            self._news.put(Told(run=run, line=said, ended="failed"))

    def _started(self) -> subprocess.Popen[str] | None:
        """Return the process, started if there is none; None if this slot is to stop."""
        with self._lock:
            if self._process is None and not self._is_stopped:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "headwater.simulation.sweep.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # Ctrl-C comes to the sweep alone
                )
            return None if self._is_stopped else self._process

    def _reap(self) -> int | None:
        """Wait for the process to end and return its status; None if there is none."""
        process = self._process
        if process is None:
            return None
        status = process.wait()
        with self._lock:
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            self._process = None
        return status
