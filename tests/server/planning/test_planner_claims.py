"""Claims of clients are believed within bounds, and do no harm to other clients."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.common.estimates.linear_fit import Line
from headwater.server.planning import plan_reasons as reasons
from headwater.server.planning.device_estimates import MIN_TIME_SHARE
from headwater.server.planning.planner import MAX_SPEED_RATIO, TransferCosts
from tests.server.planning.planned import MIB, assign, device, plan, slowness

EXTREMES: list[dict[str, Any]] = [
    {"each": 1e9},
    {"each": 1e-9},
    {"base": 1e9, "each": 1e-9},
    {"each": 1e-3, "download_bytes_per_second": 5e-324},
    {"each": 1e-3, "share": 5e-324},
    {"num_examples": 2**40, "each": 1e9},
    {"each": 1e-3, "memory_limit_bytes": 1, "bytes_per_example": 5e-324},
    {"each": 1e-3, "memory_limit_bytes": 0, "base_bytes": 2**53, "bytes_per_example": 5e-324},
    {"each": 1e-3, "memory_limit_bytes": 2**53, "bytes_per_example": 5e-324},
    {"each": 1e-3, "memory_limit_bytes": 2**30, "bytes_per_example": 1e99},
    {"each": 1e-3, "fastest_micro_batch_size": 1},
]
LINKED = TransferCosts(image_bytes=10**6, update_bytes=10**6)


@pytest.mark.parametrize("claim", EXTREMES, ids=str)
def test_what_one_device_claims_does_not_change_the_quotas_of_the_others(
    claim: dict[str, Any],
) -> None:
    honest = [device(f"d{n}", 1000, each=1e-3) for n in range(4)]
    alone = assign(honest, plan(), target=404, costs=LINKED)
    assert {work.quota for work in alone.values()} == {101}
    liar = device("liar", **{"num_examples": 3, **claim})
    assigned = assign([*honest, liar], plan(), target=404, costs=LINKED)
    assert {assigned[one.name].quota for one in honest} <= {100, 101}


@pytest.mark.parametrize("claim", EXTREMES, ids=str)
@pytest.mark.parametrize("deadline", [1e-6, 1.0, 2592000.0])
def test_what_one_device_claims_does_not_break_a_round_with_a_deadline(
    claim: dict[str, Any], deadline: float
) -> None:
    honest = device("honest", 10, each=1e-8)
    liar = device("liar", **{"num_examples": 3, **claim})
    if slowness(liar, deadline_seconds=deadline, costs=LINKED):
        liar = liar._replace(exception="due")
    assigned = assign([honest, liar], plan(), target=512, deadline_seconds=deadline, costs=LINKED)
    assert assigned["honest"].quota == 10


@pytest.mark.parametrize("num_honest", [3, 7, 60])
def test_a_client_that_claims_to_be_instant_gets_a_bounded_multiple_of_the_median_s_quota(
    num_honest: int,
) -> None:
    honest = [device(f"d{n}", 10**6, each=1e-3) for n in range(num_honest)]
    liar = device("liar", 2**40, each=1e-9, memory_limit_bytes=2**53)
    target = 100 * (num_honest + int(MAX_SPEED_RATIO))
    assigned = assign([*honest, liar], plan(), target=target)
    assert assigned["liar"].quota == pytest.approx(100 * MAX_SPEED_RATIO, abs=1)
    assert {assigned[one.name].quota for one in honest} <= {100, 101}
    assert [one for one, work in assigned.items() if work.speed_cut > 1] == ["liar"]
    # It says 1 ns and is taken for 1 ms / 32.
    assert "said to be 31,250 times as fast as is believed" in reasons.of_plan(assigned["liar"])


def test_an_honest_fleet_sixteen_times_apart_in_speed_and_in_memory_is_believed() -> None:
    """Small models are bound by dispatch: there a large micro-batch is worth as much as speed."""
    small = {"memory_limit_bytes": MIB, "bytes_per_example": MIB}
    devices = [device(f"s{n}", 1000, base=0.016, each=1e-5, **small) for n in range(9)]
    devices += [device(f"l{n}", 1000, base=0.001, each=6e-7) for n in range(8)]
    assigned = assign(devices, plan(), target=5000)
    assert {work.max_micro_batch_size for work in assigned.values()} == {1, 256}
    assert not any(work.speed_cut > 1 for work in assigned.values())


@pytest.mark.parametrize(("base", "fastest"), [(0.0, None), (0.0, 1), (0.01, None), (0.001, 8)])
def test_a_claim_is_compared_with_a_median_client_of_the_same_micro_batch(
    base: float, fastest: int | None
) -> None:
    honest = [device(f"d{n}", 10**6, base=0.01, each=1e-3) for n in range(5)]
    liar = device("liar", 10**9, base=base, each=1e-9, fastest_micro_batch_size=fastest)
    work = assign([*honest, liar], plan(), target=30_000)["liar"]
    said, median = (
        Line(base=b, each=e).at(work.max_micro_batch_size) for b, e in ((base, 1e-9), (0.01, 1e-3))
    )
    assert work.speed_cut * said == pytest.approx(max(said, median / MAX_SPEED_RATIO))
    assert (work.speed_cut > 1) == (said < median / MAX_SPEED_RATIO)


def test_a_fleet_in_which_examples_take_no_time_is_planned_all_the_same() -> None:
    devices = [device(f"d{n}", 1000, base=0.01, each=1e-9) for n in range(3)]
    assigned = assign([*devices, device("unknown", 1000)], plan(), target=2000)
    assert sum(work.quota for work in assigned.values()) == 2000
    assert not any(work.speed_cut > 1 for work in assigned.values())


def test_liars_below_half_of_the_cohort_cannot_change_the_other_quotas() -> None:
    honest = [device(f"d{n}", 10**6, each=1e-3) for n in range(5)]
    liars = [device(f"l{n}", 10**6, each=1e9) for n in range(4)]
    assigned = assign([*honest, *liars], plan(), target=5004)
    assert {assigned[one.name].quota for one in honest} == {1000}
    assert {assigned[one.name].quota for one in liars} == {1}
    assert not any(work.speed_cut > 1 for work in assigned.values())


def test_a_device_that_gives_next_to_nothing_of_its_time_is_planned_for_the_least() -> None:
    assigned = assign([device(each=1e-3, share=5e-324)], plan(), target=1)
    assert assigned.time_share.tolist() == [MIN_TIME_SHARE]
