"""Fixed-point encoding: sums that cannot wrap, and errors within the stated bounds."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.common.errors import CountOutOfRange, NonFiniteUpdate, RingCanWrap
from headwater.common.secagg.fixed_point import (
    CHUNK,
    FIRST_CLIP,
    MAX_CLIP,
    MIN_CLIP_ROOM,
    SIGNED,
    UNSIGNED,
    ClipState,
    Encoding,
    RingBits,
    decode,
    decode_mean,
    encode_in_place,
    follow_clip,
    plan_encoding,
)

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
SMALL = st.floats(width=32, min_value=-8, max_value=8)
CLIPS = st.floats(min_value=1e-6, max_value=1e6)
WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=12)
RINGS: tuple[RingBits, ...] = (8, 16, 32, 64)


def empty(length: int, ring_bits: RingBits) -> Any:
    """Return a ring vector of zeros; ``Any``, as numpy's types refuse sums of either dtype."""
    return np.zeros(length, dtype=UNSIGNED[ring_bits])


def encoded(
    values: Sequence[float] | NDArray[np.float32], *, weight: int, encoding: Encoding, seed: int = 0
) -> tuple[NDArray[np.float64], int]:
    """Encode a copy; return the signed steps and how many were clipped."""
    vector = torch.tensor(np.array(values, dtype=np.float32))
    ring, num_clipped = encode_in_place(
        vector,
        weight=weight,
        encoding=encoding,
        random=np.random.default_rng(seed) if encoding.ring_bits < 32 else None,
    )
    return decode(ring, encoding) * 2.0**encoding.scale_bits, num_clipped


def nearest(value: float, encoding: Encoding, weight: int) -> int:
    """The element that the docstring promises, in exact arithmetic."""
    bound = encoding.bound(weight)
    return min(max(round(Fraction(value) * Fraction(2) ** encoding.scale_bits), -bound), bound)


@given(st.lists(FLOAT32, min_size=1, max_size=20), st.integers(1, 1000), CLIPS)
def test_an_element_is_the_nearest_integer_within_the_clip(
    values: list[float], weight: int, clip: float
) -> None:
    encoding = plan_encoding(max_weight=1000, clip=clip)
    steps, num_clipped = encoded(values, weight=weight, encoding=encoding)
    exact = [nearest(value, encoding, weight) for value in values]
    for found, wanted in zip(steps, exact, strict=True):
        # At the bound float32 has its own resolution: the number below is at most 2^-24 away.
        assert abs(wanted) * (1 - 2**-23) <= abs(found) <= abs(wanted)
        if abs(wanted) < 2**24:
            assert found == wanted
    scale = Fraction(2) ** encoding.scale_bits
    bound = encoding.bound(weight)
    surely = sum(abs(Fraction(value)) * scale > bound for value in values)
    perhaps = sum(
        abs(Fraction(value)) * scale > bound * (1 - Fraction(1, 2**23)) for value in values
    )
    assert surely <= num_clipped <= perhaps


@given(WEIGHTS, st.integers(1, 20), CLIPS, st.sampled_from(RINGS), st.integers(0, 2**32))
def test_the_sum_does_not_wrap_even_if_every_coordinate_is_at_the_clip(
    weights: list[int], length: int, clip: float, ring_bits: RingBits, seed: int
) -> None:
    encoding = plan_encoding(max_weight=sum(weights), clip=clip, ring_bits=ring_bits)
    random = np.random.default_rng(seed)
    total, plain = empty(length, ring_bits), np.zeros(length, dtype=np.int64)
    for weight in weights:
        values = torch.from_numpy(
            random.choice([-1e30, 1e30, 0.5 * clip], size=length).astype(np.float32)
        )
        ring, _ = encode_in_place(values, weight=weight, encoding=encoding, random=random)
        total += ring
        plain += ring.view(SIGNED[ring_bits])
    assert np.array_equal(decode(total, encoding), plain * 2.0**-encoding.scale_bits)


