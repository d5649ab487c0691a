"""A finished run's page: its rounds, its devices, and what it says of a folder without any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.common.errors import SettingsError
from headwater.server.operations.log_limits import older_file
from headwater.server.operations.round_log import ROUNDS, row_to_dict
from headwater.server.report.replay import FinishedRun
from tests.round_rows import masked, row


def write(folder: Path, *rows: object) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(row_to_dict(each)) for each in rows]  # type: ignore[arg-type]
    (folder / ROUNDS).write_text("\n".join(lines) + "\n")
    return folder


def test_rounds_and_devices_of_a_folder(tmp_path: Path) -> None:
    run = FinishedRun(
        write(tmp_path / "run", row(1, "a", "b"), row(2, "a", masked_clients=[masked("m")]))
    )
    assert [point["round"] for point in run.all_points()[0]] == [1, 2]
    assert set(run.tiles()) == {"a", "b", "m"}
    assert run.tiles()["m"]["k"] == 5
    assert [point["round"] for point in run.device("b")] == [1]
    assert run.status()["has_ended"]
    assert run.about["task"] == "run", "no settings are there: the folder's name"


def test_settings_name_the_task(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", row(1, "a"))
    (folder / "settings.toml").write_text('task = "mine.py:Mine"\nrounds = 9\n')
    about = FinishedRun(folder).about
    assert (about["task"], about["rounds"]) == ("mine.py:Mine", 9)


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", row(1, "a"))
    with (folder / ROUNDS).open("a") as lines:
        lines.write('{"round": 2, "num_cl')
    assert FinishedRun(folder).status()["round"] == 1


@pytest.mark.parametrize("has_file", [True, False], ids=["empty", "missing"])
def test_a_folder_without_rounds_is_refused(has_file: bool, tmp_path: Path) -> None:
    if has_file:
        (tmp_path / ROUNDS).write_text("")
    with pytest.raises(SettingsError, match="holds no"):
        FinishedRun(tmp_path)


def test_the_rows_before_a_full_file_are_in_it_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", row(1, "a"), row(2, "a"))
    (folder / ROUNDS).replace(older_file(folder / ROUNDS))
    write(folder, row(3, "a"))
    run = FinishedRun(folder)
    assert [point["round"] for point in run.all_points()[0]] == [1, 2, 3]
    assert len(run.device("a")) == 3
