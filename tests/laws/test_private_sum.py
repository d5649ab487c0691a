"""The law of private masked rounds: the opened sum is the plain sum and exactly the noise due.

Whoever drops out, at whatever phase, the noise in the sum has the distribution that the accountant
counts: that of as many shares as there are survivors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.client.secagg.noise_share import add_bit_noise
from headwater.common.errors import CohortTooSmall, MaskingTooWeak, TooFewSurvivors
from headwater.common.privacy.clip_bit import bit_steps
from headwater.common.privacy.noise_shares import (
    bit_share_sigma,
    opened_multiplier,
    sensitivity,
    share_sigma,
)
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.masked_numbers import CLIP_BIT
from headwater.common.secagg.protocol import NUM_CLIPPED
from headwater.server.secagg.unmask_phase import UnmaskedSum
from tests.faults import FaultPlan
from tests.secagg import Cast, Played, name_of

TERMS = PrivacyTerms(norm_bound=8.0, noise_multiplier=1.5, min_survivors=0.7, corrupted=0.1)
NUM_VALUES = 20_000


def random_of(name: str) -> Callable[[int], bytes]:
    """Return a device's randomness: a stream of its own, the same in every run of the tests."""
    count = 0

    def random(size: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_128(f"{name} {count}".encode()).digest(size)

    return random


def cast_of(
    number: int,
    *,
    mode: str = "semi-honest",
    terms: PrivacyTerms = TERMS,
    num_values: int = NUM_VALUES,
) -> Cast:
    """Return devices with short vectors, which no ring cuts off."""
    names = [name_of(at) for at in range(number)]
    cast = Cast(
        number,
        mode=mode,
        num_values=num_values,
        random=random_of,
        privacy=terms,
        device={name: {"privacy": terms} for name in names},
    )
    for at, name in enumerate(names):
        values = np.random.default_rng(at).normal(size=num_values)
        values *= TERMS.norm_bound / 8 / np.linalg.norm(values)
        cast.give(name, values.astype(np.float32))
    return cast


def noise_in(cast: Cast, opened: UnmaskedSum) -> NDArray[np.int64]:
    plain_P, _ = cast.plain_sum(opened.survived, opened)
    return (opened.vector_P - plain_P).view(np.int32).astype(np.int64)


def chi_square(noise: NDArray[np.int64], sigma: float, num_bins: int = 32) -> float:
    """Return chi-square over bins that a normal of this sigma fills alike.

    The sum of discrete Gaussians of 10^5 steps and more is one to less than 10^-4 of a bin.
    """
    parts = np.array([math.erf(x / math.sqrt(2)) / 2 + 0.5 for x in np.sort(noise / sigma)])
    counts, _ = np.histogram(parts, bins=num_bins, range=(0, 1))
    expected = len(noise) / num_bins
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize(
    ("drops", "mode"),
    [
        ({}, "semi-honest"),
        ({}, "active"),
        ({1: None}, "semi-honest"),
        ({1: "advertise_keys"}, "semi-honest"),
        ({1: "share_keys"}, "semi-honest"),
        ({1: "check_shares", 2: "check_shares", 3: "check_shares"}, "semi-honest"),
        ({1: "masked_update", 2: "check_shares"}, "semi-honest"),
        ({1: "consistency", 2: "check_shares"}, "active"),
    ],
)
def test_the_noise_of_an_opened_sum_has_the_distribution_that_is_accounted_for(
    drops: dict[int, str | None], mode: str
) -> None:
    check_noise(TERMS, drops, mode)


def test_noise_for_single_examples_has_the_distribution_that_is_accounted_for() -> None:
    check_noise(
        TERMS.model_copy(update={"example_bound": 0.25}), {1: "check_shares"}, "semi-honest"
    )


def check_noise(terms: PrivacyTerms, drops: dict[int, str | None], mode: str) -> None:
    cast, plan = cast_of(10, mode=mode, terms=terms), FaultPlan()
    for number, after in drops.items():
        plan = plan.drop(client=name_of(number), after=after)
    opened = cast.play(plan).sum
    num_members = len(opened.survived) + len(opened.dropped)
    bits = opened.session.parameters.encoding.scale_bits
    figures = {"scale_bits": bits, "num_values": NUM_VALUES, "num_members": num_members}
    sigma = share_sigma(terms, **figures)
    noise = noise_in(cast, opened)
    total = sigma * math.sqrt(len(opened.survived))
    freedom = 31
    assert chi_square(noise, total) < freedom + 5 * math.sqrt(2 * freedom)
    assert chi_square(noise, total * 1.05) > freedom + 5 * math.sqrt(2 * freedom)
    # One survivor is assumed to know its own share: what is counted is the rest.
    counted = opened_multiplier(terms, **figures, num_survivors=len(opened.survived))
    bound = sensitivity(terms, scale_bits=bits, num_values=NUM_VALUES)
    assert counted * bound == pytest.approx(sigma * math.sqrt(len(opened.survived) - 1))
    assert counted >= terms.noise_multiplier


BITS = TERMS.model_copy(update={"bit_multiplier": 6.0})


def _random_in(session: int, name: str) -> Callable[[int], bytes]:
    return random_of(f"{session} {name}")


@pytest.mark.parametrize(
    ("mode", "number"),
    [("semi-honest", 60), pytest.param("active", 200, marks=pytest.mark.slow)],
)
def test_the_sum_of_bits_has_the_noise_of_as_many_shares_as_there_are_survivors(
    mode: str, number: int
) -> None:
    """In many sessions of 5 devices, one of which drops out before it masks."""
    noise, bits = [], [1 if at % 3 else -1 for at in range(5)]
    for session in range(number):
        cast = Cast(
            5,
            mode=mode,
            num_values=2,
            random=partial(_random_in, session),
            privacy=BITS,
            device={name_of(at): {"privacy": BITS} for at in range(5)},
        )
        for name in cast.names:
            cast.give(name, np.zeros(2, np.float32))
        opened = cast.play(FaultPlan().drop(client=name_of(2), after="check_shares")).sum
        noise.append(opened.numbers[CLIP_BIT] - sum(bits) + bits[2])
    # Of 5 members 4 survive and 1 colludes: each share is z_b / sqrt(3), and there are 4.
    sigma = bit_share_sigma(BITS, num_members=5) / bit_steps(BITS)
    assert sigma == pytest.approx(6.0 / math.sqrt(3), rel=1e-6)
    found = float((np.array(noise) ** 2).sum() / (4 * sigma**2))
    assert abs(found - number) < 5 * math.sqrt(2 * number)
    assert len(set(noise)) == number


def test_a_device_s_share_of_the_bits_noise_has_the_distribution_that_is_accounted_for() -> None:
    opened = cast_of(5, terms=BITS, num_values=2).play().sum
    parameters, random = opened.session.parameters, random_of("a device")
    at = [scalar.name for scalar in parameters.scalars].index(CLIP_BIT)
    drawn = np.zeros((8_000, len(parameters.scalars)), np.uint64)
    for scalars in drawn:
        add_bit_noise(scalars, BITS, parameters, num_members=5, random=random)
    shares = drawn[:, at].view(np.int64)
    freedom, sigma = 31, bit_share_sigma(BITS, num_members=5)
    assert chi_square(shares, sigma) < freedom + 5 * math.sqrt(2 * freedom)
    assert chi_square(shares, sigma * 1.05) > freedom + 5 * math.sqrt(2 * freedom)
    assert not np.delete(drawn, at, axis=1).any()


def test_an_update_that_is_not_finite_adds_zero_to_the_sum_of_bits() -> None:
    """A private device sends none (it masks zeros, with a bit of 1); the sum is well-defined."""
    quiet = BITS.model_copy(update={"noise_multiplier": 0.01, "bit_multiplier": 0.02})
    cast = cast_of(5, terms=quiet, num_values=2)
    cast.give(name_of(1), np.full(2, math.nan, np.float32))
    opened = cast.play().sum
    others = sum(1 if at % 3 else -1 for at in range(5) if at != 1)
    assert round(opened.numbers[CLIP_BIT]) == others


def test_the_numbers_of_a_private_session_hide_how_many_values_were_clipped() -> None:
    cast = cast_of(4, num_values=3)
    for name in cast.names:
        cast.give(name, np.full(3, 1e9, np.float32))
    assert cast.play().sum.numbers[NUM_CLIPPED] == 0


def test_a_device_draws_other_noise_in_each_session() -> None:
    sums = []
    for _ in range(2):
        cast = Cast(
            3,
            num_values=100,
            privacy=TERMS,
            device={name_of(at): {"privacy": TERMS} for at in range(3)},
        )
        for name in cast.names:
            cast.give(name, np.zeros(100, np.float32))
        sums.append(cast.play().sum.vector_P)
    assert (sums[0] != sums[1]).any()


def test_a_session_in_which_no_honest_noise_would_be_left_is_refused() -> None:
    terms = PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0, min_survivors=0.3)
    with pytest.raises(CohortTooSmall, match="none is left to hide"):
        cast_of(3, terms=terms, num_values=3).play()


@pytest.mark.parametrize("changes", [{"min_survivors": 0.9}, {"corrupted": 0.05}])
def test_a_device_refuses_noise_that_counts_on_more_than_the_device_does(
    changes: dict[str, float],
) -> None:
    fields: dict[str, Any] = {"norm_bound": 8.0, "noise_multiplier": 1.5}
    fields |= {"min_survivors": 0.7, "corrupted": 0.1}
    played = Played()
    with pytest.raises(TooFewSurvivors):
        cast_of(5, terms=PrivacyTerms(**{**fields, **changes}), num_values=3).play_into(
            played, FaultPlan()
        )
    assert {type(error) for error in played.refused.values()} == {MaskingTooWeak}