@given(
    st.lists(st.lists(SMALL, min_size=5, max_size=5), min_size=1, max_size=12),
    st.integers(1, 100),
    st.sampled_from(RINGS),
)
def test_the_error_of_a_sum_without_clips_is_within_the_stated_bound(
    updates: list[list[float]], weight: int, ring_bits: RingBits
) -> None:
    num_devices = len(updates)
    # Every |coordinate| is below 8 = weight x clip, and the whole step below is below 8 too.
    encoding = plan_encoding(max_weight=weight * num_devices, clip=16 / weight, ring_bits=ring_bits)
    total = empty(5, ring_bits)
    for at, update in enumerate(updates):
        ring, num_clipped = encode_in_place(
            torch.tensor(update, dtype=torch.float32),
            weight=weight,
            encoding=encoding,
            random=np.random.default_rng(at) if ring_bits < 32 else None,
        )
        assert not num_clipped
        total += ring
    plain = np.sum(np.array(updates, dtype=np.float64), axis=0)
    bound = num_devices * 2.0 ** -(encoding.scale_bits + (1 if ring_bits == 32 else 0))
    float64 = num_devices * 8 * 2.0**-52  # of the reference itself
    assert np.all(np.abs(decode(total, encoding) - plain) <= bound + float64)
    mean = decode_mean(total.copy(), encoding=encoding, weight=weight * num_devices)
    exact = plain / (weight * num_devices)
    assert np.all(
        np.abs(mean - exact) <= bound / (weight * num_devices) + np.abs(mean) * 2.0**-23 + float64
    )
    if ring_bits == 32:  # the bound that does not know the scale; here c = 16 / weight
        assert bound / (weight * num_devices) <= num_devices * (16 / weight) * 2.0**-31


def test_the_worked_example_of_the_docstring() -> None:
    encoding = plan_encoding(max_weight=20 * 1000, clip=1.0)
    assert encoding.scale_bits == 16
    # Half a step goes to zero, twenty times: the stated bound is reached, 20 x 2^-17 = 1.5e-4.
    total = empty(1, 32)
    for _ in range(20):
        total += encode_in_place(torch.tensor([2.0**-17]), weight=1000, encoding=encoding)[0]
    error = 20 * 2.0**-17 - float(decode(total, encoding)[0])
    assert error == 20 * 2.0**-17 == pytest.approx(1.5e-4, rel=0.02)
    assert error / 20_000 == pytest.approx(7.6e-9, rel=0.01)
    assert error / 20_000 <= 20 * encoding.clip * 2.0**-31


@given(
    st.integers(1, 2**40),
    st.floats(min_value=1e-9, max_value=1e9),
    st.sampled_from(RINGS),
)
def test_the_planned_scale_is_the_finest_that_cannot_wrap(
    max_weight: int, clip: float, ring_bits: RingBits
) -> None:
    encoding = plan_encoding(max_weight=max_weight, clip=clip, ring_bits=ring_bits)
    assert encoding.bound(max_weight) < 2 ** (ring_bits - 1)
    with pytest.raises(RingCanWrap, match="might reach"):
        Encoding(
            ring_bits=ring_bits,
            scale_bits=encoding.scale_bits + 1,
            clip=clip,
            max_weight=max_weight,
        )


@pytest.mark.parametrize(("ring_bits", "scale_bits"), [(32, 21), (16, 5), (8, -3)])
def test_a_sum_of_exactly_half_the_ring_is_refused(ring_bits: RingBits, scale_bits: int) -> None:
    with pytest.raises(RingCanWrap):
        Encoding(ring_bits=ring_bits, scale_bits=scale_bits, clip=1.0, max_weight=1024)
    Encoding(ring_bits=ring_bits, scale_bits=scale_bits, clip=1.0, max_weight=1023)


