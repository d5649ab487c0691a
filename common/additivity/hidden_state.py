"""Finds state that a forward pass changes outside of parameters and buffers.

A counter in an attribute, a moving average as a plain tensor or a cache make a loss depend on the
calls before it, and so on how the examples are cut. The same batch then gives another loss a second
time, though the random numbers are the same. A generator of the model's own does that as well: it
is no fault, and is told by its type.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Losses of one batch in two calls; threads may add in another order.
TOLERANCE = 1e-5
MAX_NAMES = 3
OF_MODULES = frozenset(vars(nn.Module()))
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def changed_attributes(
    task: object, model: nn.Module, loss_of_call: Callable[[], float]
) -> tuple[str, ...] | None:
    """Return the attributes of model and task through which a call changes the next one's loss.

    ``loss_of_call`` runs the task on one batch. None if two calls with the same random numbers give
    the same loss. No name if they do not, and nothing is seen to change but a random generator.
    """
    before = dict(_attributes(task, model))
    with same_random_numbers() as restart:
        first = loss_of_call()
        restart()
        second = loss_of_call()
    if abs(first - second) <= TOLERANCE * max(abs(first), abs(second)) or first != first:
        return None
    after = dict(_attributes(task, model))
    names = [name for name in after if after[name] != before.get(name)]
    return tuple(names[:MAX_NAMES])


@contextmanager
def same_random_numbers() -> Iterator[Callable[[], None]]:
    """Yield a function that sets the process's generators back to their state at the start.

    They are set back at the end as well.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restart() -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])

    try:
        yield restart
    finally:
        restart()


def _attributes(task: object, model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield each attribute by its name, with a value that differs once it has changed."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_MODULES and not isinstance(value, GENERATORS):
                yield f"{prefix}.{name}".lstrip("."), _mark(value)
    for name, value in getattr(task, "__dict__", {}).items():
        if not isinstance(value, (nn.Module, *GENERATORS)):
            yield f"{type(task).__name__}.{name}", _mark(value)


def _mark(value: Any) -> object:
    """Return what tells a value from itself after a change; big objects are told by their size."""
    if isinstance(value, Tensor):
        return id(value), value._version, tuple(value.shape)
    if isinstance(value, np.ndarray):
        return id(value), value.shape, value.tobytes() if value.nbytes < 1 << 16 else None
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return value
    if isinstance(value, list | tuple | set | frozenset | dict):
        inner = tuple(_mark(item) for item in [*value][:64]) if not isinstance(value, dict) else ()
        return len(value), inner
    return id(value), len(value) if hasattr(value, "__len__") else None
