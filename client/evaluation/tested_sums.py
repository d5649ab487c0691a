"""Tests one model, or two, on some examples: loss, metrics and counts of the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Subset

from headwater.client.evaluation.other_model import swapped
from headwater.client.trainer.held_out import seed_of_tests
from headwater.client.training.context import TrainingContext
from headwater.common.data.evaluation import EvaluationSums, evaluate_sums
from headwater.common.data.example_faults import ExampleFault
from headwater.common.data.example_lengths import ExampleLengths
from headwater.common.errors import NonFiniteUpdate
from headwater.common.evaluation.kinds import Floats, Ints
from headwater.common.evaluation.measures import Measures
from headwater.common.evaluation.terms import (
    FIRST_METRIC,
    LOSS,
    NUM_EXAMPLES,
    NUM_FIGURES,
    NUM_LEFT_OUT,
    WEIGHT,
)
from headwater.common.example_streams import copied
from headwater.common.task import Examples, Task

Faults = dict[int, ExampleFault]
"""The examples that are left out, by their positions in the device's data."""


@dataclass(kw_only=True, slots=True)
class TestedSums:
    """The sums of one model over ``num_examples`` examples."""

    __test__ = False  # pytest, it is no test

    num_examples: int
    total: EvaluationSums
    counts: Ints
    reals: Floats

    def row(self, *, num_left_out: int) -> Floats:
        """Return the figures and the reals, as they are sent."""
        row = np.zeros(NUM_FIGURES)
        row[NUM_EXAMPLES], row[NUM_LEFT_OUT] = self.num_examples, num_left_out
        row[WEIGHT], row[LOSS] = self.total.weight, self.total.loss_sum
        names = sorted(self.total.metric_sums)
        row[FIRST_METRIC:][: len(names)] = [self.total.metric_sums[name] for name in names]
        return np.concatenate([row, self.reals])


def test_models(
    context: TrainingContext,
    positions: Sequence[int],
    measures: Measures,
    *,
    num_models: int,
    batch_size: int,
) -> tuple[list[TestedSums], Faults]:
    """Return the sums of the loaded model, and of the one before it, on the same examples.

    An example that cannot be evaluated under one of them is left out for both, with the reason.

    Raises:
        NonFiniteUpdate: a sum is not finite, though each example's loss is.
        HeadwaterError, Exception: see ``evaluate_sums`` and ``Measures.add``.
    """
    faults: Faults = {}
    while True:
        known, found = len(faults), list[TestedSums]()
        for at in range(num_models):
            usable = [position for position in positions if position not in faults]
            with swapped(context.image) if at else nullcontext():
                tested = _test_model(context, usable, measures, batch_size)
            found.append(tested)
            faults |= {usable[place]: fault for place, fault in tested.total.faults.items()}
        is_same = len({one.num_examples for one in found}) == 1
        if is_same or len(faults) == known:
            return found, faults


test_models.__test__ = False  # type: ignore[attr-defined] # pytest, it is no test


def _test_model(
    context: TrainingContext, positions: Sequence[int], measures: Measures, batch_size: int
) -> TestedSums:
    examples: Examples = Subset(context.examples, positions)  # type: ignore[arg-type]
    lengths = context.lengths
    counting = _Counting(context.task, measures)
    total = evaluate_sums(
        cast(Task, counting),
        context.image.model,
        examples,
        batch_size,
        None if lengths is None else ExampleLengths(examples, lengths.record),
        seed=seed_of_tests(context.name),
    )
    if not all(math.isfinite(one) for one in (total.loss_sum, *total.metric_sums.values())):
        raise NonFiniteUpdate(f"{context.name}: the held-out loss or a metric is not finite")
    return TestedSums(
        num_examples=len(positions) - len(total.faults),
        total=total,
        counts=counting.counts,
        reals=counting.reals,
    )


class _Counting:
    """A task that counts its predictions wherever its loss is finite, and so is counted too."""

    def __init__(self, task: Task, measures: Measures) -> None:
        self._task, self._measures = task, measures
        self.counts, self.reals = measures.empty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss_sum(self, model: nn.Module, batch: Any) -> Any:
        """Return the task's own sums of a batch, and count its predictions."""
        own = copied(batch) if self._measures.of else None  # a loss may write to its batch
        result = self._task.loss_sum(model, batch)
        loss = result[0] if isinstance(result, tuple) and result else None
        if own is not None and isinstance(loss, Tensor) and bool(loss.isfinite().all()):
            self._measures.add(self._task, model, own, self.counts, self.reals)
        return result
