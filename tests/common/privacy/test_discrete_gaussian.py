"""The discrete Gaussian: its probabilities, and the comparisons that float64 cannot decide."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.common.privacy import discrete_gaussian
from headwater.common.privacy.discrete_gaussian import MAX_SIGMA, RandomBits, draw


def key(number: int) -> Callable[[int], bytes]:
    return lambda size: number.to_bytes(size, "little")


class GivenBits(RandomBits):
    """A stream that goes on with one word for ever."""

    def __init__(self, word: int) -> None:
        super().__init__(key(0))
        self._word = word

    def word(self) -> int:
        return self._word


def probabilities(sigma: int, most: int) -> NDArray[np.float64]:
    """Return those of -most..most, from the definition."""
    weights = np.exp(-(np.arange(-60 * sigma, 60 * sigma + 1) ** 2) / (2 * sigma**2))
    middle = 60 * sigma
    some: NDArray[np.float64] = weights[middle - most : middle + most + 1] / weights.sum()
    return some


@pytest.mark.parametrize("sigma", [1, 2, 5])
def test_each_integer_is_drawn_as_often_as_the_definition_says(sigma: int) -> None:
    number, most = 400_000, 3 * sigma
    drawn = draw(sigma, number, RandomBits(key(sigma)))
    expected = number * probabilities(sigma, most)
    counts = np.array([np.count_nonzero(drawn == k) for k in range(-most, most + 1)])
    chi_square = float((((counts - expected) ** 2) / expected).sum())
    freedom = 2 * most + 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("sigma", [1000, 1 << 20, MAX_SIGMA])
def test_the_variance_and_the_fourth_moment_are_those_of_the_parameter(sigma: int) -> None:
    number = 200_000
    scaled = draw(sigma, number, RandomBits(key(7))) / sigma
    assert abs(scaled.mean()) < 5 / math.sqrt(number)
    assert abs((scaled**2).mean() - 1) < 5 * math.sqrt(2 / number)
    assert abs((scaled**4).mean() - 3) < 5 * math.sqrt(96 / number)


@pytest.mark.parametrize(
    ("sigma", "size"), [(3, 0), (3, 1), (3, 100), (40_000, 2), (40_000, 10**6), (MAX_SIGMA, 12_345)]
)
def test_a_proposal_next_to_a_border_is_decided_by_further_bits(sigma: int, size: int) -> None:
    """U <= exp(-k / sigma) means at least k; the word at the border holds both cases."""
    with decimal.localcontext() as context:
        context.prec = 60
        border = (-decimal.Decimal(size) / sigma).exp() * 2**64
        word = min(math.floor(border), 2**64 - 1)
    words = np.array([word - 1, word, word], dtype=np.uint64)
    low, high = GivenBits(0), GivenBits(2**64 - 1)
    below = discrete_gaussian._geometric(sigma, words[:2], low)
    assert below[0] >= size
    if size:
        assert below[1] == size
        assert discrete_gaussian._geometric(sigma, words[2:], high)[0] == size - 1


@pytest.mark.parametrize("word", [0, 2**62, 2**63 - 1])
def test_the_slow_decision_is_the_exact_one(word: int) -> None:
    """exp(-1/2) 2^63 is no integer: a word below its floor is below it, one above is above."""
    with decimal.localcontext() as context:
        context.prec = 60
        chance = decimal.Decimal("-0.5").exp()
        expected = decimal.Decimal(word) / 2**63 < chance
    # (size - sigma)^2 / (2 sigma^2) is 1/2 at size 0 or 2 sigma.
    assert discrete_gaussian._exact_bernoulli_exp(8, 16, word, GivenBits(0)) is bool(expected)
    border = math.floor(chance * 2**63)
    assert discrete_gaussian._exact_bernoulli_exp(8, 0, border, GivenBits(0))
    assert not discrete_gaussian._exact_bernoulli_exp(8, 0, border, GivenBits(2**64 - 1))


def test_every_size_has_bits_of_its_own_unless_a_key_is_given() -> None:
    assert (draw(1000, 100, RandomBits()) != draw(1000, 100, RandomBits())).any()
    same = [draw(1000, 100, RandomBits(key(3))).tolist() for _ in range(2)]
    assert same[0] == same[1]


@pytest.mark.parametrize("sigma", [0, -1, MAX_SIGMA + 1])
def test_a_parameter_out_of_range_is_refused(sigma: int) -> None:
    with pytest.raises(ValueError, match="sigma"):
        draw(sigma, 1, RandomBits())
