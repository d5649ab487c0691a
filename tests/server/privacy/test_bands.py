"""Correlated noise against the explicit matrix: sensitivity, exactness, covariance, epsilon."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

from headwater.common.privacy.discrete_gaussian import RandomBits, draw
from headwater.common.privacy.noise_shares import sensitivity
from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import PrivacyTerms, rho_of
from headwater.server.privacy.banded_noise import BandedNoise
from headwater.server.privacy.bands import (
    banded_scale_bits,
    banded_sigma,
    coefficients,
    correlated,
    norm,
)

UNIT = 64
TERMS = PrivacyTerms(norm_bound=3.0, noise_multiplier=2.0)
Matrix = NDArray[np.float64]


def matrix(bands: int, rounds: int) -> Matrix:
    """Return C, in steps of 1/64."""
    found = np.zeros((rounds, rounds))
    for k, multiple in enumerate(coefficients(bands)[:rounds]):
        found += np.diag(np.full(rounds - k, float(multiple)), -k)
    return found


def prefix_error(bands: int, rounds: int) -> float:
    """Return the prefix sums' error (root of the mean square) of noise with one epsilon."""
    rows = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix(bands, rounds)) * norm(bands)
    return math.sqrt(float((rows**2).sum()) / rounds)


def test_the_coefficients_are_those_of_the_square_root_to_half_a_step() -> None:
    assert coefficients(4) == (64, 32, 24, 20)
    exact = [math.comb(2 * k, k) / 4**k * UNIT for k in range(200)]
    assert max(abs(c - e) for c, e in zip(coefficients(200), exact, strict=True)) <= 0.5
    root = matrix(200, 200) / UNIT
    assert np.abs(root @ root - np.tril(np.ones((200, 200)))).max() < 0.1


