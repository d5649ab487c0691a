"""The round log writes a run's rows, events and curves, and reads its rows back."""

from __future__ import annotations

import errno
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from headwater.common.errors import StateError
from headwater.common.settings.schema import Settings
from headwater.server.operations.client_table import LISTS
from headwater.server.operations.round_log import (
    CURVES,
    ROUNDS,
    RoundLog,
    read_rows,
    row_to_dict,
)
from headwater.server.rounds.round_row import RoundRow
from tests.round_rows import client, masked, row

CLIENTS = ("pi", "laptop")


def opened(folder: Path, round_number: int = 0) -> RoundLog:
    round_log = RoundLog()
    round_log.started(Settings(out=folder), round_number=round_number, model=nn.Module())
    return round_log


def written(folder: Path, rounds: int) -> None:
    round_log = opened(folder)
    for number in range(1, rounds + 1):
        round_log.stepped(row(number, *CLIENTS))
    round_log.ended()


def test_a_row_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written(tmp_path, 2)
    first, second = read_rows(tmp_path)
    assert (first["round"], second["round"]) == (1, 2)
    assert first["clients"][0]["step_gradient_norm"] == [1.0, 1.5]
    assert first["clients"][0]["loss"] == 0.5
    assert first["clients"][0]["peak_bytes"] == 100


@pytest.mark.parametrize("resumed", [0, 1])
def test_rows_after_the_resumed_round_are_dropped(tmp_path: Path, resumed: int) -> None:
    written(tmp_path, 3)
    opened(tmp_path, resumed).ended()
    assert [found["round"] for found in read_rows(tmp_path)] == [*range(1, min(resumed, 3) + 1)]


def test_a_line_cut_off_by_a_crash_is_skipped_and_written_again(tmp_path: Path) -> None:
    written(tmp_path, 2)
    file = tmp_path / ROUNDS
    file.write_text(file.read_text()[:-20])
    round_log = opened(tmp_path, 1)
    round_log.stepped(row(2, *CLIENTS))
    round_log.ended()
    assert [json.loads(line)["round"] for line in file.read_text().splitlines()] == [1, 2]


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "given",
    [
        row(1, *CLIENTS),
        row(1, "pi"),
        row(1, clients=[], masked_clients=[masked("m"), masked("n")], epsilon=0.5, delta=1e-5),
        row(1, clients=[client("a", **{name: [] for name in LISTS})]),
        row(1, clients=[client("a", step_gradient_norm=[None, 2.0]), client("b", weight=7)]),
        row(1, *CLIENTS, left_out={"x": "slow"}, below_share=["x"], target=5, noise_scale=2.5),
    ],
)
def test_a_line_is_read_as_the_row_was(tmp_path: Path, given: RoundRow) -> None:
    round_log = opened(tmp_path)
    round_log.stepped(given)
    round_log.ended()
    [first] = read_rows(tmp_path)
    assert "null" not in (tmp_path / ROUNDS).read_text().replace("[null", "")
    opened(tmp_path, 1).ended()
    assert read_rows(tmp_path) == [first]
    assert first.pop("ended_at") == pytest.approx(time.time(), abs=60)
    assert first == as_json(row_to_dict(given))


def test_a_line_of_an_earlier_version_is_read_as_it_is(tmp_path: Path) -> None:
    found = as_json(row_to_dict(row(1, *CLIENTS, masked_clients=[masked("m")])))
    (tmp_path / ROUNDS).write_text(json.dumps(found) + "\n")
    assert read_rows(tmp_path) == [found]


def test_a_line_takes_half_the_bytes_of_its_row(tmp_path: Path) -> None:
    given = row(1, *(f"device-{part}" for part in range(10)))
    round_log = opened(tmp_path)
    round_log.stepped(given)
    round_log.ended()
    assert 2 * (tmp_path / ROUNDS).stat().st_size < len(json.dumps(row_to_dict(given)))


