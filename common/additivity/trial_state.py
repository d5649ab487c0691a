"""Leaves a model as it was after trial passes: modes, gradients, and torch's random numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.common.model.parameters import RANDOM_NUMBERS
from headwater.common.model.vectors import squared_norm


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Put a model into training mode, and leave modes, gradients and random state as they were.

    Gradients that it had are zero afterwards.
    """
    with RANDOM_NUMBERS:  # a model that is built meanwhile draws from torch's generator too
        modes = [(module, module.training) for module in model.modules()]
        parameters = list(model.parameters())
        without = [parameter for parameter in parameters if parameter.grad is None]
        state = torch.get_rng_state()
        model.train()
        try:
            yield
        finally:
            for module, is_training in modes:
                module.training = is_training
            for parameter in without:
                parameter.grad = None
            zero_gradients(parameters)
            torch.set_rng_state(state)


def zero_gradients(parameters: Iterable[Tensor]) -> None:
    """Set the gradients to zero where they are: they may be parts of one vector."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the norm of all gradients, in memory that does not grow with them."""
    squared = math.fsum(
        squared_norm(parameter.grad.detach().reshape(-1))
        for parameter in parameters
        if parameter.grad is not None
    )
    return math.sqrt(squared) if squared >= 0 else math.nan


def random_state() -> tuple[Any, ...]:
    """Return the state of the generators that a model may draw from, in comparable form."""
    numbers: Any = np.random.get_state(legacy=False)
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        numbers["state"]["key"].tobytes(),
        numbers["state"]["pos"],
    )
