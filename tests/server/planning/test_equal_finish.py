"""Equal finish: the target to the example, and no device done early that could have taken more."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.server.planning import equal_finish as module
from headwater.server.planning.equal_finish import CohortColumns, Ints, equal_finish

SECONDS = st.floats(1e-6, 1e3)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "size": st.integers(1, 300),
            "base": st.just(0.0) | SECONDS,
            "each": SECONDS,
            "fixed": st.just(0.0) | SECONDS,
            "most": st.integers(1, 5000),
        }
    ),
    min_size=1,
    max_size=12,
)
TURN = st.just(0.0) | st.floats(1e-6, 10.0)
TARGET = st.integers(1, 40_000)


def cohort_of(
    rows: list[dict[str, Any]], turn_seconds: float = 0.0, longest: float = math.inf
) -> CohortColumns:
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return CohortColumns(**columns, longest=np.full(len(rows), longest), turn_seconds=turn_seconds)


def here_after(cohort: CohortColumns, quotas: Ints, finish_seconds: float) -> list[float]:
    """Return each device's finish and the turns behind it, worked out one by one."""
    n = len(quotas)
    firsts = [
        float(cohort.fixed[i] + cohort.base[i] + cohort.each[i]) for i in range(n)
    ]  # with one example
    slowest_first = sorted(range(n), key=lambda i: -firsts[i])
    turn = min(cohort.turn_seconds, finish_seconds / 2 / n)
    return [
        float(cohort.fixed[i])
        + math.ceil(quotas[i] / cohort.size[i]) * float(cohort.base[i])
        + int(quotas[i]) * float(cohort.each[i])
        + (slowest_first.index(i) + 1) * turn
        for i in range(n)
    ]


# T is known to RESOLUTION, and each end is a sum of four terms in float64.
CLOSE = 4 * module.RESOLUTION


@given(rows=ROWS, turn=TURN, target=TARGET)
def test_the_quotas_sum_to_the_target_if_the_bounds_allow(
    rows: list[dict[str, Any]], turn: float, target: int
) -> None:
    quotas, _ = equal_finish(cohort_of(rows, turn), target=target, finish_seconds=None)
    there_is = sum(row["most"] for row in rows)
    assert quotas.sum() == min(max(target, len(rows)), there_is)
    assert all(1 <= q <= row["most"] for q, row in zip(quotas.tolist(), rows, strict=True))


@given(rows=ROWS, turn=TURN, target=TARGET)
def test_free_devices_end_together_up_to_one_example_of_the_slower(
    rows: list[dict[str, Any]], turn: float, target: int
) -> None:
    """So up to one micro-batch of it: none could have taken another example by T.

    A device is free if it has more than the least, which a slow link may bring after T.
    """
    cohort = cohort_of(rows, turn)
    least = cohort.least(target)
    quotas, finish = equal_finish(cohort, target=target, finish_seconds=None)
    ends = here_after(cohort, quotas, finish)
    more = here_after(cohort, quotas + 1, finish)
    for i, quota in enumerate(quotas.tolist()):
        if quota > least[i]:
            assert ends[i] <= finish * (1 + CLOSE)
        if quota < cohort.most[i]:
            assert more[i] >= finish * (1 - CLOSE)


@given(rows=ROWS, turn=TURN, target=TARGET, finish=st.floats(1e-3, 1e4))
def test_with_a_finish_given_nobody_is_asked_for_more_than_it_allows(
    rows: list[dict[str, Any]], turn: float, target: int, finish: float
) -> None:
    cohort = cohort_of(rows, turn)
    quotas, found = equal_finish(cohort, target=target, finish_seconds=finish)
    assert quotas.sum() <= max(target, len(rows))
    if (quotas > 1).any():
        assert found <= finish * (1 + CLOSE)
    for i, end in enumerate(here_after(cohort, quotas, finish)):
        assert quotas[i] == 1 or end <= finish * (1 + CLOSE)
    if quotas.sum() < min(target, cohort.most.sum()):
        for i, end in enumerate(here_after(cohort, quotas + 1, finish)):
            assert quotas[i] == cohort.most[i] or end >= finish * (1 - CLOSE)


@given(rows=ROWS, longest=st.floats(1e-3, 1e4), finish=st.floats(1e-3, 1e4))
def test_nobody_trains_longer_than_it_may(
    rows: list[dict[str, Any]], longest: float, finish: float
) -> None:
    cohort = cohort_of(rows, longest=longest)
    quotas, _ = equal_finish(cohort, target=2**40, finish_seconds=finish)
    trains = cohort.finish(quotas) - cohort.fixed
    # finish and fixed are subtracted: of the larger one float64 leaves 1e-16, fixed is below 1e3.
    assert (trains[quotas > 1] <= longest * (1 + CLOSE) + 1e-12).all()


