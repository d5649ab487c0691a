"""No example counts twice in an exact round: the largest possible round is the whole data's batch.

The right value is plain PyTorch's: one step on all examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

import headwater

NUM_EXAMPLES, NUM_CLIENTS = 97, 7  # 13 or 14 each
RATE = 0.5


def whole() -> TensorDataset:
    random = torch.Generator().manual_seed(7)
    inputs = torch.randn(NUM_EXAMPLES, 6, generator=random)
    return TensorDataset(inputs, torch.randint(4, (NUM_EXAMPLES,), generator=random))


class Classes:
    """A classifier of 97 examples, every seventh on one client."""

    def new_model(self) -> nn.Module:
        return nn.Linear(6, 4)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Subset[Any]:
        return Subset(whole(), range(part, NUM_EXAMPLES, num_parts))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def stepped() -> Tensor:
    """Return the parameters after one step of SGD on the mean loss of all examples."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    inputs, labels = whole().tensors
    functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=RATE)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("masks", ["off", "active"])
@pytest.mark.parametrize(("k", "micro_batch_size"), [(5, 3), (1, 16), (64, 1)])
def test_a_set_k_beyond_the_data_is_one_step_on_all_examples(
    k: int, micro_batch_size: int, masks: Any
) -> None:
    run = headwater.simulate(
        Classes,
        clients=NUM_CLIENTS,
        rounds=1,
        accumulation_steps=k,
        micro_batch_size=micro_batch_size,
        optimizer="SGD",
        learning_rate=RATE,
        secure_aggregation=masks,
        seed=0,
        threads=1,
        progress=False,
        settings={"secure.min_quota": 1},
    )
    row = run.history[0]
    assert row.num_examples == NUM_EXAMPLES
    found = nn.utils.parameters_to_vector(run.model.parameters()).detach()
    # Masked, a coordinate is rounded to its ring: the step is off by far less than one example.
    tolerance = 1e-6 if masks == "off" else 1e-4
    torch.testing.assert_close(found, stepped(), rtol=0, atol=tolerance)
    if masks == "off":
        most = -(-14 // micro_batch_size)
        assert {client.accumulation_steps for client in row.clients} <= {most, most - 1}
