"""Chance: what is promised of its numbers, held exactly or by bounds that are worked out."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headwater.common.data.portable_random import Chance

# A statistic may miss its bound once in 10^9 seeds; the seeds here are fixed.
RARE = 1e-9


def dkw(count: int) -> float:
    """How far the empirical distribution of ``count`` numbers may be off (Massart 1990)."""
    return math.sqrt(math.log(2 / RARE) / (2 * count))


def distance(numbers: np.ndarray, distribution: np.ndarray) -> float:
    """Return the Kolmogorov distance, given the true distribution at the sorted numbers."""
    steps = np.arange(len(numbers) + 1) / len(numbers)
    return float(max(np.max(steps[1:] - distribution), np.max(distribution - steps[:-1])))


def test_a_name_gives_the_same_numbers_in_another_process() -> None:
    said = [
        subprocess.run(
            [
                sys.executable,
                "-c",
                "from headwater.common.data.portable_random import Chance; c = Chance('a', 7, 0.3); "
                "print(c.order(9), c.some(3, 1000), c.below(5, 9), c.normals(2), c.gamma(0.4))",
            ],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] != ""


def test_shares_are_the_upper_bits_of_numpy_s_own_stream() -> None:
    # The stream that numpy guarantees, and what its Generator makes of it today.
    chance = Chance("a")
    same = np.random.Generator(chance._bits)
    state = chance._bits.state
    shares = chance.shares(100)
    chance._bits.state = state
    assert shares.tolist() == same.random(100).tolist()


def test_other_names_give_other_numbers() -> None:
    names = [("a",), ("a", 1), ("a1",), ("a", 1, 1), ("a", 11), ("b",)]
    assert len({tuple(Chance(*name).shares(4)) for name in names}) == len(names)


@given(st.integers(1, 2**53), st.integers(0, 50))
@hypothesis_settings(deadline=None, max_examples=50)
def test_numbers_below_a_bound_are_below_it(bound: int, seed: int) -> None:
    drawn = Chance(seed).below(bound, 50)
    assert drawn.min() >= 0
    assert drawn.max() < bound


@pytest.mark.parametrize("bound", [1, 3, 10, 2**31, 2**53 - 1, 2**53])
def test_the_largest_share_stays_below_every_bound(bound: int) -> None:
    assert int((1 - 2.0**-53) * bound) < bound


@given(st.integers(1, 300), st.data())
@hypothesis_settings(deadline=None, max_examples=50)
def test_some_are_different_and_in_range(population: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, population))
    some = Chance(count, population).some(count, population)
    assert len(set(some.tolist())) == len(some) == count
    assert set(some.tolist()) <= set(range(population))


@pytest.mark.parametrize(("count", "population"), [(2, 5), (2, 9)])
def test_every_set_is_as_likely(count: int, population: int) -> None:
    # Of 9 two are drawn one by one, of 5 out of a permutation.
    sets = list(combinations(range(population), count))
    num_draws = 4000
    chance = Chance("sets")
    seen = Counter(tuple(sorted(chance.some(count, population).tolist())) for _ in range(num_draws))
    # Hoeffding, for each of the sets.
    bound = math.sqrt(math.log(2 * len(sets) / RARE) / (2 * num_draws))
    assert seen.keys() <= set(sets)
    assert max(abs(seen[one] / num_draws - 1 / len(sets)) for one in sets) < bound


def test_normals_are_normal() -> None:
    numbers = np.sort(Chance("normal").normals(20_000))
    normal = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in numbers.tolist()])
    assert distance(numbers, normal) < dkw(20_000)


@pytest.mark.parametrize("shape", [0.5, 1.0, 2.0])
def test_gammas_are_gamma(shape: float) -> None:
    chance = Chance("gamma", shape)
    numbers = np.sort([chance.gamma(shape) for _ in range(3000)])
    x = numbers
    # Gamma(1/2) is half a squared normal, Gamma(1) exponential, Gamma(2) the sum of two of these.
    told = {
        0.5: np.array([math.erf(math.sqrt(value)) for value in x.tolist()]),
        1.0: 1 - np.exp(-x),
        2.0: 1 - np.exp(-x) * (1 + x),
    }
    assert distance(numbers, told[shape]) < dkw(3000)
