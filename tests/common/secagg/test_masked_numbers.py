"""Sums of masked numbers that are out of range end the round."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import SumOutOfRange
from headwater.common.secagg.masked_numbers import (
    LOSS,
    NUM_EXAMPLES,
    SQUARED_NORM,
    SUMMED_WEIGHT,
    bounds_of,
    check_sums,
)
from headwater.common.secagg.protocol import NUM_CLIPPED, WEIGHT
from headwater.common.secagg.scalar_encoding import (
    Scalar,
    decode_scalars,
    encode_scalars,
    plan_scalar,
)

DEVICES, PLANNED = 5, 8


def scalars() -> list[Scalar]:
    counts = {WEIGHT: PLANNED, NUM_CLIPPED: 100}
    bounds = bounds_of((), largest_weight=PLANNED, max_examples=PLANNED)
    return [
        *(plan_scalar(n, bound=b, num_devices=DEVICES, is_count=True) for n, b in counts.items()),
        *(plan_scalar(n, bound=b, num_devices=DEVICES) for n, b in bounds.items()),
    ]


def check(**sums: float) -> None:
    told = {s.name: 1.0 for s in scalars()} | sums
    check_sums(told, scalars(), num_devices=DEVICES, planned_weight=DEVICES * PLANNED)


def test_sums_at_their_bounds_are_accepted() -> None:
    check()
    check(**{WEIGHT: DEVICES * PLANNED, NUM_EXAMPLES: DEVICES * PLANNED, NUM_CLIPPED: 500.0})
    check(**{s.name: DEVICES * s.bound for s in scalars()})
    check(**{LOSS: -1.0, SQUARED_NORM: 0.0, NUM_CLIPPED: 0.0})


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (WEIGHT, 0.0),  # what the sum is divided by
        (WEIGHT, -3.0),
        (WEIGHT, DEVICES * PLANNED + 1.0),
        (NUM_EXAMPLES, 0.0),
        (SUMMED_WEIGHT, -1.0),
        (SQUARED_NORM, -1.0),
        (NUM_CLIPPED, -1.0),
        (LOSS, 2.0**60),
    ],
)
def test_a_sum_out_of_range_is_refused_by_name(name: str, found: float) -> None:
    with pytest.raises(SumOutOfRange, match=name):
        check(**{name: found})


@given(st.floats(1e-3, 1e12), st.integers(1, 1000))
def test_the_largest_sum_of_honest_devices_is_accepted_and_the_next_float_refused(
    bound: float, num_devices: int
) -> None:
    scalar = plan_scalar(LOSS, bound=bound, num_devices=num_devices)
    each, num_clipped = encode_scalars({LOSS: 2 * bound}, [scalar])
    total = np.array([int(each[0]) * num_devices], np.uint64)
    largest = decode_scalars(total, [scalar])[LOSS]
    assert num_clipped == 1
    for sign in (1, -1):
        check_sums({LOSS: sign * largest}, [scalar], num_devices=num_devices, planned_weight=1)
        beyond = sign * math.nextafter(largest, math.inf)
        with pytest.raises(SumOutOfRange):
            check_sums({LOSS: beyond}, [scalar], num_devices=num_devices, planned_weight=1)
