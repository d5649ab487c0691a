"""A loss of weight 0 is a sum like any other: a detector's loss over all anchors of an image.

Its weight is the number of positives. A device without any has a gradient, of the anchors that
should be empty; dropped, the step was a third off.
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
from headwater.common.errors import NothingSummed

NUM_CLIENTS, NUM_EACH, NUM_ROUNDS, RATE = 4, 5, 3, 0.05


class Detector:
    """Clients 0 and 2 have objects, 1 and 3 have none."""

    def new_model(self) -> nn.Module:
        return nn.Linear(6, 8)  # eight anchors

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        images = torch.randn(NUM_EACH, 6, generator=random)
        objects = (torch.rand(NUM_EACH, 8, generator=random) > 0.6).float()
        return TensorDataset(images, objects * (part % 2 == 0))

    max_weight_per_example = 8

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        images, objects = batch
        logits = model(images)
        loss = functional.binary_cross_entropy_with_logits(logits, objects, reduction="sum")
        return loss, objects.sum()


class NoObjects(Detector):
    """No client has an object."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return super().train_examples(data=data, part=1, num_parts=num_parts)


def simulated(task: Any, **more: Any) -> headwater.Run:
    given: dict[str, Any] = {
        "clients": NUM_CLIENTS,
        "rounds": NUM_ROUNDS,
        "accumulation_steps": 3,
        "micro_batch_size": 2,
        "optimizer": "sgd",
        "learning_rate": RATE,
        "seed": 2,
        "threads": 1,
        "progress": False,
        "settings": {"secure.min_quota": 1},
    }
    return headwater.simulate(task, **{**given, **more})


@pytest.mark.parametrize(
    "mode",
    [
        {"compute": "one-by-one"},
        {"compute": "fused"},
        {"compute": "vectorised"},
        {"secure_aggregation": "semi-honest"},
        {"secure_aggregation": "active"},
        {"compress": "bfloat16"},
    ],
    ids=str,
)
def test_a_device_without_positives_adds_its_gradient(mode: dict[str, Any]) -> None:
    run = simulated(Detector, **mode)
    task = Detector()
    torch.manual_seed(2)
    model = task.new_model()
    parts = [task.train_examples(data=None, part=n, num_parts=4).tensors for n in range(4)]
    batch = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    for _ in range(NUM_ROUNDS):
        model.zero_grad()
        loss, weight = task.loss_sum(model, batch)
        (loss / weight).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=RATE)
    tolerance = 2e-3 if "compress" in mode else 2e-6
    for found, expected in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert {row.num_clients for row in run.history} == {NUM_CLIENTS}
    assert {row.num_examples for row in run.history} == {NUM_CLIENTS * NUM_EACH}


def test_a_round_that_weighs_nothing_is_aborted_by_name() -> None:
    with pytest.raises(NothingSummed) as caught:
        simulated(NoObjects)
    assert "are all targets ignored" in caught.value.remedy
