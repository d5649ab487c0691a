"""A task's sums as tensors that ``torch.func`` can transform, and what each example adds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwater.common.data.batches import UnsupportedBatch
from headwater.common.task import Task
from headwater.simulation.vectorised.round_columns import Bools, Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleSums:
    """What each of N examples adds to the loss, the weight and the metrics."""

    loss: Floats
    weight: Floats
    metrics: Mapping[str, Floats]


class ScatteredSums:
    """What each of N examples adds, collected from passes over some of them."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._loss, self._weight = np.zeros(num_rows), np.zeros(num_rows)
        self._metrics: dict[str, Floats] = {}

    def put(self, sums: ExampleSums, rows: Ints, mask: Bools) -> None:
        """Put a pass's sums into these rows; only those that ``mask`` includes."""
        at = rows[mask]
        self._loss[at], self._weight[at] = sums.loss[mask], sums.weight[mask]
        for name, values in sums.metrics.items():
            self._metrics.setdefault(name, np.zeros(self._num_rows))[at] = values[mask]

    def joined(self) -> ExampleSums:
        """Return the sums of all examples."""
        return ExampleSums(loss=self._loss, weight=self._weight, metrics=self._metrics)


class LossSum(nn.Module):
    """``loss_sum`` as a module's forward pass that returns tensors only, as torch.func needs."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self._task = task
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return loss, weight and metrics of a batch."""
        answer = self._task.loss_sum(self.model, batch)
        sums = answer[2] if len(answer) == 3 else {}
        metrics = {str(name): _number(value) for name, value in sums.items()}
        return answer[0], _number(answer[1]), metrics


def _number(value: Any) -> Tensor:
    """Return a weight or a metric without dimensions; one of one element is a number, too."""
    number = torch.as_tensor(value).detach().to(torch.float64)
    if number.numel() != 1:
        raise UnsupportedBatch(f"a weight or a metric of a batch has {number.numel()} elements")
    return number.reshape(())


def call_with(module: nn.Module, replaced: Mapping[str, Tensor], *args: Any) -> Any:
    """Return what a module returns with other tensors in place of parameters, given by name.

    Each place of a parameter is replaced once. ``functional_call`` by itself replaces that of a
    module with two names twice, and puts the replacing tensor back at the end.
    """
    places: dict[int, list[str]] = {}
    for prefix, inner in module.named_modules():
        own = inner.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for name, parameter in own:
            places.setdefault(id(parameter), []).append(name)
    groups = {name: group for group in places.values() for name in group}
    given = {place: tensor for name, tensor in replaced.items() for place in groups[name]}
    return functional_call(module, given, args, tie_weights=False)


@contextlib.contextmanager
def unsupported_errors() -> Iterator[None]:
    """Raise any error of torch.func as ``UnsupportedBatch``, except a failed allocation."""
    try:
        yield
    except (MemoryError, UnsupportedBatch):
        raise
    except Exception as error:
        sentence = str(error).partition(". ")[0].partition("\n")[0]
        raise UnsupportedBatch(f"{type(error).__name__}: {sentence[:200]}") from error


@contextlib.contextmanager
def computing_in(precision: str) -> Iterator[None]:
    """Compute in the plan's precision, with the attention kernel that torch.func has rules for.

    torch.func runs the CPU's fused kernel example by example, with a warning for each.
    """
    with sdpa_kernel(SDPBackend.MATH), autocast(precision):
        yield


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    """Return torch's context for a plan's precision."""
    is_narrow = precision == "bfloat16"
    return torch.autocast("cpu", dtype=torch.bfloat16) if is_narrow else contextlib.nullcontext()


def example_sums(loss: Tensor, weight: Tensor, metrics: Mapping[str, Tensor]) -> ExampleSums:
    """Return tensors of loss, weight and metrics, with one axis or more of examples, as columns."""
    return ExampleSums(
        loss=loss.detach().double().numpy(),
        weight=weight.numpy(),
        metrics={name: value.numpy() for name, value in metrics.items()},
    )


def numbers(of_rows: Tensor) -> Floats:
    """Return a tensor's values as a column."""
    values: Floats = of_rows.detach().double().numpy()
    return values
