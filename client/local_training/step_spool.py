"""What of local steps survives a power cut: the parameters and the optimizer's state after a step.

The spool's file (``headwater.client.training.spool``) is written between two steps, so a power cut
costs the step that it interrupts, and the steps since the file was written, at most some seconds'
work. What follows gives the same bits as without the cut. The file takes as many bytes as the
parameters and the state: 4 per parameter for plain SGD, 12 for AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.client.training.spool_content import check_room
from headwater.common.model.parameters import ModelImage


class StepContent:
    """The content of a window of local steps; implements ``SpoolContent``."""

    def __init__(self, image: ModelImage, optimizer: torch.optim.Optimizer) -> None:
        self.num_taken = 0
        """The local steps that the parameters have taken."""
        self.next_step = 0
        """The local step to begin with; one of which no example could be summed is not taken."""
        self.unused: tuple[int, ...] = ()
        """The places of the parameters that none of these steps' losses used."""
        self._image = image
        self._optimizer = optimizer
        self._parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]

    @property
    def is_writable(self) -> bool:
        """Whether the optimizer's state is float32 tensors and plain numbers, as torch's are."""
        return all(
            value.dtype == torch.float32 if isinstance(value, Tensor) else _is_plain(value)
            for _, _, value in self._state()
        )

    def tensors(self) -> list[Tensor]:
        state = [value.contiguous() for _, _, value in self._state() if isinstance(value, Tensor)]
        return [self._image.values_P, self._image.local_L, *state]

    def plain(self) -> dict[str, Any]:
        return {
            "num_taken": self.num_taken,
            "next_step": self.next_step,
            "unused": self.unused,
            "state": [
                [at, key, list(value.shape) if isinstance(value, Tensor) else {"plain": value}]
                for at, key, value in self._state()
            ],
        }

    def room(self, plain: Mapping[str, Any], num_values: int) -> Tensor:
        shapes = [shape for _, _, shape in plain["state"] if isinstance(shape, list)]
        if any(type(length) is not int or length < 0 for shape in shapes for length in shape):
            raise ValueError("a shape is no list of whole numbers of 0 or more")
        check_room(self._num_own + sum(map(math.prod, shapes)), num_values)
        return torch.empty(num_values)

    def take(self, plain: Mapping[str, Any], read: Tensor) -> None:
        """See ``SpoolContent``; the optimizer's state stays in the memory that was read."""
        num_shared, start = self._image.layout.num_parameters, self._num_own
        self._image.values_P.copy_(read[:num_shared])
        self._image.local_L.copy_(read[num_shared:start])
        for at, key, shape in plain["state"]:
            entries = self._optimizer.state[self._parameters[at]]
            if isinstance(shape, dict):
                entries[key] = shape["plain"]
                continue
            end = start + math.prod(shape)
            entries[key] = read[start:end].view(shape)
            start = end
        self.num_taken, self.next_step = plain["num_taken"], plain["next_step"]
        self.unused = tuple(plain.get("unused", ()))

    @property
    def _num_own(self) -> int:
        layout = self._image.layout
        return layout.num_parameters + layout.num_local

    def _state(self) -> Iterator[tuple[int, str, Any]]:
        """Yield each value of the optimizer's state, with its parameter's number and its name."""
        for at, parameter in enumerate(self._parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                yield at, key, value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
