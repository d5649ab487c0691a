"""Values and memory of parameters stay together, or the run is refused by name.

Torch counts no change through ``.data``; a layer that assigns it is cut off from the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import headwater
from headwater.common.errors import BuffersChanged

NUM_CLIENTS, NUM_EACH, NUM_ROUNDS, RATE = 3, 6, 4, 0.1


class Renormed(nn.Linear):
    """As in EEGNet."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 100.0)  # never binds
        return super().forward(inputs)


class Clamped(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        self.weight.data.clamp_(min=0)
        return super().forward(inputs)


class Plain:
    """A linear model; ``layer`` is the class of it."""

    layer: type[nn.Linear] = nn.Linear

    def new_model(self) -> nn.Module:
        return self.layer(4, 3)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn(NUM_EACH, 4, generator=random)
        return TensorDataset(inputs, torch.randint(3, (NUM_EACH,), generator=random))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


class EegTask(Plain):
    layer = Renormed


class ClampedTask(Plain):
    layer = Clamped


NET = nn.Linear(4, 3)


class OneModule(Plain):
    """A module made once, at the top of the file."""

    def new_model(self) -> nn.Module:
        return NET


class OneBody(Plain):
    """A module made once, as a part of the model."""

    body = nn.Linear(4, 3)

    def new_model(self) -> nn.Module:
        return nn.Sequential(self.body, nn.Identity())


def simulated(task: Any, **more: Any) -> headwater.Run:
    given: dict[str, Any] = {
        "clients": NUM_CLIENTS,
        "rounds": NUM_ROUNDS,
        "accumulation_steps": 3,
        "micro_batch_size": 2,
        "optimizer": "sgd",
        "learning_rate": RATE,
        "seed": 6,
        "threads": 1,
        "progress": False,
    }
    return headwater.simulate(task, **{**given, **more})


@pytest.mark.parametrize("task", [EegTask, ClampedTask])
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"check": False},
        {"check": False, "compute": "one-by-one"},
    ],
    ids=str,
)
def test_a_forward_pass_that_writes_through_data_is_refused_by_name(
    task: type[Plain], mode: dict[str, Any]
) -> None:
    with pytest.raises(BuffersChanged, match=r"through \.data|apart from its gradient"):
        simulated(task, **mode)


class Assigning(torch.optim.Optimizer):
    """An optimizer of the user's that assigns ``p.data``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


def plain(model: nn.Module, task: Plain) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    parts = [task.train_examples(data=None, part=n, num_parts=3) for n in range(NUM_CLIENTS)]
    batch = [torch.cat([part.tensors[at] for part in parts]) for at in range(2)]
    for _ in range(NUM_ROUNDS):
        optimizer.zero_grad()
        loss, weight = task.loss_sum(model, batch)
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", [{}, {"secure_aggregation": "semi-honest"}], ids=str)
def test_an_optimizer_that_assigns_data_moves_the_model_that_devices_get(
    mode: dict[str, Any],
) -> None:
    run = simulated(Plain, optimizer=Assigning, settings={"secure.min_quota": 1}, **mode)
    torch.manual_seed(6)
    assert_same(run.model, plain(Plain().new_model(), Plain()))


@pytest.mark.parametrize("task", [OneModule, OneBody])
def test_a_module_that_new_model_returns_again_trains_as_one_of_its_own(task: type[Plain]) -> None:
    start = {name: value.clone() for name, value in task().new_model().state_dict().items()}
    run = simulated(task)
    expected = nn.Linear(4, 3) if task is OneModule else nn.Sequential(nn.Linear(4, 3))
    expected.load_state_dict(start)
    assert_same(run.model, plain(expected, task()))
