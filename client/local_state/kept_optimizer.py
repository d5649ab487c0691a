"""The local optimizer's state, which stays on the device from one round to the next.

Without it each round begins with a momentum of zero, which takes some ten steps to build up.
The state is the optimizer's own: the momentum of SGD, the two moments of AdamW. DiLoCo's workers
keep theirs too (Douillard et al. 2023, section 2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwater.client.own_feature.device_feature import DeviceFeature, DeviceWork
from headwater.client.own_feature.own_round import OwnRound
from headwater.client.training.round import Work


class KeptOptimizer(DeviceFeature):
    """Keeps each tensor of the optimizer's state, under the optimizer's name."""

    def __init__(self, terms: Any) -> None:
        super().__init__(terms)
        self.optimizer: torch.optim.Optimizer | None = None

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Give a new optimizer the state of the last round; one of another model is dropped."""
        self.optimizer = optimizer
        parameters = _parameters(optimizer)
        for name, tensor in self.state.items():
            kind, at, key = name.split(".", 2)
            if kind != type(optimizer).__name__ or int(at) >= len(parameters):
                continue
            parameter = parameters[int(at)]
            if tensor.dim() == 0 or tensor.shape == parameter.shape:
                optimizer.state[parameter][key] = tensor.clone()

    def end(self, work: DeviceWork) -> None:
        """Keep what the steps left; a state that is not finite is dropped."""
        assert self.optimizer is not None
        found = {
            f"{type(self.optimizer).__name__}.{at}.{key}": value
            for at, parameter in enumerate(_parameters(self.optimizer))
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        is_finite = all(bool(torch.isfinite(one).all()) for one in found.values())
        self.state = found if is_finite else {}


class OptimizerRound(OwnRound):
    """One round whose local optimizer goes on."""

    def stepping(self, work: Work, optimizer: torch.optim.Optimizer) -> None:
        kept = self._device
        assert isinstance(kept, KeptOptimizer)
        kept.take(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
