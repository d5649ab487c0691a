"""With a bound for each example, none moves a device's vector by more than its sensitivity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.client.device.hardware import ThisMachine
from headwater.client.privacy.clipped_examples import add_clipped_examples
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity, TrainingContext
from headwater.client.training.sampler import SamplerState
from headwater.common.errors import TaskError
from headwater.common.messages import Plan
from headwater.common.privacy.clipping import clip_to_norm
from headwater.common.privacy.noise_shares import FLOAT32_ROUNDING, plain_scale_bits, sensitivity
from headwater.common.privacy.terms import PrivacyTerms
from tests.tasks import (
    FINE,
    NAN_GRADIENT,
    NAN_LOSS,
    RAISES_BACKWARD,
    RAISES_FORWARD,
    TwoLayers,
    examples,
)
from tests.training_contexts import plan, sum_gradients, training_context, whole

QUOTA = 9


class Tied(nn.Module):
    """A bag of words whose output weights are its embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)

    def forward(self, words_BT: Tensor) -> Tensor:
        hidden_BH: Tensor = self.embedding(words_BT).mean(1).tanh()
        return hidden_BH @ self.embedding.weight.T


class Scaled:
    """A classifier; an example's loss is multiplied by a number of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def new_model(self) -> nn.Module:
        if self.kind == "tied":
            return Tied()
        if self.kind == "convolution":
            return nn.Sequential(
                nn.Conv2d(1, 3, 3), nn.ReLU(), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 11)
            )
        return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 11))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return self.examples(20, seed=part)

    def examples(self, number: int, *, seed: int) -> TensorDataset:
        generator = np.random.default_rng(seed)
        shape = {"tied": (number, 5), "convolution": (number, 1, 4, 4)}.get(self.kind, (number, 16))
        if self.kind == "tied":
            inputs = torch.from_numpy(generator.integers(0, 11, size=shape))
        else:
            inputs = torch.from_numpy(generator.normal(size=shape).astype(np.float32))
        labels = torch.from_numpy(generator.integers(0, 11, size=number))
        return TensorDataset(inputs, labels, torch.ones(number))

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        inputs, labels_B, scales_B = batch
        losses_B = functional.cross_entropy(model(inputs), labels_B, reduction="none")
        return (losses_B * scales_B).sum(), len(labels_B)


def terms(bound: float, number: int = QUOTA, **changes: Any) -> PrivacyTerms:
    whole_bound = bound * number * (1 + FLOAT32_ROUNDING * number)
    return PrivacyTerms(
        norm_bound=whole_bound, example_bound=bound, noise_multiplier=1.0, **changes
    )


def vector(
    task: Any, data: TensorDataset, bound: float, *, size: int = 4, quota: int = QUOTA
) -> Tensor:
    """Return a window's sum of clipped gradients."""
    context = training_context(task, data)
    return summed(context, plan(quota, size, privacy=terms(bound, quota)))


def summed(context: TrainingContext, chosen: Plan) -> Tensor:
    assert isinstance(context.examples, TensorDataset)
    window = whole(context.examples, chosen.quota)
    return sum_gradients(chosen, window, context).values_P.clone()


def integers(values_P: Tensor, chosen: PrivacyTerms) -> NDArray[np.float64]:
    steps: NDArray[np.float64] = np.rint(
        np.ldexp(values_P.double().numpy(), plain_scale_bits(chosen))
    )
    return steps


@pytest.mark.parametrize("kind", ["perceptron", "tied", "convolution"])
@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    at=st.integers(0, QUOTA - 1),
    scale=st.sampled_from([0.0, 3.0, 1e30, -1e30, math.inf, math.nan]),
    bound=st.sampled_from([1e-3, 0.3, 5.0]),
    size=st.integers(1, QUOTA),
)
def test_no_example_moves_the_integers_by_more_than_the_sensitivity(
    kind: str, seed: int, at: int, scale: float, bound: float, size: int
) -> None:
    task = Scaled(kind)
    data = task.examples(QUOTA, seed=seed)
    inputs, labels, scales = data.tensors
    other = scales.clone()
    other[at] = scale
    found = [
        integers(
            vector(task, TensorDataset(inputs, labels, chosen), bound, size=size), terms(bound)
        )
        for chosen in (scales, other)
    ]
    chosen = terms(bound)
    limit = sensitivity(chosen, scale_bits=plain_scale_bits(chosen), num_values=len(found[0]))
    # A zero adds nothing: half of the way between two examples, which are within twice the bound.
    far = limit if scale == 0 or not math.isfinite(scale) else 2 * limit
    assert np.linalg.norm(found[0] - found[1]) <= far
    assert np.linalg.norm(found[0]) <= math.ldexp(chosen.norm_bound, plain_scale_bits(chosen))


