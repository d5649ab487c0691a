"""The norms that layers tell, held against vectors in float64.

A product of pairs has I + O terms in float32, and a square sums them over pairs in float64. So a
square lies within (I + O + 2) 2^-24 of the square of the summed sizes of what the examples add.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from headwater.simulation.compute import gradient_norms as squares
from headwater.simulation.compute.gradient_norms import Squares
from headwater.simulation.compute.padding import alike, is_in_order, padded, runs, taken

Ints = NDArray[np.int64]
EPS = 2.0**-24

# The examples of each step, device by device.
COHORT = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=6)


def columns(cohort: list[list[int]]) -> tuple[Ints, Ints]:
    sizes = np.array([size for steps in cohort for size in steps])
    return sizes, np.array([len(steps) for steps in cohort])


def grown(of_each_NP: Tensor, cohort: list[list[int]]) -> tuple[list[float], list[float]]:
    """Return norms behind each step, in float64, and the summed norms of the examples till then."""
    norms, summed, start = [], [], 0
    for steps in cohort:
        total, size = torch.zeros_like(of_each_NP[0]), 0.0
        for count in steps:
            own = of_each_NP[start : start + count]
            total = total + own.sum(0)
            size += float(own.norm(dim=1).sum())
            norms.append(float(total.norm()))
            summed.append(size)
            start += count
    return norms, summed


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "inputs", "outputs"), [(1, 40, 50), (1, 3, 2), (3, 60, 70)])
@settings(max_examples=15, deadline=None)
@given(cohort=COHORT, seed=st.integers(0, 99))
def test_a_layer_tells_the_norms_of_its_gradients(
    cohort: list[list[int]], seed: int, num_tokens: int, inputs: int, outputs: int, has_bias: bool
) -> None:
    sizes, num_steps = columns(cohort)
    random = torch.Generator().manual_seed(seed)
    entering = torch.randn(int(sizes.sum()), num_tokens, inputs, generator=random)
    back = torch.randn(int(sizes.sum()), num_tokens, outputs, generator=random)
    told = Squares(sizes, num_steps)
    weight = told.add_linear(entering, back, has_bias=has_bias)
    gradients = torch.einsum("nto,nti->noi", back.double(), entering.double()).flatten(1)
    if weight is not None:  # the layer's own gradient came by
        whole = gradients.sum(0).view(outputs, inputs)
        assert torch.allclose(weight.double(), whole, rtol=0, atol=1e-5 * float(whole.norm()))
    if has_bias:
        gradients = torch.cat([gradients, back.double().sum(1)], dim=1)
    norms, _ = grown(gradients, cohort)
    # Of the examples' tokens, each of which is a term of its own.
    of_tokens = back.double().norm(dim=2) * (entering.double().norm(dim=2) ** 2 + 1).sqrt()
    _, summed = grown(of_tokens.sum(1, keepdim=True), cohort)
    for found, expected, size in zip(told.norms(), norms, summed, strict=True):
        assert found**2 == pytest.approx(
            expected**2, rel=0, abs=(inputs + outputs + 2) * EPS * size**2
        )


def test_a_layer_is_told_by_pairs_or_by_gradients_whichever_takes_less() -> None:
    ways = []

    class Noted(Squares):
        def _add_pairs(self, *_: object) -> None:
            ways.append("pairs")

        def _add_gradients(self, *given: Tensor) -> Tensor:
            ways.append("gradients")
            return given[0]

    noted = Noted(np.array([5, 5, 5]), np.array([3]))
    # 15 examples in 3 steps: 15 x 15 x (64 + 128) < 16 x 3 x 64 x 128, and with 40 tokens each
    # 15 x 600 x 40 x (64 + 128) is more.
    noted.add_linear(torch.zeros(15, 1, 64), torch.zeros(15, 1, 128), has_bias=True)
    noted.add_linear(torch.zeros(15, 40, 64), torch.zeros(15, 40, 128), has_bias=True)
    assert ways == ["pairs", "gradients"]


@settings(max_examples=15, deadline=None)
@given(cohort=COHORT, seed=st.integers(0, 99))
def test_parts_of_a_model_add_up_however_much_is_held_at_once(
    cohort: list[list[int]], seed: int
) -> None:
    sizes, num_steps = columns(cohort)
    random = torch.Generator().manual_seed(seed)
    num_examples = int(sizes.sum())
    of_each = torch.randn(num_examples, 7, generator=random)
    entering = torch.randn(num_examples, 1, 3, generator=random)
    back = torch.randn(num_examples, 1, 2, generator=random)
    found = []
    ways = product((1, 100, squares.HELD_BYTES), (0, 10**6), (1, squares.LARGE))
    for held_bytes, written, large in ways:
        told = Squares(sizes, num_steps)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(squares, "HELD_BYTES", held_bytes)
            patch.setattr(squares, "PAIRS_BYTES", held_bytes)
            patch.setattr(squares, "WRITTEN", written)
            patch.setattr(squares, "LARGE", large)
            told.add_linear(entering, back, has_bias=False)
        told.add_vectors(of_each)
        found.append(told.norms())
    outer = torch.einsum("nto,nti->noi", back, entering).flatten(1)
    norms, summed = grown(torch.cat([outer, of_each], dim=1).double(), cohort)
    for values in found:
        for value, expected, size in zip(values, norms, summed, strict=True):
            bound = 2 * (num_examples + 10) * EPS * size**2
            assert value**2 == pytest.approx(expected**2, rel=0, abs=bound)


def test_what_cancels_out_has_the_norm_zero_and_what_is_not_finite_is_its_own_device_s() -> None:
    told = Squares(np.array([1, 1, 1, 1]), np.array([2, 2]))
    entering = torch.ones(4, 1, 30)
    back = torch.ones(4, 1, 20)
    back[1] = -1
    back[3, 0, 0] = torch.nan
    told.add_linear(entering, back, has_bias=False)
    norms = told.norms()
    assert norms[0] == pytest.approx((30 * 20) ** 0.5)
    assert norms[1] == 0
    assert np.isfinite(norms).tolist() == [True, True, True, False]


def test_squares_beyond_float32_are_finite() -> None:
    told = Squares(np.array([1]), np.array([1]))
    told.add_linear(torch.full((1, 1, 30), 1e18), torch.full((1, 1, 20), 1e18), has_bias=False)
    # Each product of a layer's side is finite in float32; the square of the norm is not.
    assert told.norms()[0] == pytest.approx((30 * 20) ** 0.5 * 1e36)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 60))
def test_groups_of_nearly_the_same_size_hold_each_once(sizes: list[int], at_once: int) -> None:
    column = np.array(sizes)
    groups = list(alike(column, at_once))
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(sizes)))
    for group in groups:
        assert column[group].min() >= 0.75 * column[group].max()
        assert len(group) == 1 or len(group) * column[group].max() <= at_once


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 60))
def test_runs_lie_one_behind_the_other_and_are_as_long_as_they_may_be(
    sizes: list[int], most: int
) -> None:
    cuts = list(runs(np.array(sizes), most))
    assert [at for cut in cuts for at in range(cut.start, cut.stop)] == list(range(len(sizes)))
    for cut in cuts:
        assert cut.stop - cut.start == 1 or sum(sizes[cut]) <= most
        assert cut.stop == len(sizes) or sum(sizes[cut.start : cut.stop + 1]) > most


def test_rows_that_lie_side_by_side_already_are_not_copied() -> None:
    values = torch.arange(12.0).view(6, 2)
    index, mask = padded(np.array([2, 4]), np.array([2, 2]))
    assert mask.all()
    assert is_in_order(index)
    assert taken(values, index).data_ptr() == values[2:].data_ptr()
    index, mask = padded(np.array([0, 2]), np.array([2, 3]))
    assert mask.tolist() == [[True, True, False], [True, True, True]]
    assert torch.equal(taken(values, index), values[torch.tensor([[0, 1, 0], [2, 3, 4]])])
