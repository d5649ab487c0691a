"""Evaluates a model over all examples, except those that it cannot be evaluated on.

As in training, an example is left out if its loss is not finite or if it raises an exception; it is
counted, with the reason. A batch that fails is divided until each half is usable or one example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from headwater.common.data.batches import batch_of
from headwater.common.data.example_faults import ExampleFault, exception_fault, loss_fault
from headwater.common.data.example_lengths import ExampleLengths
from headwater.common.errors import HeadwaterError
from headwater.common.task import Examples, Metrics, Task, loss_sum_alone
from headwater.common.user_code.failures import is_allocation_failure


@dataclass(kw_only=True, slots=True)
class EvaluationSums:
    """The sums over the examples that could be evaluated, and the faults of those left out."""

    loss_sum: float = 0.0
    weight: int = 0
    metric_sums: Metrics = field(default_factory=dict)
    faults: dict[int, ExampleFault] = field(default_factory=dict)
    """By the example's position."""


def evaluate_sums(
    task: Task,
    model: nn.Module,
    examples: Examples,
    micro_batch_size: int,
    lengths: ExampleLengths | None = None,
    *,
    seed: int = 0,
) -> EvaluationSums:
    """Return the sums over all examples that can be evaluated, in evaluation mode.

    With ``lengths`` the batches are of examples of like lengths. What examples or losses draw from
    torch follows from ``seed`` and a batch's first example; the caller's generator stays as it is.

    Raises:
        TaskError, MemoryError: the task breaks a rule, or an allocation failed.
        Exception: the task's own, if every example raises one.
    """
    model.eval()
    total, raised = EvaluationSums(), list[Exception]()
    with torch.random.fork_rng(devices=[]):
        for positions in _batches(len(examples), micro_batch_size, lengths):
            _add(total, task, model, examples, positions, raised, seed)
    if raised and len(raised) == len(examples):
        raise raised[0]
    return total


def _batches(
    num_examples: int, size: int, lengths: ExampleLengths | None
) -> Sequence[Sequence[int]]:
    if lengths is not None:
        return lengths.cut(range(num_examples), size)
    return [range(start, min(start + size, num_examples)) for start in range(0, num_examples, size)]


def _add(
    total: EvaluationSums,
    task: Task,
    model: nn.Module,
    examples: Examples,
    positions: Sequence[int],
    raised: list[Exception],
    seed: int,
) -> None:
    """Add a batch to the total; divide it if it fails. Exceptions of single examples are kept."""
    failure: Exception | None = None
    torch.default_generator.manual_seed(seed + positions[0])
    try:
        loss, weight, metrics = loss_sum_alone(task, model, batch_of(task, examples, positions))
        value = loss.item()
    except (HeadwaterError, MemoryError):
        raise
    except Exception as error:
        if is_allocation_failure(error):
            raise
        failure, value = error, math.nan
    if math.isfinite(value):
        total.loss_sum += value
        total.weight += weight
        for name, metric in metrics.items():
            total.metric_sums[name] = total.metric_sums.get(name, 0.0) + metric
    elif len(positions) > 1:
        middle = len(positions) // 2
        _add(total, task, model, examples, positions[:middle], raised, seed)
        _add(total, task, model, examples, positions[middle:], raised, seed)
    elif failure is not None:
        raised.append(failure)
        total.faults[positions[0]] = exception_fault(failure)
    else:
        total.faults[positions[0]] = loss_fault(batch_of(task, examples, positions))
