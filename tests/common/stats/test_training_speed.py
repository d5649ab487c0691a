from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import DeviceReport, Step
from headwater.common.settings import schema as settings
from headwater.common.stats.linear_fit import Line
from headwater.common.stats.training_speed import (
    LARGEST_BEND,
    LARGEST_CHANGE,
    LEAST_SECONDS,
    LONGEST_SECONDS,
    OUTLYING,
    WEIGHT,
    followed,
    told,
)
from headwater.server.planning.device_estimates import Learned
from headwater.server.planning.planner import Device, assign

PACE = Line(base=0.5, each=0.25)


def steps(pace: Line, sizes: list[int], *, slower: float = 1.0) -> list[Step]:
    """Return the steps of a device that is ``slower`` times as slow as its pace says."""
    return [step(size, pace.at(size) * slower) for size in sizes]


def step(size: int, seconds: float) -> Step:
    return Step(
        num_examples=size, weight=size, loss=0.0, gradient_norm=0.0, seconds=seconds, peak_bytes=0
    )


@given(sizes=st.lists(st.integers(1, 64), max_size=8))
def test_a_device_that_keeps_its_pace_keeps_its_line(sizes: list[int]) -> None:
    found = followed(PACE, steps(PACE, sizes))
    # A fit of three points and more in float64, of which the base is a small difference.
    assert math.isclose(found.base, PACE.base, rel_tol=1e-9)
    assert math.isclose(found.each, PACE.each, rel_tol=1e-9)


@pytest.mark.parametrize("slower", [5.0, 0.2])
def test_a_change_is_followed_within_two_rounds(slower: float) -> None:
    pace = PACE
    for _ in range(2):
        pace = followed(pace, steps(PACE, [8, 8, 3], slower=slower))
    for size in (1, 3, 8, 64):
        left = abs(math.log(pace.at(size) / PACE.at(size)) - math.log(slower))
        assert left <= (1 - WEIGHT) ** 2 * abs(math.log(slower)) * (1 + 1e-9)


def test_sizes_that_say_another_slope_bend_the_line() -> None:
    """What was told at joining came from small micro-batches; large ones take their own time."""
    true, sizes = Line(base=0.1, each=0.3), [4, 4, 16, 16, 64]
    pace, gaps = PACE, []
    for _ in range(60):
        pace = followed(pace, steps(true, sizes))
        gaps.append(max(abs(math.log(pace.at(size) / true.at(size))) for size in sizes))
    assert all(later < earlier for earlier, later in pairwise(gaps))
    assert gaps[-1] < 0.05

    def window(line: Line) -> float:
        return sum(line.at(size) for size in sizes)

    assert math.isclose(window(pace), window(true), rel_tol=0.05)


def test_one_slow_micro_batch_moves_little() -> None:
    usual = steps(PACE, [4, 4, 4, 4])
    odd = steps(PACE, [4], slower=100.0)
    most = (1 + (OUTLYING - 1) / 5) ** WEIGHT
    assert math.isclose(followed(PACE, [*usual, *odd]).at(4), most * PACE.at(4))


def test_what_is_seen_as_a_whole_counts_however_it_is_spread_over_the_round() -> None:
    seen = [step(4, PACE.at(4) * (1.05 if at < 4 else 0.95)) for at in range(16)]
    assert math.isclose(followed(PACE, seen).at(4), 0.975**WEIGHT * PACE.at(4))


def test_a_device_that_pauses_now_and_then_counts_with_its_pauses() -> None:
    """A cgroup with a fifth of a core runs at full speed until the share of a period is used up."""
    pause = 4 * 10 * PACE.at(1)
    seen = [step(1, PACE.at(1) + (pause if at % 10 == 9 else 0.0)) for at in range(160)]
    found = followed(PACE, seen)
    true = 160 * PACE.at(1) + 16 * pause
    left = math.log(true / (160 * found.at(1)))
    assert left <= (1 - WEIGHT) * math.log(5) * (1 + 1e-9)


def test_one_slow_micro_batch_of_a_size_of_its_own_bends_no_farther_than_its_bound() -> None:
    """The short last one of a window, in which something else happened."""
    usual, odd = steps(PACE, [8] * 6), steps(PACE, [3], slower=100.0)
    found = followed(PACE, [*usual, *odd])
    assert PACE.at(8) <= found.at(8) <= LARGEST_BEND * PACE.at(8)
    assert PACE.at(3) <= found.at(3) <= LARGEST_BEND * PACE.at(3)


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e100])
@pytest.mark.parametrize("sizes", [[4], [4, 9]])
def test_a_claim_beyond_reason_is_bounded(seconds: float, sizes: list[int]) -> None:
    absurd = [step(size, seconds) for size in sizes]
    once = followed(PACE, absurd).at(4) / PACE.at(4)
    most = LARGEST_CHANGE**WEIGHT * LARGEST_BEND * 1.001
    assert 1 / most <= once <= most
    pace = PACE
    for _ in range(1000):
        pace = followed(pace, absurd)
        assert 0 <= pace.base <= LONGEST_SECONDS
        assert LEAST_SECONDS <= pace.each <= LONGEST_SECONDS


@given(st.lists(st.tuples(st.integers(0, 2**53), st.floats(0, 1e100)), max_size=6))
def test_whatever_the_steps_claim_the_line_stays_one(claims: list[tuple[int, float]]) -> None:
    pace = PACE
    for _ in range(3):
        pace = followed(pace, [step(size, seconds) for size, seconds in claims])
    assert 0 <= pace.base <= LONGEST_SECONDS
    assert LEAST_SECONDS <= pace.each <= LONGEST_SECONDS


def test_a_device_that_was_not_asked_has_no_pace() -> None:
    assert told(DeviceReport(name="a", num_examples=1, layout_digest="")) is None


def test_quotas_follow_a_device_that_slows_down_five_times_within_two_rounds() -> None:
    """All finish together again: the slow one within one micro-batch and 7 % of the others."""
    plan = settings.PlanSettings(micro_batch_size=8)
    true = {str(number): Line(base=0.01, each=0.01) for number in range(6)}
    believed = dict(true)
    true["0"] = true["0"].times(5)
    finish: dict[str, float] = {}
    for round_number in range(3):
        devices = [
            Device(name=name, num_examples=10_000, learned=Learned(line=line))
            for name, line in believed.items()
        ]
        for name, assigned in assign(devices, plan, target=3000).items():
            whole, rest = divmod(assigned.quota, 8)
            sizes = [8] * whole + [rest] * (rest > 0)
            finish[name] = sum(true[name].at(size) for size in sizes)
            believed[name] = followed(believed[name], steps(true[name], sizes))
        if round_number == 0:
            assert finish["0"] > 4 * finish["1"]
    within = 5 ** ((1 - WEIGHT) ** 2) - 1
    assert finish["0"] <= finish["1"] * (1 + within) + true["0"].at(8)
