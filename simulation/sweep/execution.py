"""Executes the runs of a folder under a progress bar, one command at a time.

``headwater-simulate sweep`` knows all its runs at the start; ``compare`` adds runs as others end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from rich.text import Text

from headwater.common.errors import SettingsError, StateError
from headwater.common.system.atomic_file import make_private_folder
from headwater.common.system.console import console
from headwater.common.system.file_lock import try_lock
from headwater.common.system.live_status import LiveStatus, duration, head, line_of, pack
from headwater.common.system.printable import printable
from headwater.common.wording import counted
from headwater.simulation.sweep.grid import SweepRun
from headwater.simulation.sweep.pool import run_all
from headwater.simulation.sweep.worker import RunProgress

LOCK = "sweep.lock"
MIN_SHARE, MIN_SECONDS = 0.02, 5.0
"""Of the rounds and of the time, before it is said how long the rest takes."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the runs' folder; the end of the process releases it.

    Raises:
        SettingsError: another process holds it.
        StateError: the folder cannot be written.
    """
    try:
        make_private_folder(folder)
        file = (folder / LOCK).open("a", encoding="utf-8")
    except OSError as error:
        raise StateError(
            f"cannot write {folder}: {error.strerror}", remedy="choose another --out"
        ) from error
    with file:
        if not try_lock(file.fileno()):
            raise SettingsError(
                f"another process executes the sweep or comparison in {folder}",
                remedy="wait for its end, or choose another --out",
            )
        yield


def execute(
    runs: Sequence[SweepRun],
    *,
    jobs: int,
    more: Callable[[], Sequence[SweepRun]] = tuple,
    num_expected: int = 0,
    num_expected_rounds: int | None = None,
) -> list[tuple[SweepRun, str]]:
    """Execute the runs under a progress bar over all rounds; return each failed run and why.

    Each time that a run ends, ``more`` may return further runs. ``num_expected`` is how many runs
    there will be in all, if that is more than ``runs``, and ``num_expected_rounds`` their rounds;
    None: as many each as the runs that are known.
    """
    waiting = deque(runs)
    state = ExecutionDisplay(num_expected, num_expected_rounds)
    state.add(runs)
    with (
        LiveStatus(console, block=state.block, wait_line=state.line) as status,
        closing(run_all(waiting, jobs=jobs)) as updates,
    ):
        for run, progress in updates:
            state.take(run, progress)
            if progress.ended is None:
                continue
            further = more()
            waiting.extend(further)
            state.add(further)
            name = f"{run.folder.parent.name}/{run.folder.name}"
            fault = "" if progress.ended == "whole" else progress.ended
            outcome = ": ".join(filter(None, (fault, progress.line))) or state.time()
            line = f"run {state.num_ended:>4}/{state.num_runs}  {name}  {printable(outcome)}"
            status.event(partial(str, line), is_important=True)
    return state.failed


class ExecutionDisplay:
    """The progress of the runs, and its text."""

    def __init__(
        self,
        num_expected: int,
        num_expected_rounds: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failed: list[tuple[SweepRun, str]] = []
        self.num_ended = 0
        self._num_expected = num_expected
        self._num_expected_rounds = num_expected_rounds or 0
        self._total = 0
        self._done: dict[Path, int] = {}
        self._last_line = ""
        self._clock = clock
        self._begin = clock()

    def add(self, runs: Sequence[SweepRun]) -> None:
        """Add runs that are going to be executed."""
        self._done |= {run.folder: 0 for run in runs}
        self._total += sum(_num_rounds(run) for run in runs)

    @property
    def num_runs(self) -> int:
        """The number of runs, with those that are expected later."""
        return max(len(self._done), self._num_expected)

    def take(self, run: SweepRun, progress: RunProgress) -> None:
        """Take a committed round, or the end of a run."""
        self._done[run.folder] = _num_rounds(run) if progress.ended else progress.round
        if progress.ended is None:
            self._last_line = progress.line
            return
        self.num_ended += 1
        if progress.ended == "failed":
            self.failed.append((run, progress.line))

    def block(self, width: int) -> list[Text]:
        """Return the state in lines of ``width`` columns."""
        title = f"{self.num_ended} of {counted(self.num_runs, 'run')}"
        is_ascii = console.options.ascii_only
        lines = head(title, self._share, [], width, is_ascii=is_ascii)
        return pack([*lines, *self._figures()], width)

    def line(self) -> str:
        """Return the state as one line."""
        return line_of([f"{self.num_ended} of {counted(self.num_runs, 'run')}", *self._figures()])

    @property
    def _num_done(self) -> int:
        return sum(self._done.values())

    @property
    def _share(self) -> float:
        """The share of all rounds that is done, by those that are known or expected."""
        known = len(self._done) / max(self.num_runs, 1)
        expected = max(self._total / known if known else 0.0, self._total)
        if self._num_expected_rounds and known < 1:
            expected = max(self._num_expected_rounds, self._total)
        return self._num_done / max(expected, 1)

    def left_seconds(self) -> float | None:
        """Return how long the rest takes if it goes on like this; None before enough is done."""
        share, passed = self._share, self._clock() - self._begin
        if share < MIN_SHARE or passed < MIN_SECONDS:
            return None
        return passed * (1 - share) / share

    def time(self) -> str:
        """Return how long the runs have taken, and about how long the rest takes."""
        passed = duration(float(round(self._clock() - self._begin)))
        if (left := self.left_seconds()) is not None and left >= 1:
            passed += f", about {duration(float(round(left)))} left"
        return passed

    def _figures(self) -> list[str]:
        is_known = len(self._done) == self.num_runs
        of = f" of {counted(self._total, 'round')}" if is_known else " rounds"
        return [f"{self._num_done:,}{of}", self.time(), self._last_line]


def _num_rounds(run: SweepRun) -> int:
    assert run.settings.num_rounds is not None  # no sweep or comparison has a run without end
    return run.settings.num_rounds
