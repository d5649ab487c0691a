"""Traces of availability: the rounds in which devices are connected, and errors in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_spec import fleet_spec, with_fleet
from headwater.simulation.fleet.random_events import is_connected
from headwater.simulation.fleet.traces import RoundShares, Spans, read_trace
from headwater.simulation.run import run_engine

TABLE = "examples_per_second = 10\nmemory_bytes = 400_000_000\nupload_bytes_per_second = 1_000_000"


def fleet(folder: Path, trace: str, *, count: int, more: str = "") -> Settings:
    (folder / "trace.csv").write_text(trace)
    path = folder / "fleet.toml"
    path.write_text(f'[[device]]\n{TABLE}\ncount = {count}\navailability = "trace.csv"\n{more}\n')
    return with_fleet(load(None, {"simulation.fleet": path}))


def there(settings: Settings, part: int, rounds: range) -> list[int]:
    return [n for n in rounds if is_connected(fleet_spec(settings), part, round_number=n, look=0)]


def test_a_trace_of_shares_applies_to_each_device_of_the_table_and_repeats(
    tmp_path: Path,
) -> None:
    settings = fleet(tmp_path, "round,share\n1,1\n2,0\n\n3, 0.5\n", count=2)
    drawn = [there(settings, part, range(1, 601)) for part in range(2)]
    for rounds in drawn:
        assert set(range(1, 601, 3)) <= set(rounds)
        assert not set(range(2, 601, 3)) & set(rounds)
        # Four standard deviations of a binomial count of 200 halves.
        assert abs(len(set(range(3, 601, 3)) & set(rounds)) - 100) <= 4 * (200 / 4) ** 0.5
    assert drawn[0] != drawn[1]


def test_a_trace_of_rounds_lists_each_device_s_rounds_both_inclusive(tmp_path: Path) -> None:
    text = "device,first_round,last_round\n0,1,2\n1,2,3\n0,5,5\n1,6,6\n"
    settings = fleet(tmp_path, text, count=2)
    assert there(settings, 0, range(1, 13)) == [1, 2, 5, 7, 8, 11]  # repeats after round 6
    assert there(settings, 1, range(1, 13)) == [2, 3, 6, 8, 9, 12]


def test_a_trace_in_seconds_is_read_at_the_start_of_each_round(tmp_path: Path) -> None:
    # Rounds begin at 0, 600, 1200, 1800, 2400: [0, 600) holds the first, [601, 1800) the third.
    text = "device,from_seconds,to_seconds\n0,0,600\n0,601,1800\n0,1800,2400.5\n"
    settings = fleet(tmp_path, text, count=1, more="round_seconds = 600")
    assert there(settings, 0, range(1, 6)) == [1, 3, 4, 5]
    assert there(settings, 0, range(6, 11)) == [6, 8, 9, 10]


@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 10)), min_size=1, max_size=8),
    index=st.integers(0, 100),
)
def test_adjacent_or_overlapping_spans_are_merged(
    rows: list[tuple[int, int]], index: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.csv"
    lines = [f"0,{first},{first + more}" for first, more in rows]
    path.write_text("\n".join(["device,first_round,last_round", *lines]))
    (found,) = read_trace(path, num_devices=1, round_seconds=None)
    number = index % max(first + more for first, more in rows) + 1
    assert found.at(index) == any(first <= number <= first + more for first, more in rows)


def test_a_device_is_always_available_if_its_span_covers_the_trace() -> None:
    assert RoundShares((1.0, 1.0)).is_always
    assert not RoundShares((1.0, 0.9)).is_always
    assert Spans(starts=(0,), ends=(4,), period=4).is_always
    assert not Spans(starts=(0,), ends=(3,), period=4).is_always


R, S = "device,first_round,last_round\n", "device,from_seconds,to_seconds\n"


@pytest.mark.parametrize(
    ("trace", "more", "named"),
    [
        ("", "", r"line 1: expected one of the headers round,share; .*; found $"),
        ("time,share\n", "", "line 1: expected one of the headers .*found time,share"),
        ("round,share\n", "", "line 1: the devices are never available"),
        ("round,share\n1,0\n", "", "line 2: the devices are never available"),
        ("round,share\n1,1\n3,1\n", "", "line 3: expected round 2, found 3"),
        ("round,share\n1,1.5\n", "", "line 2: the share must be from 0 to 1, found 1.5"),
        ("round,share\n1,nan\n", "", "line 2: expected a number, found 'nan'"),
        ("round,share\n1\n", "", "line 2: expected 2 values, found 1"),
        ("round,share\n1,1\n", "round_seconds = 5", "line 1: round_seconds is set, .*not in sec"),
        (R, "", "line 1: device 0 is not available at the start"),
        (f"{R}0,1,4\n", "", "line 2: device 1 is not available at the start"),
        (f"{R}2,1,4\n", "", "line 2: the device must be 0 to 1, found 2"),
        (f"{R}0.5,1,4\n", "", "line 2: the device must be 0 to 1, found 0.5"),
        (f"{R}0,0,4\n", "", "line 2: expected whole rounds, 1 <= first <= last; found 0 and 4"),
        (f"{R}0,4,3\n", "", "line 2: expected whole rounds, .*found 4 and 3"),
        (f"{R}0,1,99999999\n", "", "line 2: the trace is longer than 10,000,000 rounds"),
        (f"{S}0,0,5\n", "", "line 1: round_seconds is not set, and the trace is in seconds"),
        (f"{S}0,5,5\n", "round_seconds = 5", "line 2: expected 0 <= from < to, found 5 and 5"),
        (f"{S}0,1,4\n1,0,1\n", "round_seconds = 5", "line 3: device 0 is not available"),
        ('round,share\n1,"1\n', "", "is not a CSV file: "),
    ],
)
def test_an_error_in_a_trace_names_its_line(
    tmp_path: Path, trace: str, more: str, named: str
) -> None:
    with pytest.raises(SettingsError, match=rf"trace\.csv.*{named}"):
        fleet(tmp_path, trace, count=2, more=more)


def test_a_missing_or_binary_trace_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the trace .*nowhere\.csv: No such file"):
        read_trace(tmp_path / "nowhere.csv", num_devices=1, round_seconds=None)
    (tmp_path / "trace.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="is not a CSV file"):
        read_trace(tmp_path / "trace.csv", num_devices=1, round_seconds=None)


def test_round_seconds_without_a_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f"[[device]]\n{TABLE}\nround_seconds = 600\n")
    with pytest.raises(SettingsError, match="number 1: round_seconds is set without a trace"):
        with_fleet(load(None, {"simulation.fleet": path}))


def test_a_run_invites_the_trace_s_devices_in_each_round(tmp_path: Path) -> None:
    text = "device,first_round,last_round\n0,1,3\n1,2,2\n2,3,4\n"
    settings = fleet(tmp_path, text, count=3).model_copy(
        update={"task": "tests/tasks.py:TwoLayers", "rounds": 6, "out": tmp_path / "out"}
    )
    run_engine(settings, on_round=lambda _: None, resume=False)
    cohorts = [
        "".join(client["name"] for client in row["clients"]) for row in read_rows(tmp_path / "out")
    ]
    assert cohorts == ["0", "01", "02", "2", "0", "01"]