@pytest.mark.parametrize(
    "columns", [{"name": 3}, {"name": ["a"], "weight": [1, 2]}, {"name": ["a"], "step_seconds": 1}]
)
def test_a_line_with_damaged_columns_is_skipped(tmp_path: Path, columns: dict[str, Any]) -> None:
    written(tmp_path, 1)
    damaged = as_json(row_to_dict(row(2, *CLIENTS))) | {"clients": columns}
    with (tmp_path / ROUNDS).open("a") as lines:
        lines.write(json.dumps(damaged) + "\n")
    assert [found["round"] for found in read_rows(tmp_path)] == [1]


@pytest.mark.parametrize("damage", [b"\xb9\x80\xff", bytes(40), b"[1, 2]", b'{"round": "x"}'])
def test_a_damaged_line_is_skipped(tmp_path: Path, damage: bytes) -> None:
    written(tmp_path, 2)
    file = tmp_path / ROUNDS
    first, second = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([first, damage, second, b""]))
    opened(tmp_path, 2).ended()
    assert [found["round"] for found in read_rows(tmp_path)] == [1, 2]


def test_reopening_the_log_never_leaves_fewer_rows_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept rows are written beside the old ones: a full disk must not cost the history."""
    written(tmp_path, 3)
    before = (tmp_path / ROUNDS).read_text()

    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headwater.server.operations.round_log.json.dumps", full)
    with pytest.raises(StateError, match="No space left"):
        opened(tmp_path, 2)
    assert (tmp_path / ROUNDS).read_text() == before


def test_a_file_in_the_folders_place_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StateError):
        opened(tmp_path / "out")


def drawn(folder: Path) -> tuple[int, int]:
    """Return width and height of the plot, read from its PNG header."""
    content = (folder / CURVES).read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@pytest.mark.usefixtures("draws_curves")
def test_the_curves_are_drawn(tmp_path: Path) -> None:
    written(tmp_path, 3)
    width, height = drawn(tmp_path)
    assert width > height > 100


@pytest.mark.usefixtures("draws_curves")
@pytest.mark.parametrize("loss", [-1.0, float("nan")])
def test_the_curves_are_drawn_for_any_loss(tmp_path: Path, loss: float) -> None:
    round_log = opened(tmp_path)
    for number in (1, 2):
        round_log.stepped(row(number, *CLIENTS, loss=loss, metrics={}))
    round_log.ended()
    drawn(tmp_path)


@pytest.mark.usefixtures("draws_curves")
def test_a_disk_that_fills_up_leaves_no_half_of_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fills(self: object, file: Path, **_: object) -> None:
        Path(file).write_bytes(b"\x89PNG")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fills)
    written(tmp_path, 3)
    assert not [*tmp_path.glob("curves*")]
    assert "no curves.png" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("draws_curves")
def test_rows_without_a_target_are_drawn(tmp_path: Path) -> None:
    written(tmp_path, 2)
    lines = [json.loads(line) for line in (tmp_path / ROUNDS).read_text().splitlines()]
    for line in lines:
        for name in ("target", "target_by", "noise_scale", "measured_share"):
            line.pop(name, None)
    (tmp_path / ROUNDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / CURVES).unlink()
    opened(tmp_path, 2).ended()
    drawn(tmp_path)


@pytest.mark.usefixtures("draws_curves")
def test_metrics_with_hostile_names_are_drawn(tmp_path: Path) -> None:
    """A name with two dollar signs was read as a formula, and ended the run with an error."""
    round_log = opened(tmp_path)
    round_log.stepped(row(1, *CLIENTS, metrics={r"train_$\frac$": 0.5, "train_[/x]\x1b": 1.0}))
    round_log.ended()
    drawn(tmp_path)


@pytest.mark.usefixtures("draws_curves")
def test_a_plot_that_cannot_be_written_does_not_hide_the_error_before_it(tmp_path: Path) -> None:
    round_log = opened(tmp_path)
    round_log.stepped(row(1, *CLIENTS))
    (tmp_path / CURVES).mkdir()
    round_log.ended()


@pytest.mark.usefixtures("draws_curves")
def test_a_run_without_a_round_draws_nothing(tmp_path: Path) -> None:
    opened(tmp_path).ended()
    assert not (tmp_path / CURVES).exists()
