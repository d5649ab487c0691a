"""The rounds that a page keeps: the newest all, the older ones thinned, the memory bounded."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headwater.server.report import history
from headwater.server.report.history import MAX_DEVICE_POINTS, DeviceHistories, RoundHistory
from headwater.server.report.round_points import RoundParts, parts_of, point_of
from tests.round_rows import row


def history_of(number: int) -> RoundHistory:
    return RoundHistory([point_of(row(n, "a")) for n in range(1, number + 1)], max_points=10)


def test_a_short_run_is_kept_whole() -> None:
    assert [point["round"] for point in history_of(15).points()] == [*range(1, 16)]


def test_a_long_run_is_thinned_from_its_start_and_its_newest_rounds_are_whole() -> None:
    for number in (50, 137, 1000):
        rounds = [point["round"] for point in history_of(number).points()]
        assert rounds[0] == 1
        assert rounds[-10:] == [*range(number - 9, number + 1)]
        assert len(rounds) <= 30
        gaps = [b - a for a, b in pairwise(rounds)]
        assert all(a >= b for a, b in pairwise(gaps)), "gaps shrink to 1"


def test_time_and_examples_are_those_of_all_rounds() -> None:
    last = history_of(137).points()[-1]
    assert last["time"] == 3.0 * 137
    assert last["examples_done"] == 6 * 137


def test_a_reader_gets_what_was_added_since() -> None:
    run = history_of(137)
    assert [point["round"] for point in run.since(134)] == [135, 136, 137]
    assert run.since(137) == []
    assert len(run.since(0)) < 30, "what is thinned out is gone"


def parts(number: int, *names: str) -> RoundParts:
    return parts_of(row(number, *names))


def test_many_devices_keep_fewer_rounds_each_and_the_newest_ones() -> None:
    devices = DeviceHistories(max_points=100)
    for number in range(1, 51):
        devices.add(parts(number, *"abcdefghij"))
        assert sum(len(devices.of(each)) for each in "abcdefghij") <= 100
    for name in "abcdefghij":
        kept = [point["round"] for point in devices.of(name)]
        assert kept == [*range(51 - len(kept), 51)]
        assert len(kept) >= 5
    assert devices.of("nobody") == []


def test_a_round_of_more_devices_than_are_kept_is_kept_alone() -> None:
    devices = DeviceHistories(max_points=3)
    for number in (1, 2):
        devices.add(parts(number, *"abcdefghij"))
    assert [point["round"] for point in devices.of("j")] == [2]


def test_a_single_device_keeps_its_last_rounds() -> None:
    devices = DeviceHistories()
    for number in range(1, 1001):
        devices.add(parts(number, "a"))
    assert [point["round"] for point in devices.of("a")] == [*range(1001 - MAX_DEVICE_POINTS, 1001)]


def test_a_device_that_takes_part_now_and_then_keeps_rounds_of_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "MAX_ROUNDS_OF_DEVICES", 20)
    devices = DeviceHistories(max_points=30)
    for number in range(1, 51):
        devices.add(parts(number, "ab"[number % 2]))
    assert [point["round"] for point in devices.of("a")] == [*range(32, 51, 2)]
