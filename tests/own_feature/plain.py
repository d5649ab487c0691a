"""What the tests of features compare with: gradients and steps in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import headwater
from headwater.client.training.sampler import SamplerPosition, window
from tests.python_tasks import Signs

CLIENTS, STEPS, SIZE, RATE = 3, 4, 10, 0.1
LOCAL: dict[str, Any] = {
    "clients": CLIENTS,
    "local_steps": STEPS,
    "accumulation_steps": 1,
    "micro_batch_size": SIZE,
    "local_learning_rate": RATE,
    "optimizer": "sgd",
    "learning_rate": 1.0,
    "progress": False,
}


def batches_of(client: int, number: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Return the batches of a client's local steps in round ``number``: its whole data."""
    data = Signs().train_examples(data=None, part=client, num_parts=CLIENTS)
    place = SamplerPosition(epoch=number - 1)
    taken = window(place, quota=len(data), run_seed=0, name=str(client), num_examples=len(data))
    inputs, labels = data.tensors
    return [
        (inputs[list(at)], labels[list(at)])
        for at in (taken.positions[step * SIZE :][:SIZE] for step in range(STEPS))
    ]


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    model.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def initial() -> nn.Module:
    run = headwater.simulate(Signs, **{**LOCAL, "rounds": 1, "learning_rate": 1e-30})
    return run.model


def put(model: nn.Module, values_P: Tensor) -> None:
    nn.utils.vector_to_parameters(values_P, model.parameters())
