"""A stop signal ends a run wherever it comes, and cuts no record of a round."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headwater.common.messages import DeviceReport
from headwater.common.settings.schema import Settings
from headwater.common.system.stop_signals import (
    StopRequests,
    at_stop_signals,
    interrupt,
    interrupt_at_once,
)
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.checkpoint import run_position
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine


@pytest.fixture(autouse=True)
def no_earlier_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopRequests, "_requested_at", None)


def ask_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def lose_it() -> None:
    """Lose the interrupt, as a garbage collector's callback does."""
    with contextlib.suppress(KeyboardInterrupt):
        ask_to_stop()


def rename_it() -> None:
    """Make another error of the interrupt, as pydantic's serializers do."""
    try:
        ask_to_stop()
    except KeyboardInterrupt as error:
        raise RuntimeError("error calling a function") from error


class StopsAtRound2(Observer):
    """Calls ``stop`` as round 2 begins, or while its step is recorded."""

    def __init__(self, stop: Callable[[], None], *, at_step: bool) -> None:
        self._stop = stop
        self._at_step = at_step
        self.recorded: list[int] = []

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        if not self._at_step and round_number == 2:
            self._stop()

    def stepped(self, row: RoundRow) -> None:
        if self._at_step and row.round == 2:
            self._stop()
        self.recorded.append(row.round)


def interrupted_run(folder: Path, observer: Observer) -> None:
    settings = Settings.model_validate(
        {
            "task": "tests/tasks.py:TwoLayers",
            "rounds": 4,
            "out": folder,
            "simulation": {"clients": 2},
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
        }
    )
    with (
        at_stop_signals(StopRequests(interrupt, interrupt_at_once)),
        pytest.raises(KeyboardInterrupt),
    ):
        run_engine(settings, on_round=lambda _: None, resume=False, observer=observer)


def test_an_interrupt_while_a_round_is_recorded_waits_for_all_of_its_records(
    tmp_path: Path,
) -> None:
    observer = StopsAtRound2(ask_to_stop, at_step=True)
    interrupted_run(tmp_path / "out", observer)
    assert observer.recorded == [1, 2]
    assert [row["round"] for row in read_rows(tmp_path / "out")] == [1, 2]
    assert run_position(tmp_path / "out", resume=True)[1] == 2


@pytest.mark.parametrize(("stop", "committed"), [(lose_it, [1, 2]), (rename_it, [1])])
def test_an_interrupt_that_a_library_loses_or_renames_still_ends_the_run(
    stop: Callable[[], None], committed: list[int], tmp_path: Path
) -> None:
    observer = StopsAtRound2(stop, at_step=False)
    interrupted_run(tmp_path / "out", observer)
    assert observer.recorded == committed
    assert [row["round"] for row in read_rows(tmp_path / "out")] == committed


def test_a_second_request_is_not_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.common.system.stop_signals.REPEAT_SECONDS", 0.0)

    def ask_twice() -> None:
        ask_to_stop()
        ask_to_stop()

    observer = StopsAtRound2(ask_twice, at_step=True)
    interrupted_run(tmp_path / "out", observer)
    assert observer.recorded == [1]