@pytest.mark.parametrize(
    ("clip", "max_weight"), [(0.0, 1), (-1.0, 1), (math.inf, 1), (math.nan, 1), (1.0, 0)]
)
def test_an_invalid_clip_or_weight_is_refused(clip: float, max_weight: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        plan_encoding(max_weight=max_weight, clip=clip)
    with pytest.raises(ValueError, match="positive"):
        Encoding(ring_bits=32, scale_bits=0, clip=clip, max_weight=max_weight)


@pytest.mark.parametrize("ring_bits", [0, 4, 31, 128])
def test_other_rings_are_refused(ring_bits: RingBits) -> None:
    with pytest.raises(ValueError, match="no ring"):
        Encoding(ring_bits=ring_bits, scale_bits=0, clip=1.0, max_weight=1)


@pytest.mark.parametrize("length", [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
@pytest.mark.parametrize("ring_bits", RINGS)
def test_encoding_happens_in_the_vector_s_own_memory(length: int, ring_bits: RingBits) -> None:
    values = torch.linspace(-3, 3, length)
    plain = values.numpy().astype(np.float64)
    encoding = plan_encoding(max_weight=1, clip=4.0, ring_bits=ring_bits)
    ring, num_clipped = encode_in_place(values, weight=1, encoding=encoding)
    assert ring.dtype == UNSIGNED[ring_bits]
    assert len(ring) == length
    is_in_place = not length or ring.ctypes.data == values.data_ptr()
    assert is_in_place if ring_bits <= 32 else not values.any()
    assert not num_clipped
    step = 2.0**-encoding.scale_bits
    assert np.all(np.abs(decode(ring, encoding) - plain) <= (step if ring_bits < 32 else step / 2))


def test_encoding_takes_less_than_a_megabyte_of_extra_memory() -> None:
    values = torch.zeros(2_000_000)
    for ring_bits in RINGS:
        encoding = plan_encoding(max_weight=1, clip=1.0, ring_bits=ring_bits)
        tracemalloc.start()
        try:
            encode_in_place(values, weight=1, encoding=encoding)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Two chunks of float32, a drawn one, and masks of a byte a coordinate; the wide ring's own.
        own = 8 * len(values) if ring_bits > 32 else 0
        assert peak < own + 4 * 4 * CHUNK + 64 * 1024


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, CHUNK, CHUNK + 5])
@pytest.mark.parametrize("ring_bits", RINGS)
def test_a_value_that_is_not_finite_leaves_the_vector_unchanged(
    bad: float, at: int, ring_bits: RingBits
) -> None:
    values = torch.ones(CHUNK + 6)
    values[at] = bad
    before = values.numpy().tobytes()
    encoding = plan_encoding(max_weight=1, clip=1.0, ring_bits=ring_bits)
    with pytest.raises(NonFiniteUpdate):
        encode_in_place(values, weight=1, encoding=encoding)
    assert values.numpy().tobytes() == before


@pytest.mark.parametrize("weight", [-1, 11])
def test_a_weight_beyond_the_plans_leaves_the_vector_unchanged(weight: int) -> None:
    values = torch.ones(3)
    with pytest.raises(CountOutOfRange, match="0 to 10"):
        encode_in_place(values, weight=weight, encoding=plan_encoding(max_weight=10, clip=1.0))
    assert values.tolist() == [1, 1, 1]


def test_every_clipped_coordinate_is_counted() -> None:
    encoding = Encoding(ring_bits=32, scale_bits=3, clip=0.3, max_weight=100)
    values = [3.0, -3.0, -4.0, 3e38, 2.875, 0.0]
    steps, num_clipped = encoded(values, weight=10, encoding=encoding)
    # In binary 0.3 is a little less than three tenths, 10 x 0.3 x 2^3 less than 24: 23 whole steps.
    assert encoding.bound(10) == math.floor(Fraction(0.3) * 80) == 23
    assert steps.tolist() == [23, -23, -23, 23, 23, 0]
    assert num_clipped == 4


def test_stochastic_rounding_is_unbiased_and_within_one_step() -> None:
    encoding = Encoding(ring_bits=16, scale_bits=0, clip=100.0, max_weight=1)
    fractions = np.array([0.0, 0.1, 0.25, 0.5, 0.9, 1.0], dtype=np.float32)
    values = np.repeat(np.concatenate([fractions, -fractions, 41 + fractions]), 20_000)
    steps, _ = encoded(values, weight=1, encoding=encoding, seed=3)
    assert np.all((steps == np.floor(values)) | (steps == np.ceil(values)))
    for trials in (steps - values).reshape(-1, 20_000):
        # The variance of one rounding is at most 1/4: six standard deviations of the mean.
        assert abs(trials.mean()) <= 6 * math.sqrt(0.25 / 20_000)
    assert not (steps - values)[values == np.round(values)].any()


def test_the_mean_of_a_32_bit_total_overwrites_the_total() -> None:
    encoding = plan_encoding(max_weight=10, clip=1.0)
    total = np.arange(CHUNK + 3, dtype=np.uint32)
    expected = (decode(total, encoding) / 7).astype(np.float32)
    mean = decode_mean(total, encoding=encoding, weight=7)
    assert mean.ctypes.data == total.ctypes.data
    assert mean.tolist() == expected.tolist()


def test_the_mean_can_be_written_to_another_array() -> None:
    encoding = plan_encoding(max_weight=10, clip=1.0, ring_bits=16)
    total = np.arange(CHUNK + 3, dtype=np.uint16)
    out = np.empty(len(total), dtype=np.float32)
    assert decode_mean(total, encoding=encoding, weight=7, out=out) is out
    assert out.tolist() == decode_mean(total, encoding=encoding, weight=7).tolist()
    assert out.tolist() == (decode(total, encoding) / 7).astype(np.float32).tolist()


def test_a_sum_without_weight_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no mean"):
        decode_mean(
            np.zeros(1, dtype=np.uint32), encoding=plan_encoding(max_weight=1, clip=1.0), weight=0
        )


ROUNDS = st.lists(
    st.tuples(st.floats(min_value=0, max_value=1e4), st.integers(0, 3)), min_size=1, max_size=40
)


@given(ROUNDS)
def test_the_clip_bound_is_never_below_16_times_the_largest_mean(
    rounds: list[tuple[float, int]],
) -> None:
    state = ClipState()
    for largest_mean, num_clipped in rounds:
        state = follow_clip(state, largest_mean=largest_mean, num_clipped=num_clipped)
        seen = state.largest_mean
        assert state.clip >= MIN_CLIP_ROOM * seen
        assert math.frexp(state.clip)[0] == 0.5
        if seen:
            assert state.clip <= 8192 * seen or state.clip <= 2 * MIN_CLIP_ROOM * seen
    assert state.largest_mean == max(largest_mean for largest_mean, _ in rounds)


def test_the_clip_bound_decreases_to_the_gradients_and_stays() -> None:
    state = ClipState()
    assert state.clip == FIRST_CLIP
    seen = []
    for _ in range(12):
        state = follow_clip(state, largest_mean=0.1, num_clipped=0)
        seen.append(state.clip)
    assert seen == [128, 64, 32, 16, 8, 4, 2, 2, 2, 2, 2, 2]  # the power of two above 1.6


def test_clips_widen_the_bound_up_to_its_maximum() -> None:
    state = ClipState(clip=2.0, largest_mean=0.1)
    clips = []
    for _ in range(12):
        state = follow_clip(state, largest_mean=0.1, num_clipped=1)
        clips.append(state.clip)
    assert clips == [4, 8, 16, 32, 64, 128, 256, 512, 512, 512, 512, 512]


def test_after_a_sum_of_zeros_only_clips_change_the_bound() -> None:
    still = follow_clip(ClipState(), largest_mean=0.0, num_clipped=0)
    assert still == ClipState()
    assert follow_clip(still, largest_mean=0.0, num_clipped=1).clip == 2 * FIRST_CLIP
    for _ in range(20):
        still = follow_clip(still, largest_mean=0.0, num_clipped=1)
    assert still.clip == 2.0**20


def test_the_clip_bound_stays_acceptable_even_if_every_sum_is_as_large_as_possible() -> None:
    state = ClipState()
    for _ in range(100):
        state = follow_clip(state, largest_mean=state.clip, num_clipped=1)
    assert state.clip == MAX_CLIP


@pytest.mark.parametrize("bits", RINGS)
def test_an_update_of_weight_0_is_encoded_as_zeros(bits: RingBits) -> None:
    encoding = plan_encoding(max_weight=10, clip=1.0, ring_bits=bits)
    ring, num_clipped = encode_in_place(torch.zeros(5), weight=0, encoding=encoding)
    assert not ring.any()
    assert num_clipped == 0