def test_a_vector_that_is_clipped_as_a_whole_moves_by_more_than_an_example_s_sensitivity() -> None:
    """The device's own clip is no bound for an example: one of 1e30 takes all the room."""
    task, bound = Scaled("perceptron"), 0.3
    inputs, labels, scales = task.examples(QUOTA, seed=0).tensors
    loud = scales.clone()
    loud[0] = 1e30
    found = []
    for chosen in (scales, loud):
        context = training_context(task, TensorDataset(inputs, labels, chosen))
        values_P = summed(context, plan(QUOTA, 4))
        clip_to_norm(values_P, terms(bound).norm_bound)
        found.append(integers(values_P, terms(bound)))
    limit = sensitivity(terms(bound), scale_bits=plain_scale_bits(terms(bound)), num_values=1)
    assert np.linalg.norm(found[0] - found[1]) > 2 * limit


@pytest.mark.parametrize("kind", ["perceptron", "tied", "convolution"])
@pytest.mark.parametrize("bound", [0.5, 1e6])
def test_the_sum_is_that_of_gradients_clipped_one_by_one(kind: str, bound: float) -> None:
    task = Scaled(kind)
    data = task.examples(QUOTA, seed=3)
    context = training_context(task, data)
    model = context.image.model.train()
    expected = torch.zeros(context.image.layout.num_parameters, dtype=torch.float64)
    for at in range(QUOTA):
        torch.manual_seed(0)
        if kind == "perceptron":
            model[2].p = 0.0  # type: ignore[index]
        batch = [tensor[at : at + 1] for tensor in data.tensors]
        gradients = torch.autograd.grad(task.loss_sum(model, batch)[0], context.image.trainable())
        flat = torch.cat([gradient.flatten() for gradient in gradients]).double()
        expected += flat * min(1.0, bound / float(flat.norm()))
    for size in (1, 4, QUOTA):
        found = summed(context, plan(QUOTA, size, privacy=terms(bound)))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [NAN_LOSS, NAN_GRADIENT, RAISES_BACKWARD, RAISES_FORWARD])
def test_an_example_that_cannot_be_trained_on_adds_nothing_and_changes_no_other(kind: int) -> None:
    inputs, targets, kinds = examples(QUOTA, kinds=[FINE, FINE, kind]).tensors
    found = vector(TwoLayers(), TensorDataset(inputs, targets, kinds), 1.0)
    rest = [at for at in range(QUOTA) if at != 2]
    others = TensorDataset(inputs[rest], targets[rest], kinds[rest])
    assert torch.equal(found, vector(TwoLayers(), others, 1.0, quota=QUOTA - 1))
    context = training_context(TwoLayers(), TensorDataset(inputs, targets, kinds))
    chosen = plan(QUOTA, QUOTA, privacy=terms(1.0))
    window = whole(TensorDataset(inputs, targets, kinds), QUOTA)
    result = add_clipped_examples(chosen, window, window.positions, context, 0.0)
    assert list(result.faults) == [2]
    assert result.step.weight == QUOTA - 1


@pytest.mark.parametrize("answer", [(math.nan,), (0.5,), (1, {"found": None})])
def test_an_example_whose_weight_or_metric_is_no_number_adds_nothing_and_raises_nothing(
    answer: tuple[Any, ...],
) -> None:
    """An error that one example decides on would be an answer about it, without any noise."""

    class OddOne(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
            loss, weight = super().loss_sum(model, batch)
            return (loss, *(answer if (batch[2] == NAN_LOSS).any() else (weight,)))

    inputs, targets, kinds = examples(QUOTA).tensors
    odd = kinds.clone()
    odd[2] = NAN_LOSS
    found = vector(OddOne(), TensorDataset(inputs, targets, odd), 1.0)
    rest = [at for at in range(QUOTA) if at != 2]
    others = TensorDataset(inputs[rest], targets[rest], kinds[rest])
    assert torch.equal(found, vector(OddOne(), others, 1.0, quota=QUOTA - 1))


def test_a_loss_sum_that_replaces_the_gradients_is_a_task_error() -> None:
    class Zeroing(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            model.zero_grad(set_to_none=True)
            return super().loss_sum(model, batch)

    with pytest.raises(TaskError, match="gradients"):
        vector(Zeroing(), examples(QUOTA), 1.0)


def train(quota: int, state: SamplerState, **changes: Any) -> SamplerState:
    home = Trainer("tests/tasks.py:TwoLayers", batch_norm=None, check_task=False)
    chosen = plan(quota, 4, privacy=terms(1.0, quota), **changes)
    identity = Identity(name="0", data=None, part=0, num_parts=2)
    return home.train(identity, ThisMachine(), chosen, state)[1]


def test_a_window_has_no_example_twice_though_the_plan_asks_for_more_than_there_are() -> None:
    after = train(60, SamplerState()).pending_place
    assert (after.epoch, after.offset, after.skipped) == (1, 0, ())  # 24 examples, once each


def test_a_window_that_the_deadline_cuts_off_counts_as_summed() -> None:
    whole_window = train(16, SamplerState())
    assert train(16, SamplerState(), deadline_seconds=1e-9) == whole_window
