"""A parameter that no loss of a round used stays as it is, as in a plain loop of PyTorch.

There its gradient is None after ``zero_grad``, and an optimizer leaves it out, weight decay and
momentum included. A gradient of zero is another thing: it decays, and counts as a step.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import headwater
from headwater.client.training.sampler import permutation

NUM_CLIENTS, NUM_EACH, NUM_ROUNDS = 4, 6, 5
FLAGS: dict[str, Any] = {
    "clients": NUM_CLIENTS,
    "rounds": NUM_ROUNDS,
    "accumulation_steps": 3,
    "micro_batch_size": 2,
    "optimizer": "adamw",
    "learning_rate": 0.05,
    "settings": {"optimizer.arguments": {"weight_decay": 0.1}},
    "seed": 3,
    "threads": 1,
    "progress": False,
}


class Heads(nn.Module):
    """A body and three heads; ``idle`` is used by no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.left, self.right, self.idle = (nn.Linear(4, 1) for _ in range(3))
        self.gate = nn.Parameter(torch.ones(1))


class TwoHeads:
    """Even clients use the left head, odd ones the right head; ``gate`` has a gradient of zero."""

    def new_model(self) -> nn.Module:
        return Heads()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn(NUM_EACH, 5, generator=random)
        targets = torch.randn(NUM_EACH, 1, generator=random)
        return TensorDataset(inputs, targets, torch.full((NUM_EACH, 1), part % 2))

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        inputs, targets, sides = batch
        hidden, loss = torch.tanh(model.body(inputs)), inputs.new_zeros(())
        for side, head in enumerate((model.left, model.right)):
            rows = (sides == side).squeeze(1)
            if rows.any():
                loss = loss + functional.mse_loss(
                    head(hidden[rows]), targets[rows], reduction="sum"
                )
        return loss + 0.0 * model.gate.sum(), len(inputs)


class OneHead(TwoHeads):
    """All clients use the left head, in a loss that can be vectorised."""

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        inputs, targets, _ = batch
        outputs = model.left(torch.tanh(model.body(inputs)))
        # The gate's gradient is zero in each example, though it is used.
        outputs = outputs + (model.gate * 0.0).expand_as(outputs)
        return functional.mse_loss(outputs, targets, reduction="sum"), len(inputs)


class Multiplied(TwoHeads):
    """No gradient is zero: a masked round then knows which tensors have none."""

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        loss, weight = super().loss_sum(model, batch)
        return loss * model.gate.sum(), weight


def plain(task: TwoHeads) -> Heads:
    """Train on all clients' examples, each round one batch of all of them."""
    torch.manual_seed(3)
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    parts = [task.train_examples(data=None, part=n, num_parts=4) for n in range(NUM_CLIENTS)]
    batch = [torch.cat([part.tensors[at] for part in parts]) for at in range(3)]
    for _ in range(NUM_ROUNDS):
        optimizer.zero_grad()
        loss, weight = task.loss_sum(model, batch)
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def assert_same(found: nn.Module, expected: nn.Module, *, tolerance: float) -> None:
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert (one - other).abs().max().item() <= tolerance, name


def assert_idle(found: nn.Module, expected: Heads) -> None:
    """Assert that the idle head has the bits that it began with, and that the gate has not."""
    named = dict(found.named_parameters())
    for name in ("idle.weight", "idle.bias"):
        assert torch.equal(named[name], expected.get_parameter(name))
    assert named["gate"].item() != 1.0


@pytest.mark.parametrize(
    ("task", "mode"),
    [
        (TwoHeads, {"compute": "one-by-one"}),
        (OneHead, {"compute": "one-by-one"}),
        (OneHead, {"compute": "fused"}),
        (OneHead, {"compute": "fused", "cohort_size": 4, "weighting": "dataset"}),
        (TwoHeads, {"compress": "top-k", "settings": {"compression.fraction": 0.9}}),
        (TwoHeads, {"aggregation": "median"}),
        (Multiplied, {"secure_aggregation": "active", "settings": {"secure.min_quota": 1}}),
        pytest.param(TwoHeads, {"engine": "grpc"}, marks=pytest.mark.slow),
    ],
)
def test_a_head_that_no_loss_uses_stays_as_in_plain_pytorch(
    task: type[TwoHeads], mode: dict[str, Any]
) -> None:
    given = {**FLAGS, **mode, "settings": {**FLAGS["settings"], **mode.get("settings", {})}}
    engine = mode.get("engine", "in-process")
    spec = task if engine == "in-process" else f"{__file__}:{task.__name__}"
    run = headwater.simulate(spec, **given)
    expected = plain(task())
    assert_idle(run.model, expected)
    if mode.keys() <= {"compute", "cohort_size", "weighting"}:
        assert_same(run.model, expected, tolerance=2e-5)


