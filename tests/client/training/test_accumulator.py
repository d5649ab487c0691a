"""The gradient vector: its norm, for any length and any finite numbers, and its memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headwater.client.training.accumulator import Accumulator
from headwater.common.model.parameters import build_model
from headwater.common.model.vectors import CHUNK
from tests.tasks import TwoLayers


class Wide(TwoLayers):
    """A model of one weight with so many numbers."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def new_model(self) -> nn.Module:
        return nn.Linear(self.length, 1, bias=False)


def accumulator(length: int) -> Accumulator:
    return Accumulator(build_model(Wide(length), seed=0))


@pytest.mark.parametrize("length", [1, CHUNK - 1, 4 * CHUNK + 7])
def test_the_norm_equals_the_float64_norm(length: int) -> None:
    made = accumulator(length)
    torch.randn(length, generator=torch.Generator().manual_seed(1), out=made.values_P)
    exact = float(torch.linalg.vector_norm(made.values_P.double()))
    assert made.gradient_norm() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("at", [0, CHUNK])
def test_the_norm_is_finite_if_and_only_if_the_vector_is(at: int) -> None:
    made = accumulator(CHUNK + 5)
    made.values_P[at] = 1e30  # its square is none of float32
    assert made.gradient_norm() == pytest.approx(1e30)
    for bad in (math.inf, -math.inf, math.nan):
        made.values_P[at] = bad
        assert not math.isfinite(made.gradient_norm())


def test_memory_that_is_handed_in_changes_only_with_zero_and_collects_the_gradients() -> None:
    image = build_model(Wide(4), seed=0)
    memory = torch.full((4,), 7.0)  # as another process's vector in shared memory
    made = Accumulator(image, memory)
    assert memory.tolist() == [7.0] * 4
    made.zero()
    image.model(torch.ones(1, 4)).sum().backward()
    assert memory.tolist() == [1.0] * 4


def test_a_vector_apart_knows_its_own_unused_parameters_and_leaves_the_other_as_it_was() -> None:
    image = build_model(TwoLayers(), seed=0)
    made = Accumulator(image)
    first, *others = [parameter for _, parameter in image.model.named_parameters()]
    for _ in range(2):  # the second time as in a later window
        made.zero()
        image.model(torch.ones(2, 3)).sum().backward()
    before = made.memory.clone()
    with made.apart() as own:
        (first * 2).sum().backward()  # type: ignore[no-untyped-call]
        unused = made.unused()
    assert len(unused) == len(others)
    assert made.unused() == ()
    assert torch.equal(made.memory, before)
    made.add_apart(own, unused)
    assert own.sum() == 2 * first.numel()
    assert torch.equal(made.memory, before + own)
