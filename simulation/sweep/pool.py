"""Executes runs in worker processes, ``jobs`` of them at a time.

``multiprocessing`` with one pipe per worker, and not ``concurrent.futures``: there the death of one
process fails every run in progress and hides which run killed it. Here it fails the run of that
process, and a new process continues with the next run.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import cast

from headwater.common.system.portability import PipeEnd
from headwater.simulation.sweep.grid import SweepRun
from headwater.simulation.sweep.worker import LOG, RunProgress, execute_runs

EXIT_SECONDS = 30.0  # for an interrupted run to close its files


def run_all(
    waiting: deque[SweepRun], *, jobs: int
) -> Generator[tuple[SweepRun, RunProgress], None, None]:
    """Execute the runs, resuming those that have a checkpoint, and yield their progress.

    The runs leave ``waiting`` as they start. The caller may append more whenever this has yielded;
    it ends when no run is left. When the generator ends or is closed, no worker process is left.
    """
    busy: dict[PipeEnd, _Worker] = {}
    idle: list[_Worker] = []

    def start_runs() -> None:
        while waiting and len(busy) < jobs:
            with _sigint_deferred():
                run = waiting.popleft()
                worker = idle.pop() if idle else _Worker()
                worker.begin(run)
                busy[worker.pipe] = worker

    try:
        start_runs()
        while busy:
            for one in wait(cast(list[Connection], list(busy))):
                ready = cast(PipeEnd, one)
                worker = busy[ready]
                run, progress = worker.run, worker.receive()
                if progress.ended:
                    del busy[ready]
                    if worker.is_alive:
                        idle.append(worker)
                    else:
                        worker.close()
                yield run, progress
            start_runs()
    finally:
        for worker in busy.values():
            worker.interrupt()
        for worker in (*busy.values(), *idle):
            worker.close()


class _Worker:
    """One worker process and the run that it executes."""

    run: SweepRun

    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe: PipeEnd
        self.pipe, other_end = context.Pipe()
        self._process = context.Process(target=execute_runs, args=(other_end,))
        self._process.start()
        other_end.close()
        self.is_alive = True

    def begin(self, run: SweepRun) -> None:
        """Send a run to the process."""
        self.run = run
        with suppress(OSError):  # the process has died: ``receive`` reports it
            self.pipe.send(run)

    def receive(self) -> RunProgress:
        """Return the next message of the process; a process that died has failed its run."""
        try:
            progress: RunProgress = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            self.is_alive = False
            status = self._process.exitcode
            line = f"its process ended with status {status}; see {self.run.folder / LOG}"
            return RunProgress(ended="failed", line=line)
        return progress

    def interrupt(self) -> None:
        """Interrupt the run as Ctrl-C does: its committed rounds are kept.

        Windows cannot do this to one process and kills it, which the checkpoint withstands too.
        """
        if self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, signal.SIGINT)

    def close(self) -> None:
        """Wait until the process has ended; kill it after ``EXIT_SECONDS``."""
        self.pipe.close()
        self._process.join(EXIT_SECONDS)
        self._process.kill()
        self._process.join()


@contextmanager
def _sigint_deferred() -> Iterator[None]:
    """Defer Ctrl-C, so that no process is started halfway or forgotten.

    A process that is started here inherits the blocked SIGINT, and unblocks it once it can handle
    it. The resource tracker of ``multiprocessing`` unblocks SIGINT as it starts, so it is started
    first. The mask holds for one thread only; the handler covers the others.
    """
    if sys.platform == "win32":  # which has no such mask
        yield
        return
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if received:
        signal.raise_signal(signal.SIGINT)