LOCAL: dict[str, Any] = {
    "algorithm": "fedavg",
    "local_steps": 3,
    "local_optimizer": "adamw",
    "local_learning_rate": 0.05,
    "optimizer": "sgd",
    "learning_rate": 1.0,
    "accumulation_steps": 1,
    "settings": {"local.arguments": {"weight_decay": 0.1}},
}


def local_adamw(task: TwoHeads) -> Heads:
    """Return FedAvg's model after a round: the mean of the clients', three steps of AdamW each."""
    torch.manual_seed(3)
    model, found = Heads(), []
    for part in range(NUM_CLIENTS):
        own = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.05, weight_decay=0.1)
        tensors = task.train_examples(data=None, part=part, num_parts=NUM_CLIENTS).tensors
        order = permutation(3, 0, str(part), NUM_EACH).tolist()
        for step in range(3):
            rows = order[2 * step : 2 * step + 2]
            optimizer.zero_grad()
            loss, weight = task.loss_sum(own, [tensor[rows] for tensor in tensors])
            (loss / weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found.append(own)
    means = zip(*(own.parameters() for own in found), strict=True)
    with torch.no_grad():
        for parameter, of_all in zip(model.parameters(), means, strict=True):
            parameter.copy_(torch.stack(list(of_all)).mean(0))
    return model


@pytest.mark.parametrize(("task", "masks"), [(TwoHeads, "off"), (Multiplied, "active")])
def test_local_steps_leave_a_head_that_no_loss_uses(task: type[TwoHeads], masks: Any) -> None:
    settings = {**LOCAL["settings"], "secure.min_quota": 1}
    given = {**FLAGS, **LOCAL, "rounds": 1, "secure_aggregation": masks, "settings": settings}
    run = headwater.simulate(task, **given)
    expected = local_adamw(task())
    assert_idle(run.model, expected)
    assert_same(run.model, expected, tolerance=1e-5 if masks == "off" else 1e-3)


class Shut(nn.Module):
    """A second layer whose input is zero: its gradient is zero, and not None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.first.bias.fill_(-100.0)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.relu(self.first(inputs)))
        return outputs


class ShutTask(TwoHeads):
    """A loss whose gradients are all zero."""

    def new_model(self) -> nn.Module:
        return Shut()

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        inputs, targets, _ = batch
        return functional.mse_loss(model(inputs), targets, reduction="sum"), len(inputs)


@pytest.mark.parametrize("algorithm", [{}, LOCAL])
def test_a_gradient_of_zero_decays_alike_in_every_way_to_compute(algorithm: dict[str, Any]) -> None:
    models = []
    for compute in ("one-by-one", "vectorised"):
        given = {**FLAGS, **algorithm, "rounds": 2, "compute": compute}
        models.append(headwater.simulate(ShutTask, **given).model)
    assert_same(models[0], models[1], tolerance=1e-6)
    torch.manual_seed(3)
    before = Shut().second.weight.norm().item()
    assert dict(models[0].named_parameters())["second.weight"].norm().item() < 0.999 * before


def test_a_ring_of_sixteen_bits_moves_an_idle_head_by_its_rounding_alone() -> None:
    """It is rotated, so that no tensor of the opened sum is zero (docs/secure-aggregation.md)."""
    settings = {"secure.min_quota": 1, "secure.ring_bits": 16, **FLAGS["settings"]}
    given = {**FLAGS, "secure_aggregation": "active", "settings": settings, "rounds": 1}
    run = headwater.simulate(TwoHeads, **given)
    torch.manual_seed(3)
    moved = (dict(run.model.named_parameters())["idle.weight"] - Heads().idle.weight).abs().max()
    assert 0 < moved.item() < 0.2
