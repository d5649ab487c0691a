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


class Scaled(nn.Module):
    """Has a parameter without dimensions, and another without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
        self.scale, self.spare = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x_BI: Tensor) -> Tensor:
        logits: Tensor = self.scale * self.layers(x_BI) + self.spare.sum()
        return logits


class ScaledLogits(Weighed):
    def new_model(self) -> nn.Module:
        return Scaled()


class LayerTwice(Weighed):
    """One layer under two names, and another with the weight of a third."""

    def new_model(self) -> nn.Module:
        same, tied, other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        other.weight = tied.weight
        return nn.Sequential(same, nn.Tanh(), same, tied, nn.Tanh(), other, nn.Linear(6, 5))


def devices_of(task: type, **chosen: Any) -> Devices:
    given = {"task": f"{__file__}:{task.__name__}", "simulation.clients": 2, **chosen}
    return Devices(with_fleet(load(None, given)))


@pytest.mark.parametrize("task", [ListedWeight, MaskedByHook])
@pytest.mark.parametrize("chosen", [{}, {"local.steps": 2}])
def test_a_model_whose_gradient_a_pass_would_miss_is_refused(
    task: type, chosen: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedBatch, match="differs from the task's own"):
        BatchedCompute(devices_of(task, **chosen), first=0, with_norms=True)


@pytest.mark.parametrize("task", [ScaledLogits, LayerTwice])
@pytest.mark.parametrize("chosen", [{}, {"local.steps": 2}])
def test_a_model_is_computed_in_passes_that_leave_its_parameters_in_place(
    task: type, chosen: dict[str, Any]
) -> None:
    devices = devices_of(task, **chosen)
    model = devices.trainer.image.model
    before = dict(model.named_parameters(remove_duplicate=False))
    BatchedCompute(devices, first=0, with_norms=True)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is one for name, one in before.items())
