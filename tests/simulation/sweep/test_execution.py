"""The progress of a sweep or a comparison, and how long the rest takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.simulation.sweep.execution import MIN_SECONDS, ExecutionDisplay
from headwater.simulation.sweep.grid import SweepRun, run_of
from headwater.simulation.sweep.worker import RunProgress


class Clock:
    """A clock that is set."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def runs(folder: Path, *rounds: int) -> Sequence[SweepRun]:
    task = {"task": "tests/tasks.py:TwoLayers"}
    return [
        run_of({}, {**task, "rounds": number}, {}, seed, out=folder, what="sweep")
        for seed, number in enumerate(rounds)
    ]


def test_the_rest_takes_as_long_as_the_rounds_so_far(tmp_path: Path) -> None:
    clock = Clock()
    display = ExecutionDisplay(0, clock=clock)
    first, second = runs(tmp_path, 10, 30)
    display.add([first, second])
    assert display.left_seconds() is None
    clock.seconds = 8.0
    display.take(first, RunProgress(round=4, line=""))
    assert display.left_seconds() == pytest.approx(8.0 * 36 / 4)
    display.take(first, RunProgress(ended="whole", line=""))
    assert display.left_seconds() == pytest.approx(8.0 * 30 / 10)
    assert "about 24 s left" in display.line()
    display.take(second, RunProgress(ended="whole", line=""))
    assert display.left_seconds() == 0
    assert "left" not in display.line()


def test_nothing_is_said_of_the_rest_before_some_seconds(tmp_path: Path) -> None:
    clock = Clock()
    display = ExecutionDisplay(0, clock=clock)
    (run,) = runs(tmp_path, 10)
    display.add([run])
    clock.seconds = MIN_SECONDS / 2
    display.take(run, RunProgress(round=9, line=""))
    assert display.left_seconds() is None


def test_runs_that_are_expected_later_count_with_their_rounds(tmp_path: Path) -> None:
    """Two searches of 10 rounds are known; two runs of 40 follow, of which only the number is."""
    for expected, rest in ((100, 90), (None, 30)):
        clock = Clock()
        display = ExecutionDisplay(4, expected, clock=clock)
        first, second = runs(tmp_path, 10, 10)
        display.add([first, second])
        clock.seconds = 10.0
        display.take(first, RunProgress(ended="whole", line=""))
        assert display.left_seconds() == pytest.approx(rest)
