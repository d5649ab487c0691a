"""The planned finish of each client, and the clients that are too slow for the deadline."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import MAX_STEPS
from headwater.common.settings import schema as settings
from headwater.server.planning import plan_reasons as reasons
from headwater.server.planning.device_estimates import DEADLINE_SHARE
from headwater.server.planning.equal_finish import LINK_BOUND
from headwater.server.planning.planner import (
    MAX_FINISH_SECONDS,
    MIN_FINISH_SECONDS,
    TransferCosts,
)
from tests.server.planning.planned import (
    COSTS,
    ROWS,
    Candidate,
    assign,
    device,
    devices_of,
    here_after,
    plan,
    slowness,
)


@given(rows=ROWS, target=st.integers(1, 40_000), costs=COSTS)
def test_each_client_finishes_its_quota_when_its_plan_says(
    rows: list[dict[str, Any]], target: int, costs: TransferCosts
) -> None:
    """In the share of its time that it gives; who has no more examples may take until T."""
    assigned = assign(devices_of(rows), plan(), target=target, costs=costs)
    finish = assigned.finish_seconds(assigned.micro_batch_size).tolist()
    free = assigned.free_seconds.tolist()
    for work, found, free_seconds in zip(assigned.values(), finish, free, strict=True):
        line, size = work.estimate.line, work.micro_batch_size
        if line is None:
            assert math.isnan(found)
            continue
        ends = (math.ceil(work.quota / size) * line.base + work.quota * line.each) * work.speed_cut
        share = work.estimate.vitals.share
        is_full = work.quota in (
            work.estimate.num_examples,
            MAX_STEPS * work.max_micro_batch_size,
        )
        until = max(ends, share * free_seconds) if is_full else ends
        if MIN_FINISH_SECONDS <= until <= MAX_FINISH_SECONDS:
            assert found == pytest.approx(until, rel=1e-9)
        else:
            assert math.isnan(found)
        # No device is to go on behind T, but for the fewest examples that each gets.
        is_least = work.quota == 1 or work.transfers >= LINK_BOUND
        assert is_least or until <= share * free_seconds * (1 + 1e-5)


@pytest.mark.parametrize(
    ("one", "chosen"),
    [
        pytest.param(device(each=0.1), plan(accumulation_steps=20), id="K is set"),
        pytest.param(device(), plan(), id="its pace is not known"),
        pytest.param(device(each=1e-3), plan(), id="too soon to tell a pace by"),
        pytest.param(
            device(each=0.1)._replace(exception="waited for a turn"), plan(), id="asked anyway"
        ),
    ],
)
def test_a_plan_without_a_finish(one: Candidate, chosen: settings.PlanSettings) -> None:
    assigned = assign([one], chosen, target=90)
    assert np.isnan(assigned.finish_seconds(assigned.micro_batch_size)).all()


def test_the_reason_names_the_finish() -> None:
    assigned = assign([device(base=0.5, each=0.1, fastest_micro_batch_size=32)], plan(), target=90)
    (finish,) = assigned.finish_seconds(np.array([32])).tolist()
    assert finish == pytest.approx(3 * 0.5 + 90 * 0.1)
    said = "speed-bound: 90 examples until 10.5 s; fastest measured: 32"
    assert reasons.of_plan(assigned["pi"], finish_seconds=finish) == said


def test_a_quota_cut_evenly_takes_the_time_of_its_own_micro_batches() -> None:
    assigned = assign([device(base=0.5, each=0.1, fastest_micro_batch_size=90)], plan(), target=90)
    assert assigned.finish_seconds(assigned.micro_batch_size) == pytest.approx(0.5 + 9)
    assert assigned.finish_seconds(np.array([45])) == pytest.approx(2 * 0.5 + 9)


@given(rows=ROWS, deadline=st.floats(1e-3, 1e4), costs=COSTS)
def test_a_client_that_is_not_too_slow_ends_in_its_share_of_the_deadline(
    rows: list[dict[str, Any]], deadline: float, costs: TransferCosts
) -> None:
    costs = TransferCosts(image_bytes=costs.image_bytes, update_bytes=costs.update_bytes)
    devices = devices_of([{**row, "each": row["each"] or 1e-3} for row in rows])
    able = [one for one in devices if not slowness(one, deadline_seconds=deadline, costs=costs)]
    assigned = assign(able, plan(), target=512, deadline_seconds=deadline, costs=costs)
    for work in assigned.values():
        # A device that is not believed to be so fast may be thought too late with one example.
        if work.quota > 1 or work.speed_cut == 1:
            end = here_after(work, work.quota, costs)
            assert end <= deadline * DEADLINE_SHARE * (1 + 1e-9)


def test_with_a_deadline_no_more_than_the_target_is_gathered() -> None:
    devices = [device(name, 10_000, each=0.001) for name in ("a", "b")]
    assigned = assign(devices, plan(), target=900, deadline_seconds=100.0)
    assert [work.quota for work in assigned.values()] == [450, 450]


@pytest.mark.parametrize("deadline_share", [DEADLINE_SHARE, 0.3])
def test_a_client_that_cannot_finish_one_example_in_time_is_too_slow_by_that_factor(
    deadline_share: float,
) -> None:
    def found(seconds: float) -> str | None:
        one = device(each=seconds, deadline_share=deadline_share)
        why = slowness(one, deadline_seconds=10.0, costs=TransferCosts())
        return None if why is None else why.reason

    limit = 10 * deadline_share
    assert found(limit * 0.999) is None
    assert found(limit * 1.1) == f"one example takes {limit * 1.1:.1f} s of its {limit:.1f} s"


def test_transfers_turn_and_share_of_time_count_against_the_deadline() -> None:
    costs = TransferCosts(image_bytes=1000, update_bytes=1000, turn_seconds=1.0)
    one = device(each=1.0, share=0.25, download_bytes_per_second=500, upload_bytes_per_second=1000)
    # 2 s down, 1 / 0.25 s of work, 1 s up and 1 s of its turn are 8 s.
    assert slowness(one, deadline_seconds=8.9, costs=costs) is None
    found = slowness(one, deadline_seconds=8.8, costs=costs)
    assert found is not None
    assert found.factor == 8.0 / (8.8 * DEADLINE_SHARE)


def test_without_a_deadline_or_a_known_speed_no_client_is_too_slow() -> None:
    assert slowness(device(each=1e9), deadline_seconds=None, costs=TransferCosts()) is None
    assert slowness(device(each=None), deadline_seconds=1e-6, costs=TransferCosts()) is None


def test_an_exception_is_assigned_one_example() -> None:
    slow = device("slow", each=60.0)._replace(exception="one example, though it is slow")
    assigned = assign(
        [device("fast", 1000, each=0.001), slow], plan(), target=100, deadline_seconds=10.0
    )
    assert [work.quota for work in assigned.values()] == [99, 1]
    assert reasons.of_plan(assigned["slow"]) == "one example, though it is slow; in one micro-batch"
