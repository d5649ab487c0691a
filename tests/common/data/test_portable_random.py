"""Portable random numbers: exact guarantees, and distributions within computed bounds."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.data.portable_random import PortableRandom
from tests.commands import python

# A statistic may miss its bound once in 10^9 seeds; the seeds here are fixed.
RARE = 1e-9


def dkw(count: int) -> float:
    """Return the largest error of an empirical distribution of ``count`` numbers (Massart 1990)."""
    return math.sqrt(math.log(2 / RARE) / (2 * count))


def distance(numbers: np.ndarray, distribution: np.ndarray) -> float:
    """Return the Kolmogorov distance, given the true distribution at the sorted numbers."""
    steps = np.arange(len(numbers) + 1) / len(numbers)
    return float(max(np.max(steps[1:] - distribution), np.max(distribution - steps[:-1])))


@pytest.mark.slow
def test_a_seed_gives_the_same_numbers_in_another_process() -> None:
    code = (
        "from headwater.common.data.portable_random import PortableRandom; "
        "c = PortableRandom('a', 7, 0.3); "
        "print(c.permutation(9), c.sample(3, 1000), c.integers(5, 9)); "
        "print(c.normals(2), c.gamma(0.4))"
    )
    outputs = [python("-c", code, env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]
    assert outputs[0] == outputs[1] != ""


def test_uniform_numbers_are_the_upper_bits_of_numpy_s_stream() -> None:
    # The stream that numpy guarantees, and what its Generator makes of it today.
    rng = PortableRandom("a")
    same = np.random.Generator(rng._bits)
    state = rng._bits.state
    uniform = rng.uniform(100)
    rng._bits.state = state
    assert uniform.tolist() == same.random(100).tolist()


def test_other_seeds_give_other_numbers() -> None:
    names = [("a",), ("a", 1), ("a1",), ("a", 1, 1), ("a", 11), ("b",)]
    assert len({tuple(PortableRandom(*name).uniform(4)) for name in names}) == len(names)


@given(st.integers(1, 2**53), st.integers(0, 50))
def test_integers_are_below_their_bound(bound: int, seed: int) -> None:
    drawn = PortableRandom(seed).integers(bound, 50)
    assert drawn.min() >= 0
    assert drawn.max() < bound


@pytest.mark.parametrize("bound", [1, 3, 10, 2**31, 2**53 - 1, 2**53])
def test_the_largest_uniform_number_stays_below_every_bound(bound: int) -> None:
    assert int((1 - 2.0**-53) * bound) < bound


@given(st.integers(1, 300), st.data())
def test_a_sample_is_distinct_and_in_range(population: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, population))
    some = PortableRandom(count, population).sample(count, population)
    assert len(set(some.tolist())) == len(some) == count
    assert set(some.tolist()) <= set(range(population))


@pytest.mark.parametrize(("count", "population"), [(2, 5), (2, 9)])
def test_every_sample_is_equally_likely(count: int, population: int) -> None:
    # Of 9 two are drawn one by one, of 5 out of a permutation.
    sets = list(combinations(range(population), count))
    num_draws = 4000
    rng = PortableRandom("sets")
    seen = Counter(tuple(sorted(rng.sample(count, population).tolist())) for _ in range(num_draws))
    # Hoeffding, for each of the sets.
    bound = math.sqrt(math.log(2 * len(sets) / RARE) / (2 * num_draws))
    assert seen.keys() <= set(sets)
    assert max(abs(seen[one] / num_draws - 1 / len(sets)) for one in sets) < bound


def test_normal_numbers_are_normally_distributed() -> None:
    numbers = np.sort(PortableRandom("normal").normals(20_000))
    normal = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in numbers.tolist()])
    assert distance(numbers, normal) < dkw(20_000)


@pytest.mark.parametrize("shape", [0.5, 1.0, 2.0])
def test_gamma_numbers_are_gamma_distributed(shape: float) -> None:
    rng = PortableRandom("gamma", shape)
    numbers = np.sort([rng.gamma(shape) for _ in range(3000)])
    x = numbers
    # Gamma(1/2) is half a squared normal, Gamma(1) exponential, Gamma(2) the sum of two of these.
    told = {
        0.5: np.array([math.erf(math.sqrt(value)) for value in x.tolist()]),
        1.0: 1 - np.exp(-x),
        2.0: 1 - np.exp(-x) * (1 + x),
    }
    assert distance(numbers, told[shape]) < dkw(3000)
