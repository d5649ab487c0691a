"""Runs a simulation in two modes and compares them, and the tasks on which this is done.

One by one gives the wire's bits. The other modes add the same float32 terms in another order: each
coordinate of a sum of n terms may differ by n 2^-24 of the sum of the terms' sizes, and after a few
steps of plain SGD the models by as much of what moved them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from headwater.common.model.trained_model import MODEL
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine

FLEET = """
[[device]]
profile = "laptop"
count = 3
examples_per_second = 400
jitter = 0.2

[[device]]
count = 4
examples_per_second = 50
memory_bytes = 400_000_000
upload_bytes_per_second = 1_000_000
availability = 0.8
"""
# What a device reports of its work, in every mode.
SAME = (
    *("name", "accumulation_steps", "micro_batch_size", "num_examples", "num_refused", "weight"),
    *("seconds", "step_seconds", "peak_bytes", "reason", "plan"),
)
ROUNDS = 3
VOCABULARY, LENGTH, WIDTH = 11, 4, 32


class Mlp:
    """Vectors in, one of five classes out; devices own 5 to 40 examples."""

    hidden = 16

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 5))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        number = 5 + 5 * (part % 8)
        inputs = torch.randn(number, 6, generator=random)
        return TensorDataset(inputs, torch.randint(5, (number,), generator=random))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        inputs, labels = batch
        logits = model(inputs)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}


class OneElement(Mlp):
    """Weight and metric are tensors of one element."""

    def loss_sum(self, model: nn.Module, batch: Any) -> Any:
        loss, weight, metrics = super().loss_sum(model, batch)
        sums = {name: value.reshape(1) for name, value in metrics.items()}
        return loss, torch.tensor([weight]), sums


class LargeLayer(Mlp):
    """A layer of 36,864 weights, whose gradients are computed one device at a time."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (6, 1)),
            nn.Linear(1, 192, bias=False),
            nn.Linear(192, 192),
            nn.Tanh(),
            nn.Linear(192, 1),
            nn.Flatten(),
        )


class LongEpoch(Mlp):
    """Some devices have so many examples that their permutation is not drawn with the others'."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        number = 150 if part % 2 else 7
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn(number, 6, generator=random)
        return TensorDataset(inputs, torch.randint(5, (number,), generator=random))


class Attention(nn.Module):
    """Embeddings, attention and an MLP after norms; one bias belongs to two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.bias = self.narrow.bias
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        values = self.norm(self.tokens(tokens_BT) + self.places)
        query, key, value = self.attend(values).unsqueeze(1).chunk(3, dim=-1)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(self.mix(seen.squeeze(1)))
        logits: Tensor = self.logits(values + self.narrow(functional.gelu(self.wide(values))))
        return logits


class Tokens:
    """Each token is predicted from itself; the weight counts tokens."""

    max_weight_per_example = LENGTH

    def new_model(self) -> nn.Module:
        return Attention()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        number = 3 + 2 * (part % 5)
        return TensorDataset(torch.randint(VOCABULARY, (number, LENGTH), generator=random))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        (tokens_BT,) = batch
        logits_BTV = model(tokens_BT)
        loss = functional.cross_entropy(logits_BTV.transpose(1, 2), tokens_BT, reduction="sum")
        right = (logits_BTV.argmax(2) == tokens_BT).sum()
        return loss, tokens_BT.numel(), {"accuracy": right}


class LayerTwice(Mlp):
    """A linear layer that runs twice: its norm is no sum over pairs."""

    def new_model(self) -> nn.Module:
        twice = nn.Linear(16, 16)
        return nn.Sequential(nn.Linear(6, 16), twice, nn.Tanh(), twice, nn.Linear(16, 5))


class ConstantInput(Mlp):
    """A linear layer whose input is the same for all examples."""

    def new_model(self) -> nn.Module:
        class Shifted(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner
                self.shift = nn.Linear(1, 5)

            def forward(self, values: Tensor) -> Tensor:
                logits: Tensor = self.inner(values) + self.shift(torch.ones(1))
                return logits

        return Shifted(super().new_model())


class BadExample(Mlp):
    """One example of device 2 has no finite loss."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        inputs, labels = super().train_examples(data=data, part=part, num_parts=num_parts).tensors
        if part == 2:
            inputs[1, 0] = torch.nan
        return TensorDataset(inputs, labels)


class ManyParameters(Mlp):
    """A model of more parameters than local steps are taken together of."""

    hidden = 6000


class Random(Mlp):
    """A model that draws random numbers in training."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 5))


class Recomputing(Mlp):
    """torch's own checkpoints compute activations again in the backward pass, outside of vmap."""

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        def recomputed(inputs: Tensor) -> Tensor:
            outputs: Tensor = checkpoint(model, inputs, use_reentrant=False)
            return outputs

        return super().loss_sum(recomputed, batch)  # type: ignore[arg-type]


class Branching(Mlp):
    """A loss that branches on a value, which torch.func cannot run."""

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        loss, weight, sums = super().loss_sum(model, batch)
        return (loss if loss.item() >= 0 else -loss), weight, sums


def spec(task: type) -> str:
    return f"{__file__}:{task.__name__}"


def run(out: Path, compute: str, **overrides: Any) -> list[dict[str, Any]]:
    chosen = {
        "task": spec(Mlp),
        "rounds": ROUNDS,
        "threads": 1,
        "out": out,
        "simulation.clients": 12,
        "simulation.compute": compute,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.1,
        "plan.accumulation_steps": 3,
        "plan.micro_batch_size": 4,
    }
    settings = with_fleet(load(None, chosen | overrides))
    run_engine(settings, on_round=lambda _: None, resume=False)
    rows = read_rows(out)
    # Devices computed alone report after the others.
    return [{**row, "clients": sorted(row["clients"], key=lambda one: one["name"])} for row in rows]


def model_in(out: Path) -> Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(out / MODEL).items())])


def norms_of(client: Mapping[str, Any]) -> dict[int, float]:
    """Return the norms after the steps at which a device measured them."""
    norms = dict(enumerate(client["step_gradient_norm"]))
    return {step: norm for step, norm in norms.items() if norm is not None}


def assert_equals_one_by_one(
    folder: Path, mode: str, **overrides: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run both modes: the same work to the figure, the same sums, norms and model to rounding."""
    rows = run(folder / "one-by-one", "one-by-one", **overrides)
    others = run(folder / mode, mode, **overrides)
    for row, other in zip(rows, others, strict=True):
        assert (row["weight"], row["refused"]) == (other["weight"], other["refused"])
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["metrics"] == pytest.approx(other["metrics"], rel=1e-6)
        if mode == "vectorised" and row["noise_scale"] is not None:
            assert other["noise_scale"] == pytest.approx(row["noise_scale"], rel=1e-3)
        for one, same in zip(row["clients"], other["clients"], strict=True):
            assert {key: one[key] for key in SAME} == {key: same[key] for key in SAME}
            assert one["loss"] == pytest.approx(same["loss"], rel=1e-5, abs=1e-6)
            assert one["step_loss"] == pytest.approx(same["step_loss"], rel=1e-5, abs=1e-6)
            if mode == "vectorised":
                norms = norms_of(one)
                # A sum that cancels has the error of the largest sum before it, of which the first
                # and the last are measured.
                bound = 2e-5 * len(one["step_gradient_norm"]) * max(norms.values())
                assert norms_of(same) == pytest.approx(norms, rel=1e-5, abs=bound)
    torch.testing.assert_close(
        model_in(folder / "one-by-one"), model_in(folder / mode), rtol=0, atol=2e-6
    )
    return rows, others
