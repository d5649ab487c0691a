"""The logs of a run without a last round have a bounded size; those of other runs are whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from headwater.common.settings.schema import Settings
from headwater.server.operations.log_limits import RowsFile, delete_oldest, older_file
from headwater.server.operations.round_log import ROUNDS, RoundLog, read_rows
from tests.round_rows import row

LINE = "x" * 99


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("num_lines", "older", "newer"), [(3, 0, 3), (4, 3, 1), (6, 3, 3), (7, 3, 1), (20, 3, 2)]
)
def test_a_bounded_file_keeps_at_most_two_files_of_its_size(
    tmp_path: Path, num_lines: int, older: int, newer: int
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = RowsFile(path, is_bounded=True, max_bytes=301)
    for _ in range(num_lines):
        rows.write(LINE)
    rows.close()
    assert (lines_of(older_file(path)), lines_of(path)) == (older, newer)


def test_a_file_without_a_bound_keeps_every_line(tmp_path: Path) -> None:
    rows = RowsFile(tmp_path / "rows.jsonl", is_bounded=False, max_bytes=301)
    for _ in range(20):
        rows.write(LINE)
    rows.close()
    assert lines_of(tmp_path / "rows.jsonl") == 20


def test_the_size_counts_what_an_earlier_process_wrote(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for _ in range(4):
        rows = RowsFile(path, is_bounded=True, max_bytes=301)
        rows.write(LINE)
        rows.close()
    assert (lines_of(older_file(path)), lines_of(path)) == (3, 1)


def test_rows_of_both_files_are_read_in_order_and_dropped_after_the_resumed_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowsFile.__init__, "__kwdefaults__", {"max_bytes": 1000})
    settings = Settings(out=tmp_path, rounds="forever")
    rows_log = RoundLog()
    rows_log.started(settings, round_number=0, model=nn.Module())
    for number in range(1, 6):  # a row has some 700 bytes
        rows_log.stepped(row(number, "pi"))
    assert [one["round"] for one in read_rows(tmp_path)] == [4, 5]
    rows_log.ended()
    rows_log.started(settings, round_number=4, model=nn.Module())
    assert [one["round"] for one in read_rows(tmp_path)] == [4]
    assert (tmp_path / ROUNDS).exists()
    rows_log.ended()


def test_the_oldest_files_are_deleted_and_never_the_newest(tmp_path: Path) -> None:
    for at, name in enumerate("cab"):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (at, at))
    assert delete_oldest(tmp_path, max_bytes=300) == []
    assert delete_oldest(tmp_path, max_bytes=250) == ["c"]
    assert delete_oldest(tmp_path, max_bytes=1) == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
