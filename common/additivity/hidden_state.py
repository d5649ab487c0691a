"""Finds state that a forward pass changes outside of parameters and buffers.

A counter in an attribute, a moving average as a plain tensor or a cache make a loss depend on the
calls before it, and so on how the examples are cut. The same batch then gives another loss a second
time, though the random numbers are the same. A generator of the model's own does that as well: it
is no fault, and its type shows it.
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
MAX_ITEMS = 64  # of a list, a tuple or a dict, that are looked at
OF_MODULES = frozenset(vars(nn.Module()))
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def changed_attributes(
    task: object, model: nn.Module, loss_of_call: Callable[[], float]
) -> tuple[str, ...] | None:
    """Return the attributes of model and task through which a call changes the next one's loss.

    ``loss_of_call`` runs the task on one batch. None if two calls with the same random numbers give
    the same loss. No name if they do not, and nothing is seen to change but a random generator.
    """
    held: list[object] = []  # else a new object may have the id of one that was freed
    before = dict(_attributes(task, model, held))
    with same_random_numbers() as restart:
        first = loss_of_call()
        restart()
        second = loss_of_call()
    if abs(first - second) <= TOLERANCE * max(abs(first), abs(second)) or first != first:
        return None
    after = dict(_attributes(task, model, held))
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


def _attributes(task: object, model: nn.Module, held: list[object]) -> Iterator[tuple[str, object]]:
    """Yield each attribute by its name, with a value that differs once it has changed.

    ``held`` gets the objects whose ids are in these values.
    """
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_MODULES and not isinstance(value, GENERATORS):
                yield f"{prefix}.{name}".lstrip("."), _mark(value, held)
    for name, value in getattr(task, "__dict__", {}).items():
        if not isinstance(value, (nn.Module, *GENERATORS)):
            yield f"{type(task).__name__}.{name}", _mark(value, held)


def _mark(value: Any, held: list[object], depth: int = 3) -> object:
    """Return a mark of a value that differs after a change; of a big object its size."""
    held.append(value)
    if isinstance(value, Tensor):
        return id(value), value._version, tuple(value.shape)
    if isinstance(value, np.ndarray):
        return id(value), value.shape, value.tobytes() if value.nbytes < 1 << 16 else None
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return value
    if isinstance(value, list | tuple | set | frozenset | dict) and depth:
        items = [*(value.values() if isinstance(value, dict) else value)][:MAX_ITEMS]
        return len(value), tuple(_mark(item, held, depth - 1) for item in items)
    try:
        return id(value), len(value)
    except Exception:  # it has no length, as a class has none, or does not tell it
        return id(value), None
