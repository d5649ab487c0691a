"""Looks over a sample of the examples before the first round, and finds those that are unusable.

Forward passes only: at most ``MAX_SEEN`` examples, spread over the data, and no longer than
``MAX_SECONDS``; one batch is looked at in any case. A gradient that is not finite though the loss
is shows only in training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from headwater.common.additivity.comparison import together_failed
from headwater.common.additivity.example_cache import ExampleCache
from headwater.common.data.example_faults import ExampleFault, exception_fault, loss_fault
from headwater.common.data.example_lengths import ExampleLengths, Positions
from headwater.common.errors import HeadwaterError
from headwater.common.task import Examples, Task, loss_sum_alone
from headwater.common.user_code.failures import is_allocation_failure

MAX_SEEN, MAX_SECONDS = 10_000, 1.0
UNKNOWN_FAULT = ExampleFault("its loss is NaN or infinite in a batch, though not alone")

AfterFirst = Callable[[ExampleCache, Sequence[int]], object]


@dataclass(kw_only=True, slots=True)
class Survey:
    """The examples that were looked at, and the faults of those that cannot be trained on."""

    num_examples: int
    seen: list[int] = field(default_factory=list)
    faults: dict[int, ExampleFault] = field(default_factory=dict)

    @property
    def good(self) -> list[int]:
        """The examples whose loss is finite, in the order in which they were looked at."""
        return [position for position in self.seen if position not in self.faults]


def look_over(
    task: Task,
    model: nn.Module,
    examples: Examples,
    *,
    batch_size: int,
    after_first: AfterFirst = lambda cache, positions: None,
    max_seconds: float = MAX_SECONDS,
    seconds: Callable[[], float] = time.monotonic,
    lengths: ExampleLengths | None = None,
    may_pass: Callable[[Positions], bool] = lambda positions: True,
) -> Survey:
    """Look at a sample of the examples; ``after_first`` gets the first batch's good ones.

    With ``lengths`` a batch has examples of like lengths. Those of a batch that may not pass are
    not looked at.

    Raises:
        TaskFailed: examples that work alone raise in one batch.
        MemoryError: an allocation failed.
    """
    survey, begun = Survey(num_examples=len(examples)), seconds()
    order = np.random.default_rng(0).permutation(len(examples))[:MAX_SEEN]
    for start in range(0, len(order), batch_size):
        # Ascending within a batch, which is kinder to files.
        positions = tuple(sorted(order[start : start + batch_size].tolist()))
        groups = [positions] if lengths is None else lengths.cut(positions, batch_size)
        for group in filter(may_pass, groups):
            cache = ExampleCache(task, examples)
            survey.faults |= _faults(task, model, cache, group)
            is_first = not survey.seen
            survey.seen += group
            if is_first:
                after_first(cache, [p for p in group if p not in survey.faults])
            if seconds() - begun > max_seconds:
                return survey
    return survey


def _faults(
    task: Task, model: nn.Module, cache: ExampleCache, positions: Sequence[int]
) -> dict[int, ExampleFault]:
    """Find by bisection the examples whose loss is not finite, or that raise.

    Raises:
        TaskFailed: the examples work alone, and raise together.
    """
    fault = _fault_of(task, model, cache, positions)
    if fault is None:
        return {}
    if len(positions) == 1:
        return {positions[0]: fault}
    middle = len(positions) // 2
    halves = positions[:middle], positions[middle:]
    found = _faults(task, model, cache, halves[0]) | _faults(task, model, cache, halves[1])
    if not found and fault.detail:
        raise together_failed(positions, fault.detail)
    return found or dict.fromkeys(positions, UNKNOWN_FAULT)


def _fault_of(
    task: Task, model: nn.Module, cache: ExampleCache, positions: Sequence[int]
) -> ExampleFault | None:
    try:
        loss, _, _ = loss_sum_alone(task, model, cache.batch(positions))
        if math.isfinite(loss.item()):
            return None
        return loss_fault(cache.batch(positions) if len(positions) == 1 else None)
    except (HeadwaterError, MemoryError):
        raise
    except Exception as error:
        if is_allocation_failure(error):
            raise MemoryError(str(error)) from error
        return exception_fault(error)
