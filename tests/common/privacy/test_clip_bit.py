"""The bit on the clip norm: what it costs with the vector, its noise, and what follows from it."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.privacy.clip_bit import (
    RATE,
    bit_multiplier_of,
    bit_scalar,
    bit_sigma,
    bit_steps,
    next_clip,
)
from headwater.common.privacy.discrete_gaussian import RandomBits, draw
from headwater.common.privacy.noise_shares import (
    bit_share_sigma,
    opened_multiplier,
    plain_scale_bits,
    plain_sigma,
    sensitivity,
    share_sigma,
)
from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import PrivacyTerms, joint_multiplier

NUM_VALUES = 10_000


def terms(z: float, num_devices: int) -> PrivacyTerms:
    return PrivacyTerms(
        norm_bound=3.0,
        noise_multiplier=z,
        min_survivors=0.7,
        corrupted=0.1,
        bit_multiplier=bit_multiplier_of(z, num_devices=num_devices),
    )


@pytest.mark.parametrize(("z", "num_devices"), [(0.5, 100), (1.0, 10), (10.0, 100), (40.0, 1000)])
@pytest.mark.parametrize("rounds", [1, 100])
def test_rounds_with_bits_have_the_epsilon_of_two_gaussian_sums_each(
    z: float, num_devices: int, rounds: int
) -> None:
    """An accountant of its own orders composes what is really drawn, over what it hides."""
    chosen = terms(z, num_devices)
    bits = plain_scale_bits(chosen)
    hidden = sensitivity(chosen, scale_bits=bits, num_values=NUM_VALUES)
    accountant = RdpAccountant()
    vectors = plain_sigma(chosen, scale_bits=bits, num_values=NUM_VALUES) / hidden
    accountant.compose(GaussianDpEvent(vectors), rounds)
    accountant.compose(GaussianDpEvent(bit_sigma(chosen) / bit_steps(chosen)), rounds)
    found = accountant.get_epsilon(1e-5)
    assert epsilon_of(rounds * chosen.rho, delta=1e-5) == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize(
    ("z", "num_devices", "bit", "vector"),
    [(10.0, 100, 40.0, 10.328), (1.0, 100, 10.0, 1.00504), (1.0, 1000, 100.0, 1.00005)],
)
def test_the_worked_multipliers(z: float, num_devices: int, bit: float, vector: float) -> None:
    chosen = terms(z, num_devices)
    assert chosen.bit_multiplier == bit
    assert chosen.vector_multiplier == pytest.approx(vector, rel=1e-5)
    assert joint_multiplier(chosen.vector_multiplier, bit) == pytest.approx(z)


def test_bits_that_cost_the_whole_round_are_no_terms() -> None:
    with pytest.raises(ValueError, match="cost more than a round"):
        PrivacyTerms(norm_bound=1.0, noise_multiplier=2.0, bit_multiplier=2.0)


def test_terms_with_other_bits_have_another_text() -> None:
    chosen = [terms(2.0, number) for number in (10, 1000)]
    plain = PrivacyTerms(norm_bound=3.0, noise_multiplier=2.0, min_survivors=0.7, corrupted=0.1)
    assert len({one.shared_text() for one in (*chosen, plain)}) == 3


@given(
    num_members=st.integers(5, 500),
    z=st.floats(0.1, 50),
    survivors=st.floats(0.7, 1.0),
)
def test_an_opened_sum_with_bits_costs_no_more_than_its_terms(
    num_members: int, z: float, survivors: float
) -> None:
    chosen = terms(z, num_members)
    figures = {"scale_bits": 20, "num_values": NUM_VALUES, "num_members": num_members}
    num_survivors = math.ceil(survivors * num_members)
    found = opened_multiplier(chosen, **figures, num_survivors=num_survivors)
    assert found >= z
    honest = math.sqrt(num_survivors - max(1, math.ceil(num_members / 10)))
    hidden = sensitivity(chosen, scale_bits=20, num_values=NUM_VALUES)
    vectors = share_sigma(chosen, **figures) * honest / hidden
    bits = bit_share_sigma(chosen, num_members=num_members) * honest / bit_steps(chosen)
    assert 1 / found**2 == pytest.approx(1 / vectors**2 + 1 / bits**2)


@given(z=st.floats(0.01, 1e6), num_devices=st.integers(1, 2**24))
def test_all_bits_with_their_noise_fit_into_a_masked_number(z: float, num_devices: int) -> None:
    chosen = terms(z, num_devices)
    scalar = bit_scalar(chosen, num_devices=num_devices)  # refuses what could wrap
    assert scalar.bound * bit_steps(chosen) >= bit_steps(chosen) + 8 * bit_sigma(chosen) * 0.999
    assert bit_sigma(chosen) >= 8


def test_the_clip_norm_moves_as_the_paper_says_and_never_far() -> None:
    assert next_clip(2.0, share=0.5, quantile=0.5) == 2.0
    assert next_clip(2.0, share=1.0, quantile=0.5) == pytest.approx(2 * math.exp(-RATE / 2))
    assert next_clip(2.0, share=0.0, quantile=0.5) == pytest.approx(2 * math.exp(RATE / 2))
    assert next_clip(2.0, share=-1e9, quantile=0.5) == pytest.approx(2 * math.exp(RATE))
    assert next_clip(2.0, share=1e9, quantile=0.5) == pytest.approx(2 * math.exp(-RATE))
    assert next_clip(1e-15, share=1.0, quantile=0.1) == 1e-15
    assert next_clip(1e15, share=0.0, quantile=0.9) == 1e15


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("start", [0.01, 100.0])
def test_the_clip_norm_reaches_the_true_quantile_of_known_norms(
    quantile: float, start: float
) -> None:
    """200 devices, z = 4: one round's share has a standard deviation of 0.05."""
    norms = np.random.default_rng(0).lognormal(0.0, 1.0, 200)
    chosen = terms(4.0, len(norms))
    bits = RandomBits(lambda size: hashlib.shake_128(b"noise").digest(size))
    noise = draw(bit_sigma(chosen), 400, bits) / bit_steps(chosen)
    clip, last = start, list[float]()
    for one in noise.tolist():
        total = float(np.where(norms <= clip, 1, -1).sum()) + one
        clip = next_clip(clip, share=(total / len(norms) + 1) / 2, quantile=quantile)
        last = [*last[-199:], math.log(clip)]
    reached = float((norms <= math.exp(sum(last) / len(last))).mean())
    assert reached == pytest.approx(quantile, abs=0.03)