@given(rows=ROWS, target=TARGET, at=st.integers(0, 11), faster=st.floats(0.01, 1.0))
def test_a_faster_device_is_asked_for_no_less(
    rows: list[dict[str, Any]], target: int, at: int, faster: float
) -> None:
    at %= len(rows)
    before, _ = equal_finish(cohort_of(rows), target=target, finish_seconds=None)
    row = rows[at]
    quick = {**row, "base": row["base"] * faster, "each": row["each"] * faster}
    after, _ = equal_finish(
        cohort_of([*rows[:at], quick, *rows[at + 1 :]]), target=target, finish_seconds=None
    )
    # One: of examples that end at the same moment another may be the one too many.
    assert after[at] >= before[at] - 1


@given(rows=ROWS, target=TARGET, at=st.integers(0, 11), larger=st.integers(1, 300))
def test_a_device_with_larger_micro_batches_is_asked_for_no_less(
    rows: list[dict[str, Any]], target: int, at: int, larger: int
) -> None:
    at %= len(rows)
    before, _ = equal_finish(cohort_of(rows), target=target, finish_seconds=None)
    row = {**rows[at], "size": rows[at]["size"] + larger}
    after, _ = equal_finish(
        cohort_of([*rows[:at], row, *rows[at + 1 :]]), target=target, finish_seconds=None
    )
    assert after[at] >= before[at] - 1


def test_the_slowest_take_the_last_turns() -> None:
    rows = [
        {"size": 8, "base": 0.0, "each": each, "fixed": fixed, "most": 10**6}
        for each, fixed in ((1.0, 0.0), (4.0, 0.0), (2.0, 0.0), (1.0, 9.0))
    ]
    cohort = cohort_of(rows, turn_seconds=0.25)
    assert cohort.turns().tolist() == [4, 2, 3, 1]
    assert cohort.ahead(cohort.turns(), 100.0).tolist() == [1.0, 0.5, 0.75, 0.25]


def test_where_the_server_is_what_is_waited_for_the_turns_share_half_of_the_round() -> None:
    """Ten devices alike and turns of a second: the first is not left with nothing to do."""
    rows = [{"size": 8, "base": 0.0, "each": 0.001, "fixed": 0.0, "most": 10**6}] * 10
    cohort = cohort_of(rows, turn_seconds=1.0)
    quotas, finish = equal_finish(cohort, target=1000, finish_seconds=None)
    # Budgets fall evenly from T (1 - 1/20) to T/2, so their mean is 0.725 T, for 100 examples.
    assert math.isclose(finish, 0.1 / 0.725, rel_tol=0.02)
    assert quotas.min() == pytest.approx(100 * 0.5 / 0.725, abs=1)
    assert quotas.max() == pytest.approx(100 * 0.95 / 0.725, abs=1)


def test_a_device_that_claims_a_century_does_not_coarsen_the_search() -> None:
    row = {"size": 8, "base": 0.0, "each": 1e-3, "fixed": 0.0, "most": 10**6}
    rows = [row, row, {**row, "each": 3e9}]
    quotas, finish = equal_finish(cohort_of(rows), target=1001, finish_seconds=None)
    assert quotas.tolist() == [500, 500, 1]
    assert math.isclose(finish, 0.5, rel_tol=CLOSE)


class Counting(CohortColumns):
    """A cohort that counts its sweeps over the columns."""

    sweeps = 0

    def quotas(self, turns: Ints, finish_seconds: float) -> Ints:
        Counting.sweeps += 1
        return super().quotas(turns, finish_seconds)


@pytest.mark.parametrize("turn_seconds", [0.0, 1e-4])
def test_a_hundred_thousand_devices_take_some_forty_sweeps(turn_seconds: float) -> None:
    """Seconds depend on the machine (benchmarks/planning.py); the work does not."""
    n = np.arange(100_000)
    seconds = n.astype(np.float64)
    cohort = Counting(
        size=1 + n % 64,
        base=1e-3 * np.fmod(seconds, 3),
        each=1e-3 * (1 + np.fmod(seconds, 13)),
        fixed=0.1 * np.fmod(seconds, 7),
        most=1 + n % 977,
        longest=np.full(len(n), math.inf),
        turn_seconds=turn_seconds,
    )
    Counting.sweeps = 0
    quotas, _ = equal_finish(cohort, target=2_000_000, finish_seconds=None)
    assert quotas.sum() == 2_000_000
    # Doublings from 1 ms to some seconds, and halvings to a millionth: 13 + 20, and a few more.
    assert Counting.sweeps <= 45
