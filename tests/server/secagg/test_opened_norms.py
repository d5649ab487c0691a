"""The norms of opened sums: what no members have who follow their plans is thrown away."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headwater.common.errors import SumOutOfRange
from headwater.common.secagg.masked_numbers import SQUARED_NORM, WIDE
from headwater.common.secagg.protocol import WEIGHT
from headwater.server.secagg.opened_norms import OpenedNorms
from headwater.server.secagg.unmask_phase import UnmaskedSum
from tests.client.secagg.cohort import trained
from tests.masked import opening_of, plan, play

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")
NONE_YET = OpenedNorms()


@pytest.fixture(scope="module")
def opened() -> UnmaskedSum:
    cohort = trained(4)
    return play(cohort, opening_of(cohort, plan())).sum


def with_numbers(opened: UnmaskedSum, **numbers: float) -> UnmaskedSum:
    return replace(opened, numbers={**opened.numbers, **numbers})


def fitting(opened: UnmaskedSum, factor: float) -> UnmaskedSum:
    """Return the sum with squared norms that are so many times the vector's own."""
    step = 2.0**-opened.session.parameters.encoding.scale_bits
    norm = math.sqrt(sum((step * int(v)) ** 2 for v in opened.vector_P.view("int32")))
    squares = factor**2 * norm**2 / len(opened.survived)
    return with_numbers(opened, **{SQUARED_NORM: squares, WIDE + SQUARED_NORM: squares})


def test_a_member_that_takes_all_weight_away_leaves_the_vector(opened: UnmaskedSum) -> None:
    """It ended a run: a sum without weight counted as one of devices without a usable example."""
    taken = with_numbers(opened, **{WEIGHT: 0.0})
    with pytest.raises(SumOutOfRange, match="a vector without a weight"):
        NONE_YET.check(taken, None, multiple=100.0)
    assert NONE_YET.check(taken, None, multiple=100.0, may_weigh_nothing=True) == 0.0


def test_a_vector_is_no_longer_than_the_norms_of_its_members_allow(opened: UnmaskedSum) -> None:
    told = NONE_YET.check(fitting(opened, 1.0), None, multiple=100.0)
    assert told > 0
    with pytest.raises(SumOutOfRange, match="a norm of"):
        NONE_YET.check(fitting(opened, 0.5), None, multiple=100.0)


def test_the_limit_follows_the_largest_median_of_five_sums(opened: UnmaskedSum) -> None:
    told = NONE_YET.check(fitting(opened, 1.0), None, multiple=100.0)
    watch = NONE_YET
    for norm in (told / 50, told / 40, 0.0, told / 60):
        watch = watch.after(norm)
    assert watch.largest_median == told / 50
    assert watch.check(fitting(opened, 1.0), None, multiple=50.1) == told
    with pytest.raises(SumOutOfRange, match="was the most"):
        watch.check(fitting(opened, 1.0), None, multiple=49.9)
    assert OpenedNorms.of_json({"recent": list(watch.recent), "largest_median": told}).recent == (
        watch.recent
    )
