"""The rotation is orthogonal and evens out coordinates; the error of 16 bits is as stated."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headwater.client.secagg.types import Floor
from headwater.common.errors import NonFiniteUpdate
from headwater.common.secagg.fixed_point import (
    UNSIGNED,
    RingBits,
    decode_mean,
    encode_in_place,
    plan_encoding,
)
from headwater.common.secagg.hadamard_rotation import (
    BOUND_FACTOR,
    MAX_CLIPPED_FRACTION,
    MAX_GROWTH,
    MIN_RMS_FRACTION,
    STEPS,
    Rotation,
    device_spread,
    first_bounds,
    follow_bounds,
    rotate_in_place,
    rotated_encoding,
    unrotate_in_place,
)

SEED = bytes(range(32))
EPSILON = 2.0**-24
LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 255, 256, 1000]))
SMALL_BLOCKS = st.sampled_from([1, 2, 8, 32, 64])


def normal(length: int, *, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(length).astype(np.float32)


def rotated(values: NDArray[np.float32], rotation: Rotation) -> NDArray[np.float64]:
    """Rotate without measuring in steps: bounds of one, and STEPS taken out again."""
    vector = torch.from_numpy(values.copy())
    rotate_in_place(vector, rotation=rotation, bounds=first_bounds(rotation), max_weight=1)
    return vector.numpy().astype(np.float64) / STEPS


def hadamard(i: int, j: int) -> int:
    """Sylvester's matrix by its other definition."""
    return -1 if (i & j).bit_count() % 2 else 1


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 32, 64])
def test_columns_are_those_of_hadamard_s_matrix_up_to_signs(block_size: int) -> None:
    length = 2 * block_size
    rotation = Rotation(seed=SEED, num_coordinates=length, block_size=block_size)
    signs = set()
    for j in range(length):
        column = rotated(np.eye(length, dtype=np.float32)[j], rotation)
        in_block = slice(j // block_size * block_size, (j // block_size + 1) * block_size)
        expected = [hadamard(i, j % block_size) for i in range(block_size)]
        sign = math.copysign(1, column[in_block][0])
        signs.add((j, sign))
        assert np.allclose(
            column[in_block] * math.sqrt(block_size), sign * np.array(expected), atol=4 * EPSILON
        )
        assert np.count_nonzero(column) == block_size
    if length > 32:
        assert len({sign for _, sign in signs}) == 2


@given(LENGTHS, SMALL_BLOCKS, st.integers(0, 2**32))
def test_rotating_back_gives_the_vector(length: int, block_size: int, seed: int) -> None:
    rotation = Rotation(
        seed=seed.to_bytes(32, "big"), num_coordinates=length, block_size=block_size
    )
    bounds = np.random.default_rng(seed).uniform(0.1, 10, rotation.num_blocks).astype(np.float32)
    plain = normal(length, seed=seed)
    vector = torch.from_numpy(plain.copy())
    rotate_in_place(vector, rotation=rotation, bounds=bounds, max_weight=7)
    block_rms = unrotate_in_place(vector.numpy(), rotation=rotation, bounds=bounds, max_weight=7)
    # Four products of up to 8 terms and two scalings, each rounded, over at most two rotations.
    tolerance = 2 * (4 * 8 + 2) * EPSILON * float(np.linalg.norm(plain))
    assert np.all(np.abs(vector.numpy() - plain) <= tolerance)
    assert len(block_rms) == rotation.num_blocks
    sizes = np.full(rotation.num_blocks, rotation.block)
    sizes[-1] = length - (rotation.num_blocks - 1) * rotation.block
    norm = math.sqrt(float(np.sum(sizes * block_rms**2)))
    assert norm == pytest.approx(float(np.linalg.norm(plain)), rel=70 * EPSILON)


@given(LENGTHS, SMALL_BLOCKS)
def test_the_rotated_sum_is_the_sum_of_the_rotated_vectors(length: int, block_size: int) -> None:
    rotation = Rotation(seed=SEED, num_coordinates=length, block_size=block_size)
    a, b = normal(length, seed=1), normal(length, seed=2)
    error = rotated(a + b, rotation) - rotated(a, rotation) - rotated(b, rotation)
    size = float(np.linalg.norm(a) + np.linalg.norm(b))
    assert np.all(np.abs(error) <= 70 * EPSILON * size)


def test_one_large_coordinate_is_spread_evenly_over_its_block() -> None:
    rotation = Rotation(seed=SEED, num_coordinates=3 * 4096)
    values = np.zeros(3 * 4096, dtype=np.float32)
    values[5000] = 64.0
    spread = rotated(values, rotation)
    assert np.allclose(np.abs(spread[4096:8192]), 1.0, rtol=8 * EPSILON)
    assert not spread[:4096].any()
    assert not spread[8192:].any()


def test_another_seed_gives_another_rotation() -> None:
    plain = normal(256)
    one, other = (
        rotated(plain, Rotation(seed=bytes([i]) * 32, num_coordinates=256)) for i in (1, 2)
    )
    assert np.abs(one - other).max() > 0.1


def one_round(
    updates: NDArray[np.float32],
    *,
    weight: int,
    bounds: NDArray[np.float32],
    rotation: Rotation,
    ring_bits: RingBits = 16,
) -> tuple[NDArray[np.float32], int]:
    """Rotate, encode, add in the ring, decode, turn back."""
    max_weight = weight * len(updates)
    encoding = rotated_encoding(max_weight=max_weight, ring_bits=ring_bits)
    total = np.zeros(updates.shape[1], dtype=UNSIGNED[ring_bits])
    clipped = 0
    for at, update in enumerate(updates):
        vector = torch.from_numpy(update * np.float32(weight))
        rotate_in_place(
            vector, rotation=rotation, bounds=bounds, max_weight=max_weight, ring_bits=ring_bits
        )
        ring, num_clipped = encode_in_place(
            vector, weight=weight, encoding=encoding, random=np.random.default_rng(at)
        )
        total += ring.view(UNSIGNED[ring_bits])
        clipped += num_clipped
    mean = decode_mean(total, encoding=encoding, weight=max_weight)
    unrotate_in_place(
        mean, rotation=rotation, bounds=bounds, max_weight=max_weight, ring_bits=ring_bits
    )
    return mean, clipped


def relative(found: NDArray[np.float32], exact: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize(
    ("ring_bits", "num_devices", "stated"), [(16, 10, 6.2e-4), (16, 64, 4.0e-3), (8, 5, 0.08)]
)
@pytest.mark.parametrize("is_uneven", [False, True])
def test_the_error_of_few_bits_is_as_stated(
    ring_bits: RingBits, num_devices: int, stated: float, is_uneven: bool
) -> None:
    length = 5 * 4096 + 1234
    random = np.random.default_rng(7)
    updates = random.standard_normal((num_devices, length)).astype(np.float32)
    if is_uneven:  # coordinates of very different sizes within each block
        sizes = random.choice([0.01, 1.0, 30.0], p=[0.5, 0.45, 0.05], size=length)
        updates *= sizes.astype(np.float32)
    rotation = Rotation(seed=SEED, num_coordinates=length)
    exact = updates.astype(np.float64).mean(axis=0)
    # What the server would know from a round before: the rotated mean's RMS, and the spread.
    ones = first_bounds(rotation)
    turned = rotated(exact.astype(np.float32), rotation).astype(np.float32)
    block_rms = np.array(
        [math.sqrt(np.mean(turned[i : i + 4096] ** 2)) for i in range(0, length, 4096)]
    )
    spread = device_spread(
        num_devices=num_devices,
        squared_norms=float(np.sum(np.square(updates, dtype=np.float64))) * 100**2,
        weight=100 * num_devices,
        mean_norm=float(np.linalg.norm(exact)),
    )
    assert spread == pytest.approx(
        math.sqrt(num_devices), rel=0.05
    )  # as the devices are independent
    bounds = follow_bounds(ones, block_rms=block_rms, spread=spread, clipped=0.0)
    mean, num_clipped = one_round(
        updates, weight=100, bounds=bounds, rotation=rotation, ring_bits=ring_bits
    )
    # A normal variable is beyond 5 standard deviations with probability 5.7e-7.
    assert num_clipped <= max(20 * 5.7e-7, MAX_CLIPPED_FRACTION) * updates.size
    assert relative(mean, exact) == pytest.approx(stated, rel=0.15)


def test_without_the_rotation_the_error_of_16_bits_is_far_larger() -> None:
    random = np.random.default_rng(7)
    updates = random.standard_normal((10, 8192)) * random.lognormal(sigma=2.0, size=8192)
    updates = updates.astype(np.float32)
    exact = updates.astype(np.float64).mean(axis=0)
    encoding = plan_encoding(max_weight=10, clip=float(np.abs(updates).max()), ring_bits=16)
    total = np.zeros(8192, dtype=np.uint16)
    for at, update in enumerate(updates):
        ring, _ = encode_in_place(
            torch.from_numpy(update.copy()),
            weight=1,
            encoding=encoding,
            random=np.random.default_rng(at),
        )
        total += ring.view(np.uint16)
    assert relative(decode_mean(total, encoding=encoding, weight=10), exact) > 5 * 6.2e-4


def test_the_largest_error_is_below_the_stated_bound() -> None:
    rotation = Rotation(seed=SEED, num_coordinates=4096)
    updates = normal(5 * 4096).reshape(5, 4096)
    bounds = np.full(1, 6.0, dtype=np.float32)
    mean, num_clipped = one_round(updates, weight=3, bounds=bounds, rotation=rotation)
    assert not num_clipped
    error = rotated(mean, rotation) - rotated(updates.mean(axis=0), rotation)
    assert np.abs(error).max() <= 5 * 6.0 / STEPS + 200 * EPSILON * 64


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_leaves_the_vector_unchanged(bad: float) -> None:
    rotation = Rotation(seed=SEED, num_coordinates=100)
    vector = torch.ones(100)
    vector[99] = bad
    before = vector.numpy().tobytes()
    with pytest.raises(NonFiniteUpdate):
        rotate_in_place(vector, rotation=rotation, bounds=first_bounds(rotation), max_weight=1)
    assert vector.numpy().tobytes() == before


def test_encoding_detects_sums_that_overflow() -> None:
    rotation = Rotation(seed=SEED, num_coordinates=64)
    vector = torch.full((64,), 3e38)
    rotate_in_place(vector, rotation=rotation, bounds=first_bounds(rotation), max_weight=1)
    with pytest.raises(NonFiniteUpdate):
        encode_in_place(vector, weight=1, encoding=rotated_encoding(max_weight=1))


def test_rotating_takes_its_signs_and_less_than_a_megabyte_of_extra_memory() -> None:
    length = 2_000_000
    rotation = Rotation(seed=SEED, num_coordinates=length)
    vector, bounds = torch.zeros(length), first_bounds(rotation)
    tracemalloc.start()
    try:
        rotate_in_place(vector, rotation=rotation, bounds=bounds, max_weight=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < length / 8 + 2**20


@pytest.mark.parametrize(
    ("seed", "num_coordinates", "block_size"),
    [(b"", 1, 4), (SEED, 0, 4), (SEED, 1, 0), (SEED, 1, 3), (SEED, 1, -4)],
)
def test_an_invalid_rotation_is_refused(seed: bytes, num_coordinates: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=r"seed|power of two"):
        Rotation(seed=seed, num_coordinates=num_coordinates, block_size=block_size)


@pytest.mark.parametrize("bounds", [[1.0], [1.0, 0.0], [1.0, math.inf], [1.0, math.nan], [1, 1, 1]])
def test_invalid_bounds_are_refused(bounds: list[float]) -> None:
    rotation = Rotation(seed=SEED, num_coordinates=8192)
    with pytest.raises(ValueError, match="bounds"):
        rotate_in_place(
            torch.zeros(8192),
            rotation=rotation,
            bounds=np.array(bounds, dtype=np.float32),
            max_weight=1,
        )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_the_spread_is_at_least_one_and_one_for_equal_devices(weights: list[int]) -> None:
    plain = normal(16).astype(np.float64)
    total, squared = sum(weights), sum(w * w for w in weights)
    found = device_spread(
        num_devices=len(weights),
        squared_norms=squared * float(plain @ plain),
        weight=total,
        mean_norm=float(np.linalg.norm(plain)),
    )
    assert found == pytest.approx(math.sqrt(len(weights) * squared) / total)
    assert found >= 1
    if len(set(weights)) == 1:
        assert found == pytest.approx(1)


def test_a_mean_of_zero_has_spread_one_and_changes_no_bound() -> None:
    assert device_spread(num_devices=3, squared_norms=2.0, weight=5, mean_norm=0.0) == 1.0
    bounds = np.ones(4, dtype=np.float32)
    assert follow_bounds(bounds, block_rms=np.zeros(4), spread=1.0, clipped=1.0) is bounds


def test_bounds_follow_each_block_and_leave_room_for_small_ones() -> None:
    block_rms = np.array([1.0, 0.5, 0.0, 0.0])
    found = follow_bounds(np.ones(4, dtype=np.float32), block_rms=block_rms, spread=2.0, clipped=0)
    whole = math.sqrt(1.25 / 4)
    expected = (
        BOUND_FACTOR
        * 2.0
        * np.array([1.0, 0.5, MIN_RMS_FRACTION * whole, MIN_RMS_FRACTION * whole])
    )
    assert found == pytest.approx(expected, rel=1e-6)


def test_bounds_double_up_to_their_maximum_while_too_much_is_clipped() -> None:
    bounds = np.full(2, BOUND_FACTOR, dtype=np.float32)
    seen = []
    for _ in range(5):
        bounds = follow_bounds(bounds, block_rms=np.ones(2), spread=1.0, clipped=0.5)
        seen.append(float(bounds[0]) / BOUND_FACTOR)
    assert seen == [2, 4, MAX_GROWTH, MAX_GROWTH, MAX_GROWTH]
    at_rest = follow_bounds(bounds, block_rms=np.ones(2), spread=1.0, clipped=MAX_CLIPPED_FRACTION)
    assert at_rest.tolist() == [BOUND_FACTOR, BOUND_FACTOR]


@pytest.mark.parametrize("spread", [1.0, 1e30, 1e60])
def test_bounds_stay_acceptable_whatever_the_sum(spread: float) -> None:
    block_rms = np.array([1e20, 1e-300])
    found = follow_bounds(
        np.ones(2, dtype=np.float32), block_rms=block_rms, spread=spread, clipped=1
    )
    floor = Floor()
    assert ((found >= floor.min_clip) & (found <= floor.max_clip)).all()
