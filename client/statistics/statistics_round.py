"""A device's part of statistics: the sums over its examples, or the result for its task."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from headwater.client.training.context import TrainingContext
from headwater.client.training.round import Feature, Work
from headwater.client.training.sampler import seed_of
from headwater.common.errors import ProtocolMismatch, TaskError
from headwater.common.messages import Plan, Update
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.statistics.columns import Columns, Statistics, columns_of, give_once
from headwater.common.statistics.kinds import Floats, Ints
from headwater.common.statistics.terms import COUNTS, LARGEST, MOMENTS, StatisticsTerms
from headwater.common.task import Task, max_weight_per_example
from headwater.common.wording import counted

log = logging.getLogger(__name__)

NUM_TRIED = 8
"""Examples on which a task's statistics are tried before the first round."""


def columns_for(plan: Plan, terms: StatisticsTerms, task: Task, *, name: str) -> Columns:
    """Return the columns that the device's own task measures, which must be the server's.

    ``name`` is the device's.

    Raises:
        TaskError: the task measures nothing.
        ProtocolMismatch: it measures something else than the server's.
    """
    columns = columns_of(task)
    asked = (terms.columns, terms.num_counts, terms.num_moments)
    if asked != (columns.digest, columns.num_counts, columns.num_moments):
        raise ProtocolMismatch(
            f"{name}, round {plan.round}: the server's task measures other statistics than this "
            "device's: other names, bounds or labels",
            remedy="start both sides with the same file of the task",
        )
    return columns


def try_statistics(context: TrainingContext) -> None:
    """Measure a device's first examples, before the first round.

    A device that masks gives each example to one sum of statistics: if the task fails there, it
    adds nothing, and may not add it later.

    Raises:
        TaskError, TaskFailed: see ``columns_of`` and ``Columns.sums``.
    """
    examples = context.examples
    first = (examples[position] for position in range(min(len(examples), NUM_TRIED)))
    columns_of(context.task).sums(context.task, first)


class StatisticsRound(Feature):
    """Measures the window's examples, or gives the task what the run has found."""

    def prepare(self, work: Work) -> None:
        """Give the task the result, before its loss is computed.

        Raises:
            TaskError, TaskFailed, ProtocolMismatch: see ``columns_for`` and ``give``.
        """
        terms = work.plan.of(StatisticsTerms)
        assert terms is not None  # see client.features
        task = work.context.task
        if (sums := terms.found) is None:
            columns_for(work.plan, terms, task, name=work.context.name)
            return

        def found() -> Statistics:
            columns = columns_for(work.plan, terms, task, name=work.context.name)
            return columns.found(sums.counts, sums.moments, sums.noise)

        give_once(task, sums, found)

    def finish(self, work: Work) -> Update | None:
        """Return, under noise, a report of the plan's own numbers."""
        plan, context = work.plan, work.context
        terms = None if plan.asks_model else plan.of(PrivacyTerms)
        if terms is None:
            return None
        from headwater.client.privacy.private_update import private_update  # few rounds are private

        return private_update(
            plan,
            terms,
            work.values_P[:0],
            name=context.name,
            weight=max_weight_per_example(context.task) * plan.quota,
            seconds=context.clock.seconds() - work.start_seconds,
            vitals=context.vitals(),
        )

    def sums(self, work: Work) -> Mapping[str, Tensor]:
        """Return the sums over all examples of the window, whatever their number takes.

        Raises:
            TaskError, TaskFailed: see ``Columns.sums``; or a count is too large for float32.
        """
        if work.plan.asks_model:
            return {}
        task, examples = work.context.task, work.context.examples
        # Augmented examples are the same ones on each machine.
        seed = seed_of("statistics", work.plan.run_seed, work.context.name)
        torch.default_generator.manual_seed(seed)
        used = (examples[position] for position in work.used)
        columns = columns_of(task)
        counts_C: Floats | Ints
        if work.plan.is_private:
            counts_C, moments_M, num_clipped = columns.clipped_sums(task, used)
            if num_clipped:
                log.warning(
                    "%s of %s with several values in a column count less, as the noise is for one",
                    counted(num_clipped, "example"),
                    f"{len(work.used):,}",
                )
        else:
            counts_C, moments_M = columns.sums(task, used)
        if counts_C.max(initial=0) > LARGEST:
            raise TaskError(
                f"a count of {counts_C.max():,} on one device: counts up to {LARGEST:,.0f} are "
                "exact, and no others are sent",
                remedy="let statistics return fewer values of an example",
            )
        found = {COUNTS: torch.from_numpy(counts_C), MOMENTS: torch.from_numpy(moments_M)}
        return {name: values for name, values in found.items() if len(values)}
