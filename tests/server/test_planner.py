"""Quotas and micro-batches: bounded, enough, and finished together."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from common import settings
from common.update import DeviceReport
from server.planner import (
    DEADLINE_SHARE,
    MOST_STEPS,
    Assignment,
    assign,
    equal_finish,
    micro_batch_size,
)

MIB = 2**20


def report(name: str = "pi", num_examples: int = 100, **changes: Any) -> DeviceReport:
    return DeviceReport.model_validate(
        {"name": name, "num_examples": num_examples, "layout_digest": "same", **changes}
    )


def plan(**changes: Any) -> settings.Plan:
    return settings.Plan.model_validate(changes)


SECONDS = st.floats(1e-6, 1e3)
DEVICES = st.lists(
    st.fixed_dictionaries(
        {
            "num_examples": st.integers(1, 5000),
            "seconds_per_micro_batch": st.just(0.0) | SECONDS,
            "seconds_per_example": st.none() | SECONDS,
            "overhead_seconds": st.just(0.0) | SECONDS,
            "memory_limit_bytes": st.none() | st.integers(1, 4096 * MIB),
            "base_bytes": st.none() | st.integers(0, 300 * MIB),
            "bytes_per_example": st.none() | st.floats(0, 64 * MIB),
        }
    ),
    min_size=1,
    max_size=12,
)


def reports_of(rows: list[dict[str, Any]]) -> list[DeviceReport]:
    return [report(f"d{at}", **row) for at, row in enumerate(rows)]


def finish(device: DeviceReport, quota: int, size: int) -> float:
    """Return overhead + ceil(q / m) a + q b."""
    a = device.seconds_per_micro_batch or 0.0
    b = device.seconds_per_example or 1e-3
    return device.overhead_seconds + math.ceil(quota / size) * a + quota * b


@given(DEVICES, st.integers(1, 40_000), st.none() | st.integers(1, 300))
@hypothesis_settings(deadline=None, max_examples=50)
def test_every_quota_is_within_its_bounds(
    rows: list[dict[str, Any]], target: int, size: int | None
) -> None:
    devices = reports_of(rows)
    chosen = plan(effective_batch_size=target, micro_batch_size=size)
    assigned = assign(devices, chosen, deadline_seconds=None)
    assert assigned.keys() == {device.name for device in devices}
    for device in devices:
        told = assigned[device.name]
        assert 1 <= told.quota <= device.num_examples
        assert 1 <= told.micro_batch_size <= told.quota
        assert told.micro_batch_size <= (size or chosen.max_micro_batch_size)


@given(DEVICES, st.integers(1, 40_000))
@hypothesis_settings(deadline=None, max_examples=50)
def test_the_quotas_reach_the_target_or_take_all_there_is(
    rows: list[dict[str, Any]], target: int
) -> None:
    devices = reports_of(rows)
    chosen = plan(effective_batch_size=target)
    assigned = assign(devices, chosen, deadline_seconds=None)
    total = sum(told.quota for told in assigned.values())
    most = [MOST_STEPS * micro_batch_size(device, chosen)[0] for device in devices]
    there_is = sum(min(d.num_examples, m) for d, m in zip(devices, most, strict=True))
    assert total >= min(target, there_is)


@given(DEVICES, st.integers(1, 40_000))
@hypothesis_settings(deadline=None, max_examples=50)
def test_no_device_finishes_after_one_that_could_have_taken_another_example(
    rows: list[dict[str, Any]], target: int
) -> None:
    """Equal finish: only its first example, or a rounding, may keep a device longer."""
    devices = reports_of(rows)
    chosen = plan(effective_batch_size=target)
    sizes = {device.name: micro_batch_size(device, chosen)[0] for device in devices}
    quotas = equal_finish(devices, sizes, target=target, finish_seconds=None)
    by_name = {device.name: device for device in devices}
    ends = {n: finish(by_name[n], q, sizes[n]) for n, q in quotas.items()}
    last = max((end for n, end in ends.items() if quotas[n] > 1), default=0.0)
    for name, device in by_name.items():
        if quotas[name] < min(device.num_examples, MOST_STEPS * sizes[name]):
            assert finish(device, quotas[name] + 1, sizes[name]) >= last * (1 - 1e-9)


@given(DEVICES, st.floats(1e-3, 1e4))
@hypothesis_settings(deadline=None, max_examples=50)
def test_with_a_deadline_every_device_finishes_in_its_share_of_it(
    rows: list[dict[str, Any]], deadline: float
) -> None:
    devices = reports_of(rows)
    chosen = plan()
    assigned = assign(devices, chosen, deadline_seconds=deadline)
    for device in devices:
        size, _ = micro_batch_size(device, chosen)
        if device.name in assigned:
            end = finish(device, assigned[device.name].quota, size)
            assert end <= deadline * DEADLINE_SHARE * (1 + 1e-9)
        else:
            assert finish(device, 1, size) >= deadline * DEADLINE_SHARE * (1 - 1e-9)


def test_with_a_deadline_no_more_than_the_target_is_gathered() -> None:
    devices = [report(name, 10_000, seconds_per_example=0.001) for name in ("a", "b")]
    assigned = assign(devices, plan(effective_batch_size=900), deadline_seconds=100.0)
    assert [told.quota for told in assigned.values()] == [450, 450]


def test_a_device_twice_as_fast_gets_twice_the_quota() -> None:
    devices = [
        report("slow", 10_000, seconds_per_example=0.002),
        report("fast", 10_000, seconds_per_example=0.001),
    ]
    chosen = plan(effective_batch_size=900)
    assigned = assign(devices, chosen, deadline_seconds=None)
    assert (assigned["slow"].quota, assigned["fast"].quota) == (300, 600)


def test_a_set_k_is_the_same_for_all_and_never_more_than_they_have() -> None:
    devices = [report("rich", 1000), report("poor", 5)]
    assigned = assign(
        devices, plan(accumulation_steps=3, micro_batch_size=4), deadline_seconds=None
    )
    reason = "K set to 3; micro-batch as set"
    assert assigned == {
        "rich": Assignment(quota=12, micro_batch_size=4, reason=reason),
        "poor": Assignment(quota=5, micro_batch_size=4, reason=reason),
    }


@pytest.mark.parametrize(("limit_mib", "fitting"), [(200, 6), (110, 1), (100, 1), (1, 1)])
def test_memory_bounds_the_micro_batch_and_says_so(limit_mib: int, fitting: int) -> None:
    # base + m x slope <= 0.8 x limit; one example is asked for in any case.
    device = report(
        memory_limit_bytes=limit_mib * MIB, base_bytes=100 * MIB, bytes_per_example=10 * MIB
    )
    size, reason = micro_batch_size(device, plan())
    assert size == fitting == max((limit_mib * 8 // 10 - 100) // 10, 1)
    assert reason.startswith(f"memory-bound: {fitting} example")
    assert f"in {limit_mib} MiB" in reason


@given(st.integers(1, 4096 * MIB), st.integers(0, 512 * MIB), st.floats(1, 64 * MIB))
def test_what_is_planned_fits_the_memory_unless_it_is_one_example(
    limit: int, base: int, slope: float
) -> None:
    device = report(
        num_examples=10_000, memory_limit_bytes=limit, base_bytes=base, bytes_per_example=slope
    )
    size, _ = micro_batch_size(device, plan(max_micro_batch_size=10_000))
    assert size == 1 or base + size * slope <= 0.8 * limit * (1 + 1e-12)


def test_without_a_limit_the_micro_batch_is_the_maximum() -> None:
    assert micro_batch_size(report(num_examples=999), plan()) == (
        256,
        "micro-batch at its maximum",
    )


def test_what_fits_in_one_micro_batch_is_not_accumulated() -> None:
    assigned = assign([report(num_examples=40)], plan(), deadline_seconds=None)["pi"]
    assert (assigned.quota, assigned.micro_batch_size) == (40, 40)
    assert assigned.reason == "all its 40 examples; all its examples fit in one micro-batch"


def test_a_deadline_leaves_out_who_cannot_finish_one_example() -> None:
    devices = [
        report("fast", seconds_per_example=0.01),
        report("far", seconds_per_example=0.01, overhead_seconds=60.0),
    ]
    assert assign(devices, plan(), deadline_seconds=10.0).keys() == {"fast"}


def test_a_hundred_thousand_devices_are_planned_to_the_target() -> None:
    devices = [
        report(str(n), 1 + n % 977, seconds_per_example=1e-3 * (1 + n % 13), overhead_seconds=n % 7)
        for n in range(100_000)
    ]
    assigned = assign(devices, plan(effective_batch_size=2_000_000), deadline_seconds=None)
    assert len(assigned) == 100_000
    assert sum(told.quota for told in assigned.values()) >= 2_000_000


EXTREMES: list[dict[str, Any]] = [
    {"seconds_per_example": 1e9},
    {"seconds_per_example": 5e-324},
    {"seconds_per_micro_batch": 1e9},
    {"overhead_seconds": 1e9},
    {"num_examples": 2**40, "seconds_per_example": 1e9},
    {"memory_limit_bytes": 1, "bytes_per_example": 5e-324},
    {"memory_limit_bytes": 0, "base_bytes": 2**53, "bytes_per_example": 5e-324},
    {"bytes_per_example": 1e99},
]


@pytest.mark.parametrize("claim", EXTREMES, ids=str)
def test_what_one_device_claims_does_not_change_the_quotas_of_the_others(
    claim: dict[str, Any],
) -> None:
    honest = [report(f"d{n}", 1000, seconds_per_example=1e-3) for n in range(4)]
    asked = plan(effective_batch_size=404)
    alone = assign(honest, asked, deadline_seconds=None)
    assert {told.quota for told in alone.values()} == {101}
    assigned = assign(
        [*honest, report("liar", **{"num_examples": 3, **claim})], asked, deadline_seconds=None
    )
    assert {assigned[device.name].quota for device in honest} <= {100, 101}


@pytest.mark.parametrize("claim", EXTREMES, ids=str)
@pytest.mark.parametrize("deadline", [1e-6, 1.0, 2592000.0])
def test_what_one_device_claims_does_not_break_a_round_with_a_deadline(
    claim: dict[str, Any], deadline: float
) -> None:
    honest = report("honest", 10, seconds_per_example=1e-8)
    assigned = assign(
        [honest, report("liar", **{"num_examples": 3, **claim})], plan(), deadline_seconds=deadline
    )
    assert assigned["honest"].quota == 10
