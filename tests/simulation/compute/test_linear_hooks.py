"""Which parameters are a linear layer's, and what layers tell of a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.client.training.accumulator import Accumulator
from headwater.common.data.batches import UnsupportedBatch
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.task import Task
from headwater.simulation.compute.example_rows import Packed
from headwater.simulation.compute.gradient_norms import Squares
from headwater.simulation.compute.linear_hooks import Layers, layers_of
from headwater.simulation.compute.passes import Block, told_by_layers, vectorised
from headwater.simulation.compute.per_example import ManyExamples
from headwater.simulation.compute.self_test import telling_layers

VOCABULARY, LENGTH, WIDTH = 11, 4, 32


class Attention(nn.Module):
    """Tokens and places, attention and an MLP behind norms; one bias is another layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mix.bias = self.narrow.bias
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        values = self.norm(self.tokens(tokens_BT) + self.places)
        query, key, value = self.attend(values).unsqueeze(1).chunk(3, dim=-1)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.mix(seen.squeeze(1))
        logits: Tensor = self.logits(values + self.narrow(functional.gelu(self.wide(values))))
        return logits


class Foretell:
    """Each token foretells the one before it; a task of the usual form."""

    def new_model(self) -> nn.Module:
        return Attention()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        return TensorDataset(torch.randint(VOCABULARY, (9, LENGTH), generator=random))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        (tokens_BT,) = batch
        logits_BTV = model(tokens_BT)
        loss = functional.cross_entropy(logits_BTV.transpose(1, 2), tokens_BT, reduction="sum")
        return loss, tokens_BT.numel()


class Perceptron(Foretell):
    """The same from two linear layers."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(LENGTH, 24), nn.Tanh(), nn.Linear(24, LENGTH * VOCABULARY)
        )

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        (tokens_BT,) = batch
        logits = model(tokens_BT.float()).unflatten(1, (VOCABULARY, LENGTH))
        return functional.cross_entropy(logits, tokens_BT, reduction="sum"), tokens_BT.numel()


def prepared(task: Task) -> tuple[ManyExamples, Packed, Accumulator, ModelImage]:
    image = build_model(task, seed=1, replace_batch_norm=False)
    packed = Packed(task)
    for part in range(4):
        packed.add(part, task.train_examples(data=None, part=part, num_parts=4))
    return ManyExamples(task, image, packed), packed, Accumulator(image), image


def names_elsewhere(layers: Layers | None) -> set[str]:
    assert layers is not None
    return {name.removeprefix("model.") for name in layers.elsewhere}


@pytest.mark.parametrize(
    ("task", "elsewhere"),
    [
        (
            Foretell(),
            {"tokens.weight", "places", "norm.weight", "norm.bias", "narrow.bias"},
        ),
        (Perceptron(), set()),
    ],
)
@pytest.mark.parametrize("factors", [None, [0.25, 3.0, 1.0, 0.5]])
def test_layers_tell_what_vectors_do(
    task: Task, elsewhere: set[str], factors: list[float] | None
) -> None:
    """A pass of a few devices at a time, in ragged steps, against each device's own vector."""
    many, packed, accumulator, _ = prepared(task)
    layers = many.layers(packed.take(np.arange(3)))
    assert names_elsewhere(layers) == elsewhere
    assert layers is not None
    counts = [9, 4, 7, 9]
    rows = np.concatenate([9 * part + np.arange(count) for part, count in enumerate(counts)])
    block = Block(
        rows=rows,
        factors=None if factors is None else np.repeat(factors, counts),
        sizes=np.array([4, 4, 1, 4, 3, 3, 1, 9]),
        num_steps=np.array([3, 1, 3, 1]),
        precision="float32",
        at_once=16,
    )
    total_P, sums, norms = told_by_layers(many, packed, accumulator, layers, block)
    expected_P, expected_sums, expected_norms = vectorised(many, packed, block)
    assert sums.loss == pytest.approx(expected_sums.loss, rel=1e-5)
    assert sums.weight.tolist() == expected_sums.weight.tolist()
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    # Each coordinate sums 29 examples and their tokens in float32.
    bound = 29 * LENGTH * 2.0**-24 * float(expected_P.abs().max()) * 4
    torch.testing.assert_close(total_P, expected_P, rtol=0, atol=bound)


def seen(model: nn.Module, run: Callable[[], object]) -> set[str]:
    parameters = dict(model.named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwater.simulation.compute.linear_hooks.MOST_ELSEWHERE", 1.0)
        return names_elsewhere(layers_of(parameters, run))


def test_a_weight_with_another_use_is_not_its_layer_s_alone() -> None:
    one, inputs = nn.Linear(5, 5), torch.randn(2, 5)
    assert seen(one, lambda: one(inputs)) == set()
    assert seen(one, lambda: one(one(inputs))) == {"weight", "bias"}
    assert seen(one, lambda: one(inputs) + one.bias) == {"bias"}
    assert seen(one, lambda: one(inputs) + one.weight.square().sum()) == {"weight", "bias"}
    assert seen(one, lambda: functional.linear(one.weight, one.weight)) == {"weight", "bias"}
    assert seen(one, lambda: None) == {"weight", "bias"}
    # It may be looked at.
    assert seen(one, lambda: one(inputs.to(one.weight.dtype).view(2, one.weight.shape[1]))) == set()


def test_few_parameters_may_be_elsewhere() -> None:
    one, inputs = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(2, 8)
    parameters = dict(one.named_parameters())
    assert layers_of(parameters, lambda: one(inputs)) is None  # 16 of 88
    wide = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16))
    parameters = dict(wide.named_parameters())
    assert layers_of(parameters, lambda: wide(inputs)) is not None  # 16 of 160


def test_a_layer_that_sees_no_example_is_missed() -> None:
    class Constant(Perceptron):
        def new_model(self) -> nn.Module:
            return Fed(super().new_model())

    class Fed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.shift = nn.Linear(1, 1)

        def forward(self, values: Tensor) -> Tensor:
            logits: Tensor = self.inner(values) * self.shift(torch.ones(1))
            return logits

    many, packed, accumulator, image = prepared(Constant())
    rows = np.arange(3)
    tensors = packed.take(rows)
    layers = many.layers(tensors)
    assert layers is not None
    with pytest.raises(UnsupportedBatch, match="do not tell"):
        many.add_told(tensors, None, layers, Squares(np.array([3]), np.array([1])))
    loss, _ = Constant().loss_sum(image.model, tensors)
    assert telling_layers(loss, many, packed, rows, accumulator, most_bytes=1 << 20) is None


def test_the_trial_holds_copies_to_their_bytes_and_the_norms_to_the_task_s_own() -> None:
    many, packed, accumulator, image = prepared(Foretell())
    rows = np.arange(3)

    def telling(most_bytes: int) -> Layers | None:
        loss, _ = Foretell().loss_sum(image.model, packed.take(rows))
        return telling_layers(loss, many, packed, rows, accumulator, most_bytes=most_bytes)

    elsewhere = (VOCABULARY + LENGTH + 3) * WIDTH  # embeddings, places, a norm's two and a bias
    assert telling(3 * 4 * elsewhere - 1) is None
    layers = telling(3 * 4 * elsewhere)
    assert layers is not None
    assert layers.num_elsewhere == elsewhere
    assert not accumulator.values_P.any()
    other_loss, _ = Foretell().loss_sum(image.model, packed.take(rows + 3))
    assert telling_layers(other_loss, many, packed, rows, accumulator, most_bytes=1 << 20) is None