@pytest.mark.parametrize(("bands", "rounds"), [(2, 7), (3, 9), (4, 10)])
def test_the_sensitivity_is_that_of_the_explicit_matrix(bands: int, rounds: int) -> None:
    """Over all ways to take part, with vectors of norm 1 in the worst and in random directions."""
    full, random = matrix(bands, rounds), np.random.default_rng(0)
    for times in range(1, -(-rounds // bands) + 1):
        largest = 0.0
        for taken in itertools.combinations(range(rounds), times):
            if any(after - before < bands for before, after in itertools.pairwise(taken)):
                continue
            for vectors in (np.ones((times, 1)), random.normal(size=(times, 3))):
                change = np.zeros((rounds, vectors.shape[1]))
                change[list(taken)] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
                largest = max(largest, float(np.linalg.norm(full @ change)))
        bound = math.sqrt(times) * norm(bands)
        assert largest <= bound * (1 + 1e-12)
        assert largest >= bound * 0.9  # the last columns are cut off
    close = np.zeros((rounds, 1))
    close[[0, bands - 1]] = 1
    assert np.linalg.norm(full @ close) > math.sqrt(2) * norm(bands)  # it takes that distance


@pytest.mark.parametrize("bands", [2, 5, 16])
def test_what_is_released_is_a_function_of_sums_with_independent_noise_alone(bands: int) -> None:
    """Exactly, in integers: y = C X + Z gives X + W without knowing X, Z or W."""
    random, rounds = np.random.default_rng(1), 40
    sums = random.integers(-(2**40), 2**40, (rounds, 3))
    fresh = random.integers(-(2**28), 2**28, (rounds, 3))
    multiples = coefficients(bands)
    before: list[NDArray[np.int32]] = []
    for z in fresh:
        w = correlated(z.copy(), before[: bands - 1], multiples)
        before.insert(0, w.astype(np.int32))
    used = sums + np.array(before[::-1])
    full = matrix(bands, rounds).astype(np.int64)
    released = full @ sums + fresh
    again: list[NDArray[np.int64]] = []
    for y in released:
        rest = y - sum(c * earlier for c, earlier in zip(multiples[1:], again[::-1], strict=False))
        again.append((rest + UNIT // 2) // UNIT)
    np.testing.assert_array_equal(np.array(again), used)
    exact = np.linalg.solve(full.astype(float), fresh.astype(float))
    reach = np.abs(np.linalg.inv(full / UNIT)).sum(axis=1).max() / 2  # of half a step a round
    assert np.abs(np.array(before[::-1]) - exact).max() <= reach + 1e-3


def test_one_band_is_independent_noise() -> None:
    fresh = np.arange(-200, 200)
    np.testing.assert_array_equal(correlated(UNIT * fresh, [], coefficients(1)), fresh)
    assert norm(1) == UNIT


def stream(seed: int = 0) -> Callable[[int], bytes]:
    generator = np.random.default_rng(seed)
    return lambda size: generator.bytes(size)


def drawn(bands: int, rounds: int, num_values: int) -> tuple[NDArray[np.int64], int]:
    """Return the noise that a run's sums get [rounds, P], and the parameter of Z."""
    noise = BandedNoise(
        bands, multiplier=2.0, most=None, num_values=num_values, folder=None, random=stream()
    )
    bits = noise.scale_bits(TERMS)
    rows = [noise.next([f"d{at}"])(num_values) for at in range(rounds)]
    sigma = banded_sigma(TERMS, bands=bands, scale_bits=bits, num_values=num_values)
    return np.array(rows), sigma


def test_the_noise_of_rounds_has_the_covariance_of_the_explicit_matrix() -> None:
    bands, rounds, number = 4, 7, 40_000
    noise, sigma = drawn(bands, rounds, number)
    inverse = np.linalg.inv(matrix(bands, rounds))
    expected = sigma**2 * inverse @ inverse.T
    found = noise @ noise.T.astype(float) / number
    # of a product of two normal variables, over the coordinates
    spread = np.sqrt((expected**2 + np.outer(np.diag(expected), np.diag(expected))) / number)
    assert (np.abs(found - expected) < 5 * spread).all()
    assert expected[1, 0] < -5 * spread[1, 0]  # and that is not the covariance of independent noise


def test_the_noise_is_made_of_independent_draws_as_the_accountant_counts_them() -> None:
    noise, sigma = drawn(3, 4, 20_000)
    fresh = matrix(3, 4) @ noise / sigma
    parts = np.array([math.erf(x / math.sqrt(2)) / 2 + 0.5 for x in fresh.ravel()])
    counts, _ = np.histogram(parts, bins=32, range=(0, 1))
    expected = fresh.size / 32
    assert float(((counts - expected) ** 2 / expected).sum()) < 31 + 5 * math.sqrt(2 * 31)


@pytest.mark.parametrize("bands", [2, 16, 100])
@pytest.mark.parametrize(("z", "num_values"), [(0.5, 10), (1.0, 10**6), (10.0, 10**7)])
def test_a_device_that_takes_part_k_times_has_the_epsilon_of_the_whole_matrix(
    bands: int, z: float, num_values: int
) -> None:
    """One Gaussian with the matrix's sensitivity, by an accountant with orders of its own."""
    terms = PrivacyTerms(norm_bound=3.0, noise_multiplier=z)
    bits = banded_scale_bits(terms, bands=bands)
    sigma = banded_sigma(terms, bands=bands, scale_bits=bits, num_values=num_values)
    hidden = norm(bands) * sensitivity(terms, scale_bits=bits, num_values=num_values)
    for times in (1, 10):
        accountant = RdpAccountant()
        accountant.compose(GaussianDpEvent(sigma / (math.sqrt(times) * hidden)))
        found = accountant.get_epsilon(1e-5)
        assert epsilon_of(times * rho_of(z), delta=1e-5) == pytest.approx(found, rel=0.01)


def test_the_prefix_sums_are_closer_than_with_independent_noise_at_the_same_epsilon() -> None:
    ratios = [prefix_error(1, 200) / prefix_error(bands, 200) for bands in (2, 4, 8, 16)]
    assert ratios == pytest.approx([1.335, 1.762, 2.285, 2.874], abs=2e-3)
    bands, rounds, number = 16, 60, 2_000
    noise, sigma = drawn(bands, rounds, number)
    independent = draw(sigma // UNIT, rounds * number, RandomBits(stream(1)))
    alone = independent.reshape(rounds, number) * UNIT / norm(bands)  # z D, as |c| z D = sigma
    errors = [math.sqrt(float((np.cumsum(one, axis=0) ** 2).mean())) for one in (alone, noise)]
    assert errors[0] / errors[1] == pytest.approx(
        prefix_error(1, 60) / prefix_error(16, 60), rel=0.1
    )
