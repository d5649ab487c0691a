"""Masked numbers: exact counts, sums within their error bound, and no wrapping."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import CountOutOfRange, NonFiniteUpdate, RingCanWrap
from headwater.common.secagg.scalar_encoding import (
    MAX_SCALE_BITS,
    Scalar,
    decode_scalars,
    encode_scalars,
    plan_scalar,
)

BOUNDS = st.floats(min_value=1e-3, max_value=1e30)


def total_of(values: list[float], scalar: Scalar) -> tuple[float, int]:
    """Sum what devices tell in the ring of 64 bits; return it decoded, and the clips."""
    total, num_clipped = np.zeros(1, dtype=np.uint64), 0
    for value in values:
        element, clipped = encode_scalars({scalar.name: value}, [scalar])
        total += element
        num_clipped += clipped
    return decode_scalars(total, [scalar])[scalar.name], num_clipped


@given(st.lists(st.integers(0, 2**53), min_size=1, max_size=50))
def test_counts_add_exactly(counts: list[int]) -> None:
    scalar = plan_scalar("weight", bound=2.0**53, num_devices=50, is_count=True)
    total = np.zeros(1, dtype=np.uint64)
    for count in counts:
        total += encode_scalars({"weight": count}, [scalar])[0]
    assert int(total[0]) == sum(counts)
    # Beyond 2^53 the float that is returned is the nearest one.
    assert decode_scalars(total, [scalar])["weight"] == float(sum(counts))


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30), BOUNDS)
def test_the_error_of_a_sum_is_at_most_half_a_step_per_device(
    shares: list[float], bound: float
) -> None:
    # Floor(B 2^f) may be a step below B 2^f: keep away from the clip itself.
    values = [share * bound * 0.999 for share in shares]
    scalar = plan_scalar("loss", bound=bound, num_devices=len(values))
    found, num_clipped = total_of(values, scalar)
    assert not num_clipped
    error = abs(Fraction(found) - sum(map(Fraction, values)))
    half_steps = len(values) * Fraction(2) ** -(scalar.scale_bits + 1)
    assert error <= half_steps + abs(Fraction(found)) * Fraction(2) ** -53


@given(st.integers(1, 1000), BOUNDS, st.sampled_from([-1, 1]))
def test_the_sum_does_not_wrap_even_if_all_devices_are_at_the_bound(
    num_devices: int, bound: float, sign: int
) -> None:
    scalar = plan_scalar("norm", bound=bound, num_devices=num_devices)
    element, num_clipped = encode_scalars({"norm": sign * 1e300}, [scalar])
    assert num_clipped == 1
    with np.errstate(over="ignore"):
        total = element * np.uint64(num_devices)
    most = math.floor(Fraction(bound) * Fraction(2) ** scalar.scale_bits)
    expected = float(sign * num_devices * most)
    assert decode_scalars(total, [scalar])["norm"] == math.ldexp(expected, -scalar.scale_bits)


def test_the_worked_example_of_the_docstring() -> None:
    scalar = plan_scalar("loss", bound=2.0**30, num_devices=100)
    assert scalar.scale_bits == 26
    found, _ = total_of([2.0**-27] * 100, scalar)  # half a step each, to even: zero
    assert found == 0
    assert pytest.approx(7.5e-7, rel=0.01) == 100 * 2.0**-27
    plan_scalar("weight", bound=2.0**53, num_devices=100, is_count=True)


def test_a_number_beyond_its_bound_is_clipped_and_counted() -> None:
    scalars = [
        plan_scalar("loss", bound=10.0, num_devices=3),
        plan_scalar("norm", bound=4.0, num_devices=3),
    ]
    elements, num_clipped = encode_scalars({"norm": 4.5, "loss": -11.0}, scalars)
    assert num_clipped == 2
    assert decode_scalars(elements, scalars) == {"loss": -10.0, "norm": 4.0}


def test_elements_are_in_the_order_of_the_scalars() -> None:
    scalars = [plan_scalar(n, bound=10, num_devices=1, is_count=True) for n in ("b", "a", "c")]
    elements, _ = encode_scalars({"a": 1, "b": 2, "c": 3}, scalars)
    assert elements.tolist() == [2, 1, 3]


@pytest.mark.parametrize("count", [-1, 11, 2.5, 1e300])
def test_a_count_outside_its_range_is_refused_rather_than_clipped(count: float) -> None:
    scalar = plan_scalar("weight", bound=10, num_devices=3, is_count=True)
    with pytest.raises(CountOutOfRange, match="weight"):
        encode_scalars({"weight": count}, [scalar])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_count", [False, True])
def test_a_number_that_is_not_finite_is_refused(value: float, is_count: bool) -> None:
    scalar = plan_scalar("loss", bound=10, num_devices=3, is_count=is_count)
    with pytest.raises(NonFiniteUpdate, match="loss"):
        encode_scalars({"loss": value}, [scalar])


@pytest.mark.parametrize("values", [{}, {"loss": 1.0, "other": 2.0}, {"other": 2.0}])
def test_other_names_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="are not"):
        encode_scalars(values, [plan_scalar("loss", bound=10, num_devices=3)])


def test_another_number_of_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        decode_scalars(np.zeros(2, dtype=np.uint64), [plan_scalar("a", bound=1, num_devices=1)])


@given(BOUNDS, st.integers(1, 10_000))
def test_the_planned_scale_cannot_wrap_and_one_bit_more_could(
    bound: float, num_devices: int
) -> None:
    scalar = plan_scalar("loss", bound=bound, num_devices=num_devices)
    if scalar.scale_bits < MAX_SCALE_BITS:
        finer = scalar.scale_bits + 1
        with pytest.raises(RingCanWrap, match="might reach"):
            Scalar(name="loss", bound=bound, num_devices=num_devices, scale_bits=finer)


def test_counts_that_might_wrap_are_refused() -> None:
    with pytest.raises(RingCanWrap):
        plan_scalar("weight", bound=2.0**53, num_devices=1 << 10, is_count=True)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("is_count", [False, True])
def test_an_invalid_bound_is_refused(bound: float, is_count: bool) -> None:
    with pytest.raises(ValueError, match="no bound"):
        plan_scalar("loss", bound=bound, num_devices=3, is_count=is_count)


def test_a_count_with_a_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="has scale 0"):
        Scalar(name="weight", bound=10, scale_bits=1, num_devices=1, is_count=True)


@pytest.mark.parametrize("value", [1234567.25, 1234567, math.inf, math.nan])
def test_no_error_quotes_the_refused_number(value: float) -> None:
    """A device's refusal travels to the server, which may have chosen the bound."""
    count = Scalar(name="n", bound=1.0, scale_bits=0, num_devices=3, is_count=True)
    with pytest.raises((CountOutOfRange, NonFiniteUpdate)) as caught:
        encode_scalars({"n": value}, [count])
    assert "1234567" not in str(caught.value).replace(",", "")


@pytest.mark.parametrize("scale_bits", [53, -1101, -(10**9), 10**9])
def test_a_scale_beyond_every_float_is_refused_before_it_is_computed(scale_bits: int) -> None:
    with pytest.raises(ValueError, match="steps"):
        Scalar(name="n", bound=1.0, scale_bits=scale_bits, num_devices=3)
