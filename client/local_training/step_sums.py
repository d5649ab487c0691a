"""The sums of a window's parts, one for each local step, with the totals of the steps so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import AddMicroBatch, add_micro_batch
from headwater.client.training.sampler import Window
from headwater.client.training.stop_rules import StopRules
from headwater.client.training.window import sum_window
from headwater.client.training.window_sum import WindowSum
from headwater.common.local_training.terms import PLAIN, LocalPlan
from headwater.common.messages import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSum:
    """One local step, whose gradients are in the accumulator's vector."""

    number: int
    """The step's number in the plan, from 0."""
    end: int
    """Where the step ends in the window."""
    weight: int
    """What the step's loss was summed over; 0 if none of its examples could be summed."""
    total: WindowSum
    """The totals of the window up to here."""
    is_last: bool
    """Whether the device must stop after this step, before the plan's end."""


def step_sums(
    plan: Plan,
    window: Window,
    context: TrainingContext,
    rules: StopRules,
    *,
    before: WindowSum,
    first: int = 0,
    add: AddMicroBatch = add_micro_batch,
) -> Iterator[StepSum]:
    """Sum the part of the window of each local step, from ``first`` on, into the vector.

    ``before`` has the totals of the steps before ``first``; ``add`` is as in ``sum_window``.

    Raises:
        HeadwaterError: see ``sum_window``.
    """
    total, local = before, plan.of(LocalPlan) or PLAIN
    for number in range(first, local.steps):
        start, end = local.bounds(number, quota=plan.quota)
        part = window.part(start, end)
        if not part.positions:
            continue
        own = sum_window(plan, part, context, rules, before=total, add=add)
        total = _joined(total, own)
        is_last = own.reason != "quota"
        yield StepSum(number=number, end=end, weight=own.weight, total=total, is_last=is_last)
        if is_last:
            return


def _joined(first: WindowSum, second: WindowSum) -> WindowSum:
    names = first.metric_sums.keys() | second.metric_sums.keys()
    return WindowSum(
        loss_sum=first.loss_sum + second.loss_sum,
        weight=first.weight + second.weight,
        num_examples=first.num_examples + second.num_examples,
        metric_sums={
            n: first.metric_sums.get(n, 0.0) + second.metric_sums.get(n, 0.0) for n in sorted(names)
        },
        steps=first.steps + second.steps,
        done=first.done + second.done,
        refused=first.refused + second.refused,
        faults=first.faults | second.faults,
        num_retries=first.num_retries + second.num_retries,
        num_reductions=first.num_reductions + second.num_reductions,
        micro_batch_size=min(first.micro_batch_size, second.micro_batch_size),
        reason=second.reason,
        are_apart=first.are_apart or second.are_apart,
    )
