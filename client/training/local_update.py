"""One round's work on a device: sum the gradients of K micro-batches, exactly, and report.

With ``local_steps > 1`` the device takes H steps of plain SGD on means of its own sums (McMahan et
al. 2017, algorithm 1) and sends weight x (parameters before - after), which the server treats as a
gradient.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.client.memory.activation_checkpointing import is_on_in
from headwater.client.training.accumulation import WindowSum, sum_window
from headwater.client.training.context import Workplace
from headwater.client.training.micro_batches import Window, cut
from headwater.client.training.spool import Spool
from headwater.client.training.stop_rules import Watch
from headwater.common.errors import BuffersChanged, EmptyUpdate, NonFiniteUpdate
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.model.vectors import CHUNK, all_finite

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a window came to, before anything is told of it."""

    values_P: Tensor
    total: WindowSum
    start_seconds: float


def train(plan: Plan, window: Window, place: Workplace, spool: Spool | None = None) -> Update:
    """Sum the window's gradients and return the update, a view of the accumulator's vector.

    Raises:
        EmptyUpdate, OutOfMemory, NonFiniteUpdate, HeadwaterError: see ``summed`` and ``told``.
    """
    return told(plan, window, place, summed(plan, window, place, spool))


def summed(plan: Plan, window: Window, place: Workplace, spool: Spool | None = None) -> Trained:
    """Sum the window's gradients into the accumulator.

    At the plan's deadline, when asked to stop, or where the device's owner wants it to do less, it
    returns the k < K micro-batches that it has. What a spool holds of the same window is not summed
    again; the seconds since then count.

    Raises:
        OutOfMemory: one example alone does not fit.
        BuffersChanged, TaskFailed, TaskError, NonFiniteUpdate: see ``headwater.common.errors``.
    """
    start_seconds = place.clock.seconds()
    image = place.image
    if not all([module.training for module in image.modules]):  # noqa: C419 - half of the time
        image.model.train()
    buffers = [(name, buffer, buffer._version) for name, buffer in image.buffers()]
    if plan.local_steps == 1:
        start_seconds, total = _sum_whole(plan, window, place, spool, start_seconds)
        values_P = place.accumulator.values_P
    else:
        if spool is not None:
            _say_that_it_is_not_spooled()
        watch = Watch(plan, place, start_seconds)
        values_P, total = take_local_steps(plan, window, place, watch)
    now = dict(image.buffers()) if buffers else {}
    for name, buffer, version in buffers:
        if now.get(name) is not buffer or buffer._version != version:
            raise BuffersChanged(f"training changed the buffer {name}")
    return Trained(values_P=values_P, total=total, start_seconds=start_seconds)


def told(plan: Plan, window: Window, place: Workplace, trained: Trained) -> Update:
    """Weigh what was summed as the plan wants it, and say what it is.

    Raises:
        EmptyUpdate: no example gave a finite loss and gradient.
        NonFiniteUpdate: it overflows float32 at the plan's weight.
    """
    total, values_P = trained.total, trained.values_P
    if total.weight == 0:
        raise EmptyUpdate(
            f"{place.name}, round {plan.round}: none of {len(window.positions)} examples gave a "
            f"finite loss and gradient"
        )
    weight = plan.weigh_as or total.weight
    if not scale(values_P, by=weight, over=total.weight):
        raise NonFiniteUpdate(
            f"{place.name}, round {plan.round}: the sum over {total.weight} overflows float32 as "
            f"one of weight {weight}"
        )
    ratio = weight / total.weight
    num_seen = window.offset + total.num_examples + len(total.refused)
    report = UpdateReport(
        name=place.name,
        round=plan.round,
        num_examples=total.num_examples,
        weight=weight,
        loss_sum=total.loss_sum * ratio,
        metric_sums={name: value * ratio for name, value in total.metric_sums.items()},
        micro_batch_size=total.micro_batch_size,
        num_refused=len(total.refused),
        seconds=place.clock.seconds() - trained.start_seconds,
        steps=tuple(total.steps),
        reason="epoch end" if total.reason == "quota" and window.ends_epoch else total.reason,
        vitals=place.vitals(),
        num_left=max(len(place.examples) - num_seen, 0),
        is_checkpointed=is_on_in(place.image.modules),
    )
    return Update(values_P=values_P, report=report)


def _sum_whole(
    plan: Plan, window: Window, place: Workplace, spool: Spool | None, start_seconds: float
) -> tuple[float, WindowSum]:
    """Sum a window at once, on from where the spool has it; return when it began, and the total."""
    if spool is None:
        return start_seconds, sum_window(plan, window, place, Watch(plan, place, start_seconds))
    kept = spool.opened(plan, window, place, start_seconds)
    begun = kept.take_up()
    watch = Watch(plan, place, kept.start_seconds)
    total = sum_window(plan, window, place, watch, begun=begun, keep_safe=kept.keep)
    return kept.start_seconds, total


@functools.cache
def _say_that_it_is_not_spooled() -> None:
    log.warning("with local steps a window is not spooled: a power cut costs the round")


def scale(values_P: Tensor, *, by: int, over: int) -> bool:
    """Multiply a vector by the ratio of two weights, in place; False if it overflows.

    Each coordinate is rounded once, from float64: the result is within 0.5 ulp of the exact one,
    but for the rounding of float64 itself (a 2^28th of it). A ratio of 1 changes no bit.
    """
    if by == over:
        return True
    is_finite = True
    for chunk in torch.split(values_P, CHUNK):
        chunk.copy_(chunk.double().mul_(by).div_(over))
        is_finite &= all_finite(chunk)
    return is_finite


def take_local_steps(
    plan: Plan, window: Window, place: Workplace, watch: Watch
) -> tuple[Tensor, WindowSum]:
    """Take H local steps and return weight x (before - after) with the totals of all steps."""
    image = place.image
    before_P = image.values_P.clone()
    optimizer = torch.optim.SGD(image.trainable(), lr=plan.local_learning_rate)
    size = math.ceil(plan.accumulation_steps / plan.local_steps) * plan.micro_batch_size
    total = WindowSum(micro_batch_size=plan.micro_batch_size)
    try:
        for positions in cut(window.positions, size):
            part = Window(
                positions=positions,
                epoch=window.epoch,
                offset=window.offset + total.num_examples,
                ends_epoch=False,
            )
            done = sum_window(plan, part, place, watch, before=total)
            if done.weight:
                place.accumulator.values_P.div_(done.weight)
                optimizer.step()
            total = _joined(total, done)
            if done.reason != "quota":
                break
        # The vector is free again: it takes the difference.
        values_P = torch.sub(before_P, image.values_P, out=place.accumulator.values_P)
        values_P.mul_(total.weight)
    finally:
        image.values_P.copy_(before_P)
    if not all_finite(values_P):
        raise NonFiniteUpdate(
            f"{place.name}, round {plan.round}: the local steps diverged",
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
        taken=first.taken + second.taken,
        refused=first.refused + second.refused,
        num_cut_smaller=first.num_cut_smaller + second.num_cut_smaller,
        micro_batch_size=min(first.micro_batch_size, second.micro_batch_size),
        reason=second.reason,
    )
