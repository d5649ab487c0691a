"""Quotas: bounded, sufficient, and by speed, transfers, turns and the examples owned."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import MAX_STEPS, Plan
from headwater.server.planning import plan_reasons as reasons
from headwater.server.planning.device_estimates import EstimateColumns
from headwater.server.planning.equal_finish import LEAST_GAIN, LINK_BOUND, MORE_TIME
from headwater.server.planning.memory_limit import SizeBound
from headwater.server.planning.planner import (
    MAX_FINISH_SECONDS,
    Assignment,
    TransferCosts,
)
from tests.server.planning.planned import COSTS, ROWS, assign, device, devices_of, here_after, plan


@given(rows=ROWS, target=st.integers(1, 40_000), size=st.none() | st.integers(1, 300), costs=COSTS)
def test_every_quota_is_within_its_bounds(
    rows: list[dict[str, Any]], target: int, size: int | None, costs: TransferCosts
) -> None:
    devices = devices_of(rows)
    chosen = plan(micro_batch_size=size)
    assigned = assign(devices, chosen, target=target, costs=costs)
    assert list(assigned) == [one.name for one in devices]
    for one in devices:
        work = assigned[one.name]
        assert 1 <= work.quota <= one.estimate.num_examples
        assert 1 <= work.micro_batch_size <= work.quota
        assert work.micro_batch_size <= (size or chosen.max_micro_batch_size)
        assert math.ceil(work.quota / work.micro_batch_size) <= MAX_STEPS
        fastest = one.estimate.fastest_micro_batch_size
        assert size or fastest is None or work.micro_batch_size <= fastest


@given(rows=ROWS, target=st.integers(1, 40_000), costs=COSTS)
def test_the_quotas_sum_to_the_target_or_take_all_there_is(
    rows: list[dict[str, Any]], target: int, costs: TransferCosts
) -> None:
    assigned = assign(devices_of(rows), plan(), target=target, costs=costs).values()
    there_is = sum(
        min(work.estimate.num_examples, MAX_STEPS * work.max_micro_batch_size) for work in assigned
    )
    total = sum(work.quota for work in assigned)
    assert total == min(max(target, len(rows)), there_is)


@given(rows=ROWS, target=st.integers(1, 40_000), costs=COSTS)
def test_no_device_is_done_early_that_could_have_taken_another_example(
    rows: list[dict[str, Any]], target: int, costs: TransferCosts
) -> None:
    """Up to an even share: what is beyond it may be another's, who must be waited for anyway.

    Equal finish, with shares of time and transfers; turns have their own test.
    """
    costs = TransferCosts(image_bytes=costs.image_bytes, update_bytes=costs.update_bytes)
    devices = devices_of([{**row, "each": row["each"] or 1e-3} for row in rows])
    assigned = assign(devices, plan(), target=target, costs=costs).values()
    free = [a for a in assigned if a.quota > 1 and a.transfers < LINK_BOUND]
    last = max((here_after(a, a.quota, costs) for a in free), default=0.0)
    even = sum(work.quota for work in assigned) / len(assigned)
    gain = max(math.ceil(LEAST_GAIN * even), 1)
    for work in assigned:
        most = min(work.estimate.num_examples, MAX_STEPS * work.max_micro_batch_size)
        if work.quota + gain <= min(most, even):
            # T is known to a millionth, and small shares may have made it longer.
            here = here_after(work, work.quota + gain, costs)
            assert here >= last / (1 + MORE_TIME) * (1 - 4e-6)


def test_a_device_twice_as_fast_gets_twice_the_quota() -> None:
    devices = [device("slow", 10_000, each=0.002), device("fast", 10_000, each=0.001)]
    assigned = assign(devices, plan(), target=900)
    assert (assigned["slow"].quota, assigned["fast"].quota) == (300, 600)


def test_a_client_that_gives_half_of_its_time_gets_half_the_quota_with_that_reason() -> None:
    devices = [
        device("whole", 10_000, each=0.001),
        device("half", 10_000, each=0.001, share=0.5, is_on_battery=True),
    ]
    assigned = assign(devices, plan(), target=900)
    assert [work.quota for work in assigned.values()] == [600, 300]
    assert assigned.time_share.tolist() == [1.0, 0.5]
    assert "300 examples, giving 50% of its time on battery;" in reasons.of_plan(assigned["half"])


def test_a_device_with_a_slow_link_gets_less_by_what_its_transfers_take() -> None:
    costs = TransferCosts(image_bytes=1000, update_bytes=500)
    devices = [
        device("near", 10_000, each=0.001),
        device("far", 10_000, each=0.001, download_bytes_per_second=10_000,
               upload_bytes_per_second=5_000),
    ]  # fmt: skip
    assigned = assign(devices, plan(), target=1000, costs=costs)
    # 0.1 s down and 0.1 s up are 200 examples, and a third of 0.6 s.
    assert [work.quota for work in assigned.values()] == [600, 400]
    assert "400 examples, its transfers 33% of the round;" in reasons.of_plan(assigned["far"])
    assert "transfers" not in reasons.of_plan(assigned["near"])


@pytest.mark.parametrize(
    ("rate", "quota"),
    [
        pytest.param(10_000, 50, id="a quarter of 0.2 s"),
        pytest.param(1000, 250, id="a quarter of 2 s, and no more than an equal share"),
        pytest.param(1e-6, 250, id="a claim that nobody can wait for wins no more"),
    ],
)
def test_a_device_whose_transfers_outlast_the_others_trains_for_a_quarter_of_their_time(
    rate: float, quota: int
) -> None:
    far = device("far", 1000, each=0.001, upload_bytes_per_second=rate)
    near = device("near", 1000, each=1e-6)
    costs = TransferCosts(update_bytes=2000)
    assigned = assign([near, far], plan(), target=501, costs=costs)
    assert [work.quota for work in assigned.values()] == [501 - quota, quota]
    said = f"link-bound: {quota} examples; in one micro-batch"
    assert reasons.of_plan(assigned["far"]) == said


def test_a_slow_link_leaves_no_more_examples_than_the_deadline_allows() -> None:
    far = device("far", 1000, each=0.001, upload_bytes_per_second=1000)
    assigned = assign([device("near", 1000, each=0.001), far], plan(), target=501,
                      deadline_seconds=2.25, costs=TransferCosts(update_bytes=2000))  # fmt: skip
    assert [work.quota for work in assigned.values()] == [476, 25]  # 0.9 x 2.25 s - 2 s


def test_uploads_come_one_turn_after_another_the_slowest_last() -> None:
    """Four devices alike in pace but for the last, turns of 10 ms: ten examples apart."""
    devices = [device(name, 10_000, each=0.001) for name in "abc"]
    devices.append(device("slow", 10_000, each=0.002))
    assigned = assign(devices, plan(), target=4000, costs=TransferCosts(turn_seconds=0.01))
    quotas = {name: work.quota for name, work in assigned.items()}
    ends = {name: quotas[name] * (0.002 if name == "slow" else 0.001) for name in quotas}
    ordered = [ends[name] for name in ("slow", "a", "b", "c")]
    for later, earlier in pairwise(ordered):
        assert later - earlier == pytest.approx(0.01, abs=0.002)
    assert sum(quotas.values()) == 4000


def test_a_turn_long_before_the_end_is_a_reason() -> None:
    devices = [device(str(n), 10_000, each=0.001) for n in range(10)]
    assigned = assign(devices, plan(), target=1000, costs=TransferCosts(turn_seconds=0.005))
    # T - 5.5 turns of 5 ms on the average are 100 ms: T is 127.5 ms, and ten turns 39 % of it.
    assert "speed-bound: 78 examples, its turn 39% before the end" in reasons.of_plan(assigned["9"])
    assert "turn" not in reasons.of_plan(assigned["0"])


def test_a_set_k_is_the_same_for_all_but_those_that_own_fewer_examples() -> None:
    devices = [device("rich", 1000), device("poor", 5)]
    assigned = assign(devices, plan(accumulation_steps=3, micro_batch_size=4), target=512)
    assert [(a.quota, a.micro_batch_size) for a in assigned.values()] == [(12, 4), (5, 4)]
    assert np.isnan(assigned.time_share).all()
    assert [reasons.of_plan(work) for work in assigned.values()] == [
        "K set to 3; micro-batch as set",
        "K set to 3, all its 5 examples; micro-batch as set",
    ]


def test_devices_with_few_examples_give_them_all_and_others_the_rest() -> None:
    twins = [device(name, 30, each=1e-3) for name in ("a", "b")]
    assigned = assign([*twins, device("c", 1000, each=1e-3)], plan(), target=300)
    assert [work.quota for work in assigned.values()] == [30, 30, 240]
    assert reasons.of_plan(assigned["a"]) == "all its 30 examples; in one micro-batch"


def test_a_client_of_unknown_speed_is_planned_as_the_median() -> None:
    devices = [device(str(n), 10_000, each=each) for n, each in enumerate((1e-3, 2e-3, 4e-3))]
    assigned = assign([*devices, device("unknown", 10_000)], plan(), target=4500)
    assert assigned["unknown"].quota == assigned["1"].quota


@pytest.mark.slow
def test_a_hundred_thousand_devices_are_planned_to_the_target() -> None:
    devices = [
        device(
            str(n),
            1 + n % 977,
            each=1e-3 * (1 + n % 13),
            share=0.5 if n % 5 == 0 else 1.0,
            upload_bytes_per_second=1e5 * (1 + n % 7),
        )
        for n in range(100_000)
    ]
    costs = TransferCosts(image_bytes=10**5, update_bytes=10**5, turn_seconds=1e-4)
    assigned = assign(devices, plan(), target=2_000_000, costs=costs)
    assert sum(work.quota for work in assigned.values()) == 2_000_000


def test_the_longest_reason_fits_into_a_plan() -> None:
    """All that can be said of one device at once, with the longest numbers."""
    one = device(
        num_examples=2**40, each=1.0, share=0.25, is_on_battery=True, memory_limit_bytes=2**53
    )
    work = Assignment(
        known=EstimateColumns.of([one.estimate]),
        row=0,
        quota=2**40 - 1,
        max_micro_batch_size=2**31,
        size_bound=SizeBound.MEMORY,
        speed_cut=1e30,
        ahead=0.5,
        transfers=0.79,
    )
    most = Plan.model_fields["reason"].metadata[0].max_length
    shown = reasons.of_plan(work, finish_seconds=MAX_FINISH_SECONDS)
    assert len(shown) + len(", cut to 2147483648 each to tell the noise") <= most
    for part in ("over a million", "on battery", "transfers", "turn", "memory-bound"):
        assert part in shown
