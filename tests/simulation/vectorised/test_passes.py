"""A pass over many devices is compared with the task's own gradients before it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.common.data.batches import UnsupportedBatch
from headwater.common.settings.sources import load
from headwater.simulation.compute.batched import BatchedCompute
from headwater.simulation.fleet.devices import Devices
from headwater.simulation.fleet.fleet_spec import with_fleet
from tests.simulation.vectorised.weighed_task import Weighed


class Listed(nn.Module):
    """Holds a layer's weight in a list too, and uses it from there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.weights = [self.first.weight]

    def forward(self, x_BI: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x_BI)) + functional.linear(x_BI, self.weights[0])
        logits: Tensor = self.last(hidden)
        return logits


class ListedWeight(Weighed):
    def new_model(self) -> nn.Module:
        return Listed()


class MaskedByHook(Weighed):
    """Trains every other weight of its first layer."""

    def new_model(self) -> nn.Module:
        first, mask = nn.Linear(6, 16), torch.arange(16 * 6).view(16, 6) % 2
        first.weight.register_hook(lambda grad: grad * mask)  # type: ignore[no-untyped-call]
        return nn.Sequential(first, nn.Tanh(), nn.Linear(16, 5))


class NoElements(Weighed):
    def new_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
        model[0].register_parameter("spare", nn.Parameter(torch.zeros(0, 3)))
        return model


def compute_of(task: type, **chosen: Any) -> BatchedCompute:
    given = {"task": f"{__file__}:{task.__name__}", "simulation.clients": 2, **chosen}
    return BatchedCompute(Devices(with_fleet(load(None, given))), first=0, with_norms=True)


@pytest.mark.parametrize("task", [ListedWeight, MaskedByHook])
@pytest.mark.parametrize("chosen", [{}, {"local.steps": 2}])
def test_a_model_whose_gradient_a_pass_would_miss_is_refused(
    task: type, chosen: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedBatch, match="differs from the task's own"):
        compute_of(task, **chosen)


@pytest.mark.parametrize("chosen", [{}, {"local.steps": 2}])
def test_a_parameter_without_elements_is_allowed(chosen: dict[str, Any]) -> None:
    compute_of(NoElements, **chosen)
