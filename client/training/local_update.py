"""A client's work in one round: sum the gradients of K micro-batches exactly, and report.

With ``local_steps > 1`` the client takes H steps of plain SGD on means of its own sums (McMahan et
al. 2017, algorithm 1) and sends weight x (parameters before - after), which the server treats as a
gradient.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwater.client.memory.activation_checkpointing import is_on_in
from headwater.client.training.accumulation import WindowSum, sum_window
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import Window, split
from headwater.client.training.spool import Spool
from headwater.client.training.stop_rules import StopRules
from headwater.common.errors import BuffersChanged, EmptyUpdate, NonFiniteUpdate
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.model.vectors import CHUNK, all_finite

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSum:
    """A window's gradient sum before it becomes an update."""

    values_P: Tensor
    total: WindowSum
    start_seconds: float


def train_round(
    plan: Plan, window: Window, context: TrainingContext, spool: Spool | None = None
) -> Update:
    """Sum the window's gradients and return the update, a view of the accumulator's vector.

    Raises:
        HeadwaterError: see ``sum_gradients`` and ``make_update``.
    """
    return make_update(plan, window, context, sum_gradients(plan, window, context, spool))


def sum_gradients(
    plan: Plan, window: Window, context: TrainingContext, spool: Spool | None = None
) -> LocalSum:
    """Sum the window's gradients into the accumulator.

    Returns the k < K micro-batches done so far at the plan's deadline, on a request to stop, or if
    the device's owner wants it to do less. What the spool holds of the same window is not summed
    again; the time since the window began counts.

    Raises:
        OutOfMemory: one example alone does not fit.
        BuffersChanged, TaskFailed, TaskError, NonFiniteUpdate: see ``headwater.common.errors``.
    """
    start_seconds = context.clock.seconds()
    image = context.image
    if not all([module.training for module in image.modules]):  # noqa: C419 - half of the time
        image.model.train()
    buffers = [(name, buffer, buffer._version) for name, buffer in image.buffers()]
    if plan.local_steps == 1:
        start_seconds, total = _sum_or_resume(plan, window, context, spool, start_seconds)
        values_P = context.accumulator.values_P
    else:
        if spool is not None:
            _warn_not_spooled()
        rules = StopRules(plan, context, start_seconds)
        values_P, total = take_local_steps(plan, window, context, rules)
    now = dict(image.buffers()) if buffers else {}
    for name, buffer, version in buffers:
        if now.get(name) is not buffer or buffer._version != version:
            raise BuffersChanged(f"training changed the buffer {name}")
    return LocalSum(values_P=values_P, total=total, start_seconds=start_seconds)


def make_update(
    plan: Plan, window: Window, context: TrainingContext, local_sum: LocalSum
) -> Update:
    """Scale the sum to the plan's weight and attach its report.

    Raises:
        EmptyUpdate: no example had a finite loss and gradient.
        NonFiniteUpdate: the sum overflows float32 at the plan's weight.
    """
    total, values_P = local_sum.total, local_sum.values_P
    if total.weight == 0:
        raise EmptyUpdate(
            f"{context.name}, round {plan.round}: none of {len(window.positions)} examples had a "
            f"finite loss and gradient"
        )
    weight = plan.weigh_as or total.weight
    if not scale(values_P, by=weight, over=total.weight):
        raise NonFiniteUpdate(
            f"{context.name}, round {plan.round}: the sum over weight {total.weight} overflows "
            f"float32 when scaled to weight {weight}"
        )
    ratio = weight / total.weight
    report = UpdateReport(
        name=context.name,
        round=plan.round,
        num_examples=total.num_examples,
        weight=weight,
        loss_sum=total.loss_sum * ratio,
        metric_sums={name: value * ratio for name, value in total.metric_sums.items()},
        micro_batch_size=total.micro_batch_size,
        num_refused=len(total.refused),
        seconds=context.clock.seconds() - local_sum.start_seconds,
        steps=tuple(total.steps),
        reason=total.reason,
        vitals=context.vitals(),
        is_checkpointed=is_on_in(context.image.modules),
    )
    return Update(values_P=values_P, report=report)


def _sum_or_resume(
    plan: Plan,
    window: Window,
    context: TrainingContext,
    spool: Spool | None,
    start_seconds: float,
) -> tuple[float, WindowSum]:
    """Sum a window, from where its spool file ends; return when the window began, and the sum."""
    if spool is None:
        rules = StopRules(plan, context, start_seconds)
        return start_seconds, sum_window(plan, window, context, rules)
    spooled = spool.open(plan, window, context, start_seconds)
    resumed = spooled.load()
    rules = StopRules(plan, context, spooled.start_seconds)
    total = sum_window(plan, window, context, rules, resumed=resumed, after_each=spooled.save)
    return spooled.start_seconds, total


@functools.cache
def _warn_not_spooled() -> None:
    log.warning("with local steps a window is not spooled: a power cut loses the round's work")


def scale(values_P: Tensor, *, by: int, over: int) -> bool:
    """Multiply a vector by the ratio of two weights, in place; return False if it overflows.

    Each coordinate is rounded once, from float64: the result is within 0.5 ulp of the exact one,
    but for the rounding of float64 itself (2^-28 of it). A ratio of 1 changes no bit.
    """
    if by == over:
        return True
    is_finite = True
    for chunk in torch.split(values_P, CHUNK):
        chunk.copy_(chunk.double().mul_(by).div_(over))
        is_finite &= all_finite(chunk)
    return is_finite


def take_local_steps(
    plan: Plan, window: Window, context: TrainingContext, rules: StopRules
) -> tuple[Tensor, WindowSum]:
    """Take H local steps; return weight x (before - after) and the totals over all steps.

    Raises:
        NonFiniteUpdate: the steps diverged.
    """
    image = context.image
    before_P = image.values_P.clone()
    optimizer = torch.optim.SGD(image.trainable(), lr=plan.local_learning_rate)
    size = math.ceil(plan.accumulation_steps / plan.local_steps) * plan.micro_batch_size
    total = WindowSum(micro_batch_size=plan.micro_batch_size)
    try:
        for positions in split(window.positions, size):
            part = replace(window, positions=positions)
            step_sum = sum_window(plan, part, context, rules, before=total)
            if step_sum.weight:
                context.accumulator.values_P.div_(step_sum.weight)
                optimizer.step()
            total = _joined(total, step_sum)
            if step_sum.reason != "quota":
                break
        # The accumulator's vector is free now and takes the difference.
        values_P = torch.sub(before_P, image.values_P, out=context.accumulator.values_P)
        values_P.mul_(total.weight)
    finally:
        image.values_P.copy_(before_P)
    if not all_finite(values_P):
        raise NonFiniteUpdate(
            f"{context.name}, round {plan.round}: the local steps diverged",
            remedy="lower --local-learning-rate or --local-steps",
        )
    return values_P, total


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
    )
