"""The optimizer of a device's local steps: made by its name, its memory, and its path's length.

A device begins every round with a new state: any device may be in any round, and a round that is
repeated gives the same update. With ``LocalTerms.keeps_state`` it goes on with that of its last
counted round (``headwater.client.local_state``).
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable

import torch
from torch import nn

from headwater.common.errors import SettingsError
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.optimizers.named_optimizer import (
    check_steps_on_sums,
    in_groups,
    instance_of,
    optimizer_class,
    with_tuples,
)
from headwater.common.optimizers.torch_compiler_stub import without_dynamo

FLOAT_BYTES = 4


def local_optimizer(
    terms: LocalTerms,
    parameters: Iterable[nn.Parameter],
    *,
    rate: float,
    model: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """Return a new optimizer of the parameters, which are the model's.

    Raises:
        SettingsError: torch has no such optimizer, or it does not take these arguments.
    """
    with without_dynamo():
        kind = optimizer_class(terms.optimizer)
        check_steps_on_sums(kind)
        if "lr" in terms.arguments:
            raise SettingsError(
                "lr is among the arguments of the local optimizer",
                remedy="set it by --local-learning-rate",
            )
        given = {**with_tuples(terms.arguments), "lr": rate}
        made: torch.optim.Optimizer = instance_of(kind, in_groups(kind, parameters, model), given)
        return made


def held_bytes(terms: LocalTerms, *, num_parameters: int) -> int:
    """Return what local steps hold beside model and gradient: the start, and the optimizer's state.

    =====================  ==========================================
    sgd                    4 bytes per parameter
    sgd with momentum      8
    adam, adamw, muon      12
    =====================  ==========================================

    Of a matrix Muon keeps 4 bytes less; they are for what its iteration holds.

    Raises:
        SettingsError: the optimizer cannot be made, or cannot step.
    """
    return round((FLOAT_BYTES + _state_bytes(terms.text)) * num_parameters)


def path_length(terms: LocalTerms, num_steps: int, *, rate: float) -> float:
    """Return how far ``num_steps`` steps along one gradient go, in steps of plain SGD.

    It is the norm of the vector a in Wang et al. 2020 (equation 5): by it the device divides its
    update. For plain SGD it is the number of steps, for Adam too; momentum makes the path longer
    (section 3.2), and a proximal term shorter. Computed by the optimizer itself, on one parameter.
    An optimizer that goes on from round to round makes equal steps along one gradient: its length
    is the number of steps, as a factor that all devices have in common cancels.

    Raises:
        SettingsError: the optimizer cannot be made, or cannot step.
    """
    is_plain = terms.optimizer.lower() == "sgd" and not terms.arguments and not terms.proximal
    if is_plain or terms.keeps_state:
        return float(num_steps)
    # Up to the next power of two, so that a thousand numbers of steps need few runs.
    return _path_lengths(terms.text, rate, 1 << max(num_steps - 1, 0).bit_length())[num_steps]


@functools.lru_cache(maxsize=16)
def _state_bytes(text: str) -> float:
    """Return the optimizer's bytes of state per parameter of a vector, or of a matrix, at most."""
    found = []
    for shape in ((4,), (2, 2)):
        parameter = nn.Parameter(torch.zeros(shape))
        optimizer = _after_steps(LocalTerms.of_text(text), parameter, num_steps=2, rate=1e-3)
        tensors = [
            value
            for entries in optimizer.state.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor) and value.numel() >= parameter.numel()
        ]
        found.append(sum(tensor.nbytes for tensor in tensors) / parameter.numel())
    return max(found)


@functools.lru_cache(maxsize=16)
def _path_lengths(text: str, rate: float, most_steps: int) -> array[float]:
    """Return the path's length after each number of steps up to ``most_steps``.

    Devices of unlike speed take a thousand different numbers of steps, and one run of the optimizer
    gives all lengths.
    """
    parameter, lengths = nn.Parameter(torch.zeros(1, dtype=torch.float64)), array("d", [0.0])
    _after_steps(
        LocalTerms.of_text(text),
        parameter,
        num_steps=most_steps,
        rate=rate,
        after_step=lambda: lengths.append(-parameter.item() / rate),
    )
    return lengths


def _after_steps(
    terms: LocalTerms,
    parameter: nn.Parameter,
    *,
    num_steps: int,
    rate: float,
    after_step: Callable[[], None] = lambda: None,
) -> torch.optim.Optimizer:
    """Step a parameter that starts at zero along gradients of 1; return the optimizer.

    Raises:
        SettingsError: it cannot step.
    """
    optimizer = local_optimizer(terms, [parameter], rate=rate)
    try:
        with without_dynamo():
            for _ in range(num_steps):
                parameter.grad = torch.ones_like(parameter) + terms.proximal * parameter.detach()
                optimizer.step()
                after_step()
    except Exception as error:
        raise SettingsError(
            f"the local optimizer {terms.optimizer} cannot step: {error}",
            remedy="see its page in torch's docs for its arguments",
        ) from error
    return optimizer
