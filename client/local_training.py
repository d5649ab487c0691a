"""One round's work on a device: sum the gradients of K micro-batches, exactly, and report.

With ``local_steps > 1`` the device takes H steps of plain SGD on means of its own sums (McMahan et
al. 2017, algorithm 1) and sends weight x (parameters before - after), which the server treats as a
gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from client.micro_batches import Window, cut
from client.window_sum import WindowSum, reason_to_stop, sum_window
from client.workplace import Workplace
from common.errors import BuffersChanged, EmptyUpdate, NonFiniteUpdate
from common.update import Plan, Update, UpdateReport


def train(plan: Plan, window: Window, place: Workplace) -> Update:
    """Sum the window's gradients and return the update, a view of the accumulator's vector.

    At the plan's deadline, or when asked to stop, it returns the k < K micro-batches that it has.

    Raises:
        EmptyUpdate: no example gave a finite loss and gradient.
        OutOfMemory: one example alone does not fit.
        BuffersChanged, TaskFailed, TaskError: see ``common.errors``.
    """
    start_seconds = place.clock.seconds()
    place.image.model.train()
    buffers = [(name, b, b._version) for name, b in place.image.model.named_buffers()]
    if plan.local_steps == 1:
        values_P, total = place.accumulator.values_P, sum_window(plan, window, place, start_seconds)
    else:
        values_P, total = take_local_steps(plan, window, place, start_seconds)
    now = dict(place.image.model.named_buffers())
    for name, buffer, version in buffers:
        if now.get(name) is not buffer or buffer._version != version:
            raise BuffersChanged(f"training changed the buffer {name}")
    if total.weight == 0:
        raise EmptyUpdate(
            f"{place.name}, round {plan.round}: none of {len(window.positions)} examples gave a "
            f"finite loss and gradient"
        )
    report = UpdateReport(
        name=place.name,
        round=plan.round,
        num_examples=total.num_examples,
        weight=total.weight,
        loss_sum=total.loss_sum,
        metric_sums=total.metric_sums,
        micro_batch_size=total.micro_batch_size,
        num_refused=len(total.refused),
        seconds=place.clock.seconds() - start_seconds,
        steps=tuple(total.steps),
        reason="epoch end" if total.reason == "quota" and window.ends_epoch else total.reason,
        vitals=place.vitals(),
    )
    return Update(values_P=values_P, report=report)


def take_local_steps(
    plan: Plan, window: Window, place: Workplace, start_seconds: float
) -> tuple[Tensor, WindowSum]:
    """Take H local steps and return weight x (before - after) with the totals of all steps."""
    image = place.image
    before_P = image.values_P.clone()
    optimizer = torch.optim.SGD(image.trainable(), lr=plan.local_learning_rate)
    size = math.ceil(plan.accumulation_steps / plan.local_steps) * plan.micro_batch_size
    total = WindowSum(micro_batch_size=plan.micro_batch_size)
    try:
        for positions in cut(window.positions, size):
            if total.taken and (reason := reason_to_stop(plan, total, place, start_seconds)):
                total.reason = reason
                break
            part = Window(
                positions=positions,
                epoch=window.epoch,
                offset=window.offset + total.num_examples,
                ends_epoch=False,
            )
            done = sum_window(plan, part, place, start_seconds)
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
    if not math.isfinite(float(values_P.abs().max())):
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
        metric_sums={
            n: first.metric_sums.get(n, 0.0) + second.metric_sums.get(n, 0.0) for n in sorted(names)
        },
        steps=first.steps + second.steps,
        taken=first.taken + second.taken,
        refused=first.refused + second.refused,
        micro_batch_size=second.micro_batch_size,
        reason=second.reason,
    )
