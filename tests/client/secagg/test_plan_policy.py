"""The device's own policy: repeated plans, and when a masked plan is answered."""

from __future__ import annotations

import pytest

from headwater.client.secagg.plan_policy import PlanRepeats, schedule_seconds
from headwater.client.training.sampler import SamplerPosition, SamplerState
from tests.masked import plan

PENDING = SamplerState().pend(1, SamplerPosition(offset=8))
BEHIND = SamplerState(place=SamplerPosition(offset=8))


@pytest.mark.parametrize(
    ("model", "counted", "count", "expected"),
    [
        ("same", None, 1, (2, PENDING)),
        ("same", None, 3, (1, BEHIND)),
        ("another", None, 1, (1, BEHIND)),
        ("another", 1, 1, (1, PENDING)),  # the round counted, and moves the place itself
    ],
)
def test_a_plan_repeats_a_window_only_with_its_model_and_not_forever(
    model: str, counted: int | None, count: int, expected: tuple[int, SamplerState]
) -> None:
    before = PlanRepeats(model="same", count=count)
    found, sampler = before.follow(plan(2, counted_round=counted), PENDING, model=model, most=3)
    assert (found.count, sampler) == expected
    assert found.model == model


def test_a_masked_plan_is_answered_at_its_finish_time_or_at_the_pace_of_the_last_windows() -> None:
    assert schedule_seconds(plan(finish_seconds=5.0), 1.0) == 5.0
    assert schedule_seconds(plan(quota=8), 2.0) == 16.0
    assert schedule_seconds(plan(quota=8), None) == 0.0
    assert schedule_seconds(plan(quota=8, deadline_seconds=4.0), 2.0) == 4.0
