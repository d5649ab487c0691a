from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import settings
from common.update import DeviceReport, Step
from server.pace import LARGEST_CHANGE, LONGEST_SECONDS, WEIGHT, Pace, at_pace, followed, told
from server.planner import assign

PACE = Pace(per_micro_batch=0.5, per_example=0.25)


def steps(pace: Pace, sizes: list[int], *, slower: float = 1.0) -> list[Step]:
    """Return the steps of a device that is ``slower`` times as slow as its pace says."""
    return [
        Step(
            num_examples=size,
            weight=size,
            loss=0.0,
            gradient_norm=0.0,
            seconds=pace.seconds(size) * slower,
            peak_bytes=0,
        )
        for size in sizes
    ]


@given(sizes=st.lists(st.integers(1, 64), max_size=8))
def test_a_device_that_keeps_its_pace_keeps_its_line(sizes: list[int]) -> None:
    found = followed(PACE, steps(PACE, sizes))
    assert math.isclose(found.per_micro_batch, PACE.per_micro_batch)
    assert math.isclose(found.per_example, PACE.per_example)


@pytest.mark.parametrize("slower", [5.0, 0.2])
def test_a_change_is_followed_within_two_rounds(slower: float) -> None:
    pace = PACE
    for _ in range(2):
        pace = followed(pace, steps(PACE, [8, 8, 3], slower=slower))
    left = abs(math.log(pace.per_example / PACE.per_example) - math.log(slower))
    assert left <= (1 - WEIGHT) ** 2 * abs(math.log(slower)) * (1 + 1e-9)


def test_one_slow_micro_batch_moves_nothing() -> None:
    usual = steps(PACE, [4, 4, 4, 4])
    odd = steps(PACE, [4], slower=100.0)
    assert math.isclose(followed(PACE, [*usual, *odd]).per_example, PACE.per_example)


@pytest.mark.parametrize("seconds", [0.0, 1e100])
def test_a_claim_beyond_reason_is_bounded(seconds: float) -> None:
    step = steps(PACE, [4])[0].model_copy(update={"seconds": seconds})
    pace = PACE
    for _ in range(1000):
        pace = followed(pace, [step])
        assert 0 <= pace.per_example <= LONGEST_SECONDS
    once = followed(PACE, [step]).per_example / PACE.per_example
    assert LARGEST_CHANGE**-WEIGHT * 0.999 <= once <= LARGEST_CHANGE**WEIGHT * 1.001


def test_a_device_that_was_not_asked_has_no_pace() -> None:
    assert told(DeviceReport(name="a", num_examples=1, layout_digest="")) is None


def test_quotas_follow_a_device_that_slows_down_five_times_within_two_rounds() -> None:
    """All finish together again: the slow one within one micro-batch and 7 % of the others."""
    names = [str(number) for number in range(6)]
    reports = {
        name: DeviceReport(
            name=name,
            num_examples=10_000,
            layout_digest="",
            seconds_per_micro_batch=0.01,
            seconds_per_example=0.01,
        )
        for name in names
    }
    plan = settings.Plan(micro_batch_size=8, effective_batch_size=3000)
    true = {name: told(report) for name, report in reports.items()}
    paces = dict(true)
    quick = paces["0"]
    assert quick is not None
    true["0"] = Pace(per_micro_batch=0.05, per_example=0.05)
    for round_number in range(3):
        known = [at_pace(reports[name], pace) for name, pace in paces.items() if pace is not None]
        assignments = assign(known, plan, deadline_seconds=None)
        finish = {}
        for name, assigned in assignments.items():
            pace = true[name]
            assert pace is not None
            whole, rest = divmod(assigned.quota, 8)
            sizes = [8] * whole + [rest] * (rest > 0)
            finish[name] = sum(pace.seconds(size) for size in sizes)
            before = paces[name]
            assert before is not None
            paces[name] = followed(before, steps(pace, sizes))
        if round_number == 0:
            assert finish["0"] > 4 * finish["1"]
    slow = true["0"]
    assert slow is not None
    within = 5 ** ((1 - WEIGHT) ** 2) - 1
    assert finish["0"] <= finish["1"] * (1 + within) + slow.seconds(8)
