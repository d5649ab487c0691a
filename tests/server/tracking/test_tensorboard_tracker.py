"""The TensorBoard log: its figures, its files and a full disk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import nn

from headwater.common.settings.schema import Settings
from headwater.server.operations.round_log import EVENTS
from headwater.server.rounds.features import trackers
from headwater.server.rounds.round_row import RoundRow
from headwater.server.tracking import tensorboard_tracker
from tests.round_rows import row


def written(settings: Settings, rows: Sequence[RoundRow]) -> list[set[str]]:
    """Write rows, and return the tags in each file."""
    (tracker,) = trackers(settings)
    tracker.started(settings, round_number=0, model=nn.Module())
    for one in rows:
        tracker.on_round(one)
    tracker.ended()
    assert settings.out is not None
    return [
        {value.tag for event in EventFileLoader(str(path)).Load() for value in event.summary.value}
        for path in sorted((settings.out / EVENTS).iterdir())
    ]


@pytest.mark.parametrize("track", [None, "tensorboard"])
def test_a_run_s_known_figures_are_written_once(track: str | None, tmp_path: Path) -> None:
    given = row(1, "pi", target=5, target_by="examples")
    (tags,) = written(Settings(out=tmp_path, track=track), [given])
    assert tags == {*given.figures(), "effective_batch_size"}


def test_a_run_without_a_last_round_begins_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard_tracker, "MAX_EVENT_BYTES", 1)
    rows = [row(number, "pi") for number in (1, 2, 3)]
    files = written(Settings(out=tmp_path, rounds="forever"), rows)
    assert len(files) == 3
    assert all("loss" in tags for tags in files)


def test_a_full_disk_is_logged_once_and_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / EVENTS).write_bytes(b"")  # as a folder that cannot be made
    (tracker,) = trackers(Settings(out=tmp_path))
    tracker.started(Settings(out=tmp_path), round_number=0, model=nn.Module())
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            tracker.on_round(row(number, "pi"))
    tracker.ended()
    assert caplog.text.count("no TensorBoard log in") == 1
