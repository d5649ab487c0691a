"""The summary of a run: idle time and the fullest device."""

from __future__ import annotations

from typing import Any

from headwater.simulation.reports.fleet_summary import (
    idle_line,
    idle_time,
    memory_line,
    peak_memory,
)


def row_of(*clients: tuple[int, float, str, str], number: int = 1) -> dict[str, Any]:
    keys = ("num_examples", "seconds", "plan", "reason")
    return {"round": number, "clients": [dict(zip(keys, one, strict=True)) for one in clients]}


MIXED = row_of(
    (40, 3.0, "speed-bound: 40 examples; in one micro-batch", "quota"),
    (20, 4.0, "speed-bound: 20 examples; in one micro-batch", "quota"),
    (9, 1.0, "all its 9 examples; micro-batch as set", "quota"),
    (5, 1.0, "all its 5 examples; in one micro-batch", "deadline"),
    (1, 7.0, "speed-bound: 1 example; in one micro-batch", "quota"),
    (3, 6.0, "link-bound: 3 examples; in one micro-batch", "quota"),
)


def test_idle_time_excludes_limited_devices_and_counts_them_separately() -> None:
    idle = idle_time(MIXED)
    assert idle.share == 1 - 3.5 / 4
    assert idle.share_of_all == 1 - (22 / 6) / 7
    assert (idle.num_free, idle.num_limited_by_data, idle.num_at_minimum) == (2, 2, 2)
    assert (idle.free_seconds, idle.minimum_seconds) == (4.0, 7.0)


def test_the_line_shows_the_last_finish_of_devices_at_the_minimum() -> None:
    assert idle_line([MIXED]) == (
        "12.5%, mean over rounds 1 to 1; in the last 2 devices finished by 4.00 s; not counted: "
        "2 limited by their own data, 2 at the minimum (the last of them after "
        "7.00 s); with them 47.6%"
    )


def test_a_device_with_k_set_to_one_example_is_not_at_the_minimum() -> None:
    plan = "K set to 1; micro-batch as set"
    idle = idle_time(row_of((1, 7.0, plan, "quota"), (1, 1.0, plan, "quota")))
    assert (idle.num_free, idle.share) == (2, 1 - 4 / 7)


def test_a_round_without_free_devices_has_no_idle_time() -> None:
    row = row_of((9, 1.0, "all its 9 examples", "quota"))
    assert idle_time(row).share is None
    assert idle_line([row]) == "no device whose quota the planner could raise or lower"


def test_a_round_without_clients_has_no_idle_time() -> None:
    assert idle_time(row_of()).share is None
    assert idle_time(row_of()).share_of_all == 0


def test_the_first_three_rounds_are_excluded_if_there_are_more() -> None:
    plan = "speed-bound: 2 examples"
    uneven = ((2, 1.0, plan, "quota"), (2, 9.0, plan, "quota"))
    even = ((2, 9.0, plan, "quota"), (2, 9.0, plan, "quota"))
    rows = [row_of(*(even if number > 3 else uneven), number=number) for number in range(1, 6)]
    assert idle_line(rows).startswith("0.0%, mean over rounds 4 to 5;")


def peaks(number: int, refused: dict[str, str], **peak_bytes: int) -> dict[str, Any]:
    clients = [{"name": name, "peak_bytes": peak} for name, peak in peak_bytes.items()]
    return {"round": number, "clients": clients, "refused": refused}


def test_the_fullest_device_has_the_highest_ratio_of_peak_to_limit_in_any_round() -> None:
    limits = {"a": 100 * 2**20, "b": 1000 * 2**20}
    rows = [peaks(1, {}, a=50 * 2**20, b=900 * 2**20), peaks(2, {}, a=80 * 2**20, b=10 * 2**20)]
    found = peak_memory(rows, limits.__getitem__)
    assert found is not None
    assert memory_line(found) == (
        "device b was the fullest, at 90% of 1.05 GB; 0 ever over the limit"
    )


def test_devices_over_their_limit_are_counted_and_named() -> None:
    rows = [peaks(1, {}, a=5, b=21), peaks(2, {"c": "OutOfMemory: c: none fits"}, a=5, b=3)]
    found = peak_memory(rows, lambda name: 20)
    assert found is not None
    assert found.over == {"b"}
    assert memory_line(found).endswith(
        "1 (b) ever over the limit; 1 (c) too small for a single example"
    )


def test_a_run_without_clients_has_no_fullest_device() -> None:
    assert peak_memory([peaks(1, {})], lambda name: 20) is None
