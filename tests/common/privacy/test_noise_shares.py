"""The shares of the noise: how much they sum to, what rounding adds, and that the ring holds it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import CohortTooSmall, MaskingTooWeak, RingCanWrap
from headwater.common.privacy.discrete_gaussian import MAX_SIGMA
from headwater.common.privacy.noise_shares import (
    MIN_SHARE,
    check_room,
    num_noisy,
    opened_multiplier,
    plain_scale_bits,
    plain_sigma,
    private_clip,
    sensitivity,
    share_sigma,
)
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.fixed_point import Encoding, encode_in_place, plan_encoding


def terms(**changes: float) -> PrivacyTerms:
    chosen: dict[str, Any] = {"norm_bound": 1.0, "noise_multiplier": 1.0}
    chosen |= {"min_survivors": 0.7, "corrupted": 0.1}
    return PrivacyTerms(**{**chosen, **changes})


def encoding(chosen: PrivacyTerms, weights: list[int], num_values: int) -> Encoding:
    clip = private_clip(chosen, weights, num_values)
    return plan_encoding(max_weight=sum(weights), clip=clip)


def test_the_worked_example() -> None:
    chosen, num_values = terms(), 10**6
    assert num_noisy(chosen, 100) == 60
    bits = encoding(chosen, [1] * 100, num_values).scale_bits
    assert bits == 24
    bound = sensitivity(chosen, scale_bits=bits, num_values=num_values)
    assert bound == 2**24 + 500
    sigma = share_sigma(chosen, scale_bits=bits, num_values=num_values, num_members=100)
    assert sigma == math.ceil(bound / math.sqrt(60))
    all_of_them = opened_multiplier(
        chosen, scale_bits=bits, num_values=num_values, num_members=100, num_survivors=100
    )
    assert all_of_them == pytest.approx(math.sqrt(90 / 60), rel=1e-6)


@given(
    num_members=st.integers(3, 2000),
    share=st.sampled_from([0.5, 0.7, 0.9, 1.0]),
    corrupted=st.sampled_from([0.0, 0.05, 0.1, 0.3]),
    z=st.floats(0.1, 50),
)
def test_the_fewest_survivors_still_sum_to_the_planned_noise(
    num_members: int, share: float, corrupted: float, z: float
) -> None:
    chosen = terms(noise_multiplier=z, min_survivors=share, corrupted=corrupted)
    least = math.ceil(round(share * num_members, 9))
    if least - max(1, math.ceil(round(corrupted * num_members, 9))) < 1:
        with pytest.raises(CohortTooSmall):
            num_noisy(chosen, num_members)
        return
    figures = {"scale_bits": 16, "num_values": 1000, "num_members": num_members}
    fewest = opened_multiplier(chosen, **figures, num_survivors=least)
    assert fewest >= z
    if least < num_members:
        assert opened_multiplier(chosen, **figures, num_survivors=least + 1) > fewest


@given(seed=st.integers(0, 10**6), bits=st.integers(-2, 12))
def test_rounding_lengthens_no_vector_beyond_the_sensitivity(seed: int, bits: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=257).astype(np.float32)
    values /= np.float32(np.linalg.norm(values.astype(np.float64)) * (1 + 1e-6))
    chosen = Encoding(ring_bits=32, scale_bits=bits, clip=1000.0, max_weight=1)
    ring, _ = encode_in_place(torch.from_numpy(values), weight=1, encoding=chosen)
    length = math.sqrt(float((ring.view(np.int32).astype(np.float64) ** 2).sum()))
    assert length <= sensitivity(terms(), scale_bits=bits, num_values=257)


@pytest.mark.parametrize("number", [3, 10, 100, 2000])
@pytest.mark.parametrize("z", [0.3, 1.0, 30.0])
@pytest.mark.parametrize("weights", ["alike", "unlike"])
def test_the_ring_holds_vectors_and_noise_and_would_not_in_finer_steps(
    number: int, z: float, weights: str
) -> None:
    chosen, num_values = terms(noise_multiplier=z, norm_bound=640.0), 10**5
    planned = [64 if weights == "alike" else 16 + i % 49 for i in range(number)]
    found = encoding(chosen, planned, num_values)
    check_room(chosen, found, num_values=num_values, num_members=number)
    assert found.bound(min(planned)) >= 640.0 * 2.0**found.scale_bits  # no vector is cut off
    finer = Encoding(
        ring_bits=32, scale_bits=found.scale_bits + 2, clip=found.clip / 5, max_weight=sum(planned)
    )
    if weights == "alike":
        with pytest.raises(RingCanWrap):
            check_room(chosen, finer, num_values=num_values, num_members=number)


def test_a_sum_at_the_edge_does_not_wrap() -> None:
    """Every vector has its whole norm in one coordinate, and the noise is at its bound."""
    chosen, num_values, number = terms(), 1, 10
    found = encoding(chosen, [1] * number, num_values)
    bits, figures = found.scale_bits, {"num_values": num_values, "num_members": number}
    sigma = share_sigma(chosen, scale_bits=bits, **figures)
    tail = math.sqrt(2 * (math.log(2) + 40 * math.log(2)))  # 2 exp(-t^2 / 2) = 2^-40
    total = number * 2**bits + math.floor(tail * sigma * math.sqrt(number))
    assert 2**28 < total < 2**31
    assert np.array([total]).astype(np.uint32).view(np.int32)[0] == total


def test_noise_of_few_steps_and_of_too_many_is_refused() -> None:
    figures = {"num_values": 1, "num_members": 100}
    with pytest.raises(MaskingTooWeak, match=f"at least {MIN_SHARE}"):
        share_sigma(terms(), scale_bits=3, **figures)
    with pytest.raises(MaskingTooWeak, match=f"{MAX_SIGMA:,}"):
        share_sigma(terms(), scale_bits=40, **figures)


@pytest.mark.parametrize("bound", [1e-12, 1.0, 3.7e9])
@pytest.mark.parametrize("z", [0.1, 1.0, 1000.0])
def test_a_plain_sum_has_all_the_noise_in_fine_steps(bound: float, z: float) -> None:
    chosen = PrivacyTerms(norm_bound=bound, noise_multiplier=z)
    bits = plain_scale_bits(chosen)
    sigma = plain_sigma(chosen, scale_bits=bits, num_values=10**6)
    assert sigma * 2.0**-bits >= z * bound
    assert sigma * 2.0**-bits <= z * bound * (1.1 if z <= 1 else 1.1 + z * 1e-3)


@pytest.mark.parametrize("number", [1, 16, 1000])
def test_examples_added_in_float32_stay_within_the_sensitivity(number: int) -> None:
    """The rounding of the additions is at its worst: every sum is near the next power of two."""
    chosen = terms(norm_bound=number * (1 + number * 2.0**-24), example_bound=1.0)
    assert chosen.max_examples == number
    values = np.full(number, 1 - 2.0**-24, np.float32)
    values[0] = 2.0**-25  # from here on each sum is rounded the other way
    found = []
    for first in (values[0], np.float32(0)):
        total = first
        for value in values[1:]:
            total = np.float32(total + value)
        found.append(np.rint(np.ldexp(float(total), 30)))
    moved = abs(found[0] - found[1])
    assert moved <= sensitivity(chosen, scale_bits=30, num_values=1)


@pytest.mark.parametrize("number", [3, 100, 2000])
def test_the_ring_holds_the_vectors_of_examples_and_their_noise(number: int) -> None:
    chosen, num_values = terms(norm_bound=64.0, example_bound=1.0, noise_multiplier=2.0), 10**5
    found = encoding(chosen, [64] * number, num_values)
    figures = {"num_values": num_values, "num_members": number}
    check_room(chosen, found, **figures)
    sigma = share_sigma(chosen, scale_bits=found.scale_bits, **figures)
    least = sigma * math.sqrt(num_noisy(chosen, number))
    assert least >= 2.0 * sensitivity(chosen, scale_bits=found.scale_bits, num_values=num_values)
    assert least < 2.2 * 2.0**found.scale_bits  # of an example's bound, not of a device's


def test_noise_for_each_example_is_as_fine_as_that_for_each_device() -> None:
    by_device, by_example = terms(norm_bound=1.0), terms(norm_bound=64.0, example_bound=1.0)
    assert plain_scale_bits(by_device) == plain_scale_bits(by_example)


def test_a_group_of_a_round_has_noise_for_all_colluders_of_the_round() -> None:
    """Of 100 devices 10 may collude, and a group of 20 may have them all: 4 of 14 are honest."""
    alone = PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0, min_survivors=0.7, corrupted=0.1)
    grouped = alone.model_copy(update={"min_colluding": 10})
    assert (num_noisy(alone, 20), num_noisy(grouped, 20)) == (12, 4)
    assert num_noisy(grouped, 100) == num_noisy(alone, 100) == 60
    with pytest.raises(CohortTooSmall):
        num_noisy(grouped, 14)
    assert alone.shared_text() != grouped.shared_text()
