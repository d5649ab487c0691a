"""The training speed follows a device's measurements, within bounds."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.estimates.linear_fit import Line
from headwater.common.estimates.training_speed import (
    MAX_BEND,
    MAX_CHANGE,
    MAX_DEVIATION,
    MAX_SECONDS,
    MIN_SECONDS_PER_EXAMPLE,
    UPDATE_EXPONENT,
    reported_line,
    updated_line,
)
from headwater.common.messages import DeviceReport, Step, UpdateReport
from headwater.common.settings import schema as settings
from headwater.server.planning.device_estimates import DeviceEstimate, EstimateColumns
from headwater.server.planning.planner import assign

LINE = Line(base=0.5, each=0.25)


def steps(line: Line, sizes: list[int], *, slower: float = 1.0) -> list[tuple[float, float]]:
    """Return the steps of a device that is ``slower`` times as slow as the line says."""
    return [(size, line.at(size) * slower) for size in sizes]


@given(sizes=st.lists(st.integers(1, 64), max_size=8))
def test_a_device_of_constant_speed_keeps_its_line(sizes: list[int]) -> None:
    found = updated_line(LINE, steps(LINE, sizes))
    # A fit of three points and more in float64, of which the base is a small difference.
    assert math.isclose(found.base, LINE.base, rel_tol=1e-9)
    assert math.isclose(found.each, LINE.each, rel_tol=1e-9)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.1, 200)), min_size=1, max_size=8))
def test_examples_of_unequal_length_count_by_their_padded_size(
    work: list[tuple[int, float]],
) -> None:
    """Eight short texts and one long text take as long as their tokens, not as their numbers."""
    common: dict[str, Any] = {"weight": 1, "loss": 0.0, "peak_bytes": 0}
    report = UpdateReport(
        name="pi",
        round=1,
        num_examples=sum(number for number, _ in work),
        weight=len(work),
        loss_sum=0.0,
        micro_batch_size=64,
        seconds=1.0,
        steps=tuple(
            Step(num_examples=number, size=size, seconds=LINE.at(size), **common)
            for number, size in work
        ),
        reason="quota",
    )
    found = updated_line(LINE, report.measured)
    assert math.isclose(found.base, LINE.base, rel_tol=1e-6)
    assert math.isclose(found.each, LINE.each, rel_tol=1e-6)


@pytest.mark.parametrize("slower", [5.0, 0.2])
def test_a_change_of_speed_is_learned_within_two_rounds(slower: float) -> None:
    line = LINE
    for _ in range(2):
        line = updated_line(line, steps(LINE, [8, 8, 3], slower=slower))
    for size in (1, 3, 8, 64):
        left = abs(math.log(line.at(size) / LINE.at(size)) - math.log(slower))
        assert left <= (1 - UPDATE_EXPONENT) ** 2 * abs(math.log(slower)) * (1 + 1e-9)


def test_sizes_with_another_slope_change_the_slope() -> None:
    """What was told at joining came from small micro-batches; large ones take their own time."""
    true, sizes = Line(base=0.1, each=0.3), [4, 4, 16, 16, 64]
    line, gaps = LINE, []
    for _ in range(60):
        line = updated_line(line, steps(true, sizes))
        gaps.append(max(abs(math.log(line.at(size) / true.at(size))) for size in sizes))
    assert all(later < earlier for earlier, later in pairwise(gaps))
    assert gaps[-1] < 0.05

    def window(line: Line) -> float:
        return sum(line.at(size) for size in sizes)

    assert math.isclose(window(line), window(true), rel_tol=0.05)


def test_one_slow_micro_batch_has_little_effect() -> None:
    usual = steps(LINE, [4, 4, 4, 4])
    odd = steps(LINE, [4], slower=100.0)
    most = (1 + (MAX_DEVIATION - 1) / 5) ** UPDATE_EXPONENT
    assert math.isclose(updated_line(LINE, [*usual, *odd]).at(4), most * LINE.at(4))


def test_the_sum_of_a_round_counts_however_it_is_distributed() -> None:
    seen = [(4, LINE.at(4) * (1.05 if at < 4 else 0.95)) for at in range(16)]
    assert math.isclose(updated_line(LINE, seen).at(4), 0.975**UPDATE_EXPONENT * LINE.at(4))


def test_the_pauses_of_a_device_count() -> None:
    """A cgroup with a fifth of a core runs at full speed until the share of a period is used up."""
    pause = 4 * 10 * LINE.at(1)
    seen = [(1, LINE.at(1) + (pause if at % 10 == 9 else 0.0)) for at in range(160)]
    found = updated_line(LINE, seen)
    true = 160 * LINE.at(1) + 16 * pause
    left = math.log(true / (160 * found.at(1)))
    assert left <= (1 - UPDATE_EXPONENT) * math.log(5) * (1 + 1e-9)


def test_one_slow_micro_batch_of_its_own_size_changes_the_slope_within_its_bound() -> None:
    """The short last one of a window, in which something else happened."""
    usual, odd = steps(LINE, [8] * 6), steps(LINE, [3], slower=100.0)
    found = updated_line(LINE, [*usual, *odd])
    assert LINE.at(8) <= found.at(8) <= MAX_BEND * LINE.at(8)
    assert LINE.at(3) <= found.at(3) <= MAX_BEND * LINE.at(3)


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e100])
@pytest.mark.parametrize("sizes", [[4], [4, 9]])
def test_an_implausible_claim_is_bounded(seconds: float, sizes: list[int]) -> None:
    absurd = [(size, seconds) for size in sizes]
    once = updated_line(LINE, absurd).at(4) / LINE.at(4)
    most = MAX_CHANGE**UPDATE_EXPONENT * MAX_BEND * 1.001
    assert 1 / most <= once <= most
    line = LINE
    for _ in range(1000):
        line = updated_line(line, absurd)
        assert 0 <= line.base <= MAX_SECONDS
        assert MIN_SECONDS_PER_EXAMPLE <= line.each <= MAX_SECONDS


@given(st.lists(st.tuples(st.integers(0, 2**53), st.floats(0, 1e100)), max_size=6))
def test_the_line_stays_valid_whatever_the_steps_claim(claims: list[tuple[int, float]]) -> None:
    line = LINE
    for _ in range(3):
        line = updated_line(line, [(size, seconds) for size, seconds in claims if size])
    assert 0 <= line.base <= MAX_SECONDS
    assert MIN_SECONDS_PER_EXAMPLE <= line.each <= MAX_SECONDS


def test_a_report_without_seconds_gives_no_line() -> None:
    assert reported_line(DeviceReport(name="a", num_examples=1, layout_digest="")) is None


def test_quotas_adapt_within_two_rounds_to_a_device_five_times_slower() -> None:
    """All finish together again: the slow one within one micro-batch and 7 % of the others."""
    plan = settings.PlanSettings(micro_batch_size=8)
    true = {str(number): Line(base=0.01, each=0.01) for number in range(6)}
    estimated = dict(true)
    true["0"] = true["0"].times(5)
    finish: dict[str, float] = {}
    for round_number in range(3):
        known = EstimateColumns.of(
            DeviceEstimate(num_examples=10_000, line=line) for line in estimated.values()
        )
        for name, assigned in assign(list(estimated), known, {}, plan, target=3000).items():
            whole, rest = divmod(assigned.quota, 8)
            sizes = [8] * whole + [rest] * (rest > 0)
            finish[name] = sum(true[name].at(size) for size in sizes)
            estimated[name] = updated_line(estimated[name], steps(true[name], sizes))
        if round_number == 0:
            assert finish["0"] > 4 * finish["1"]
    within = 5 ** ((1 - UPDATE_EXPONENT) ** 2) - 1
    assert finish["0"] <= finish["1"] * (1 + within) + true["0"].at(8)
