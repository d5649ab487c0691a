"""The local optimizer's state, which stays on the device from one round to the next.

Without it each round begins with a momentum of zero, which takes some ten steps to build up.
The state is the optimizer's own: the momentum of SGD, the two moments of AdamW. DiLoCo's workers
keep theirs too (Douillard et al. 2023, section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.client.own_feature.device_feature import DeviceFeature, DeviceWork
from headwater.client.own_feature.own_round import OwnRound
from headwater.client.training.round import Work

SHAPE = "shape"
"""Of the parameter, beside a state of other shapes, such as the rows and columns of Adafactor."""


class KeptOptimizer(DeviceFeature):
    """Keeps each tensor of the optimizer's state, under the optimizer's name."""

    def __init__(self, terms: Any) -> None:
        super().__init__(terms)
        self.optimizer: torch.optim.Optimizer | None = None

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Give a new optimizer the state of the last round; one of another model is dropped."""
        self.optimizer = optimizer
        for at, parameter in enumerate(_parameters(optimizer)):
            begin = _begin(optimizer, at)
            found = {
                name.removeprefix(begin): tensor.clone()
                for name, tensor in self.state.items()
                if name.startswith(begin)
            }
            shape = found.pop(SHAPE, None)
            if found and (
                _fits(found, parameter)
                if shape is None
                else shape.tolist() == list(parameter.shape)
            ):
                optimizer.state[parameter].update(found)

    def end(self, work: DeviceWork) -> None:
        """Keep what the steps left; a state that is not finite is dropped."""
        assert self.optimizer is not None
        found: dict[str, Tensor] = {}
        for at, parameter in enumerate(_parameters(self.optimizer)):
            state = self.optimizer.state.get(parameter, {})
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            if not _fits(tensors, parameter):
                tensors[SHAPE] = torch.tensor(parameter.shape)
            begin = _begin(self.optimizer, at)
            found |= {begin + key: tensor for key, tensor in tensors.items()}
        is_finite = all(bool(torch.isfinite(one).all()) for one in found.values())
        self.state = found if is_finite else {}


class OptimizerRound(OwnRound):
    """One round whose local optimizer goes on."""

    def stepping(self, work: Work, optimizer: torch.optim.Optimizer) -> None:
        kept = self._device
        assert isinstance(kept, KeptOptimizer)
        kept.take(optimizer)


def _fits(state: Mapping[str, Tensor], parameter: Tensor) -> bool:
    """Return whether each tensor is a number or has the parameter's shape."""
    return all(one.dim() == 0 or one.shape == parameter.shape for one in state.values())


def _begin(optimizer: torch.optim.Optimizer, at: int) -> str:
    return f"{type(optimizer).__name__}.{at}."


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
