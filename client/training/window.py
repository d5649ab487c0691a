"""Sums the gradients of one window, K micro-batches, into the vector, whatever fails in between.

A cgroup kills a process that runs out of memory instead of raising an exception. A micro-batch
therefore begins only if the memory model predicts that it fits (``client.training.fitting``). What
fails all the same is handled by summing again, never by correcting the vector
(``client.training.faults``). Every example left out is counted. A window also ends before its
quota, or after it, if the device is slower or faster than planned (``client.training.stop_rules``).

A step's time counts from the end of the step before: time between micro-batches recurs in every
round, and quotas planned without it would never be done in time.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headwater.client.training.context import TrainingContext
from headwater.client.training.faults import (
    FAULTS,
    MicroBatchFault,
    add_apart,
    check_vector,
    recover,
)
from headwater.client.training.fitting import ends_for_memory, log_reductions
from headwater.client.training.gradient_pass import AddMicroBatch, add_micro_batch, with_norm
from headwater.client.training.sampler import Window
from headwater.client.training.stop_rules import StopRules
from headwater.client.training.window_sum import WindowSum
from headwater.common.data.example_lengths import Positions
from headwater.common.messages import MAX_STEPS, Plan, StopReason

EMPTY_SUM = WindowSum()


def sum_window(
    plan: Plan,
    window: Window,
    context: TrainingContext,
    rules: StopRules,
    *,
    before: WindowSum | None = None,
    resumed: WindowSum | None = None,
    after_each: Callable[[WindowSum], None] | None = None,
    add: AddMicroBatch = add_micro_batch,
) -> WindowSum:
    """Sum one window into the vector.

    ``before`` has the totals of the plan's earlier windows, which count towards the plan's limits.
    ``resumed`` continues a sum that the vector already holds. ``after_each`` is called after each
    micro-batch. ``add`` adds one; the simulator's dry run passes a function that only advances
    clock and memory (``headwater.simulation.compute.dry_run``).

    Raises:
        OutOfMemory: one example alone does not fit, and there is nothing to send.
        NonFiniteUpdate: see ``headwater.client.training.faults``.
        TaskError: the task breaks a rule.
    """
    work = _begun(plan, window, context, rules, before or EMPTY_SUM, resumed)
    while (positions := _next_micro_batch(work)) is not None:
        fault: MicroBatchFault | None = None
        try:
            one = functools.partial(add_apart, add=add) if work.total.are_apart else add
            result = one(plan, window, positions, context, work.since_seconds)
            # The gradient noise follows from the norms after the first step with weight and the
            # last.
            if result.needs_check and (work.total.is_careful or not work.total.weight):
                result.step, result.needs_check = with_norm(result.step, context), False
            work.total.add(positions, result)
        except FAULTS as error:
            fault = MicroBatchFault.of(error)  # without the error, whose frames hold activations
        if fault is None:
            work.since_seconds += result.step.seconds
        else:
            work.total = recover(plan, window, positions, work.total, context, fault)
            work.since_seconds = context.clock.seconds()
        _note(work, positions)
        if after_each is not None:
            after_each(work.total)
    context.accumulator.check_views()
    log_reductions(plan, work.total, context)
    return work.total


@dataclass(kw_only=True, slots=True)
class WindowWork:
    """A window that is being summed."""

    plan: Plan
    window: Window
    context: TrainingContext
    rules: StopRules
    before: WindowSum
    total: WindowSum
    since_seconds: float
    """When the last step ended, by the clock."""
    start_seconds: float
    noted_seconds: float


def _begun(
    plan: Plan,
    window: Window,
    context: TrainingContext,
    rules: StopRules,
    before: WindowSum,
    total: WindowSum | None,
) -> WindowWork:
    context.batches.begin(window.positions)
    if total is None:
        context.accumulator.zero()
        remaining = deque(_micro_batches(plan, window, context))
        total = WindowSum(remaining=remaining, micro_batch_size=plan.micro_batch_size)
    now = context.clock.seconds()
    return WindowWork(
        plan=plan,
        window=window,
        context=context,
        rules=rules,
        before=before,
        total=total,
        since_seconds=now,
        start_seconds=now - math.fsum(step.seconds for step in total.steps),
        noted_seconds=now,
    )


def _micro_batches(plan: Plan, window: Window, context: TrainingContext) -> Iterator[Positions]:
    """Yield the window's micro-batches: its quota first, and each epoch before the next."""
    start = 0
    for positions in [window.positions] if context.lengths is None else window.by_epoch():
        quota = max(plan.quota - start, 0)
        for part in (positions[:quota], positions[quota:]):
            yield from context.cut(part, plan)
        start += len(positions)


def _next_micro_batch(work: WindowWork) -> Positions | None:
    """Return the next micro-batch; None at the window's end, where the vector is finite.

    From half of the time to a deadline on the vector is checked after each micro-batch, so that the
    time left is enough to send something.

    Raises:
        OutOfMemory, NonFiniteUpdate: see ``sum_window``.
    """
    while True:
        reason, total = _reason_to_end(work), work.total
        is_late = work.since_seconds > work.rules.half_seconds
        if total.needs_check and (reason is not None or is_late):
            checked = check_vector(work.plan, total, work.context)
            if checked is not total:  # it begins again
                work.total, work.since_seconds = checked, work.context.clock.seconds()
                work.noted_seconds = work.since_seconds
                continue
        if reason is not None:
            _end(work.plan, work.window, total, reason)
            return None
        if total.remaining:  # else what was left does not fit
            return total.remaining.popleft()


def _end(plan: Plan, window: Window, total: WindowSum, reason: StopReason) -> None:
    """End the window, before its remaining examples if there are any."""
    if not total.remaining:
        return
    num_passed = len(window.positions) - sum(map(len, total.remaining))
    has_quota = reason == "finish" and num_passed >= plan.quota
    total.reason = "quota" if has_quota else reason


def _reason_to_end(work: WindowWork) -> StopReason | None:
    """Return why the window ends here; None if the next micro-batch may begin, and fits.

    A report holds at most ``MAX_STEPS`` micro-batches. No plan asks for more, but smaller ones may
    reach the limit; the remaining examples are then left to the next round.

    Raises:
        OutOfMemory: not even one example of the usual length fits, and there is nothing to send.
    """
    total, before, context = work.total, work.before, work.context
    if not total.remaining:
        return "quota"
    has_some = bool(total.done or before.done)
    if has_some and context.should_stop():
        return "asked to stop"
    if work.rules.has_limit:
        passed_seconds = work.since_seconds - work.start_seconds
        reason = work.rules.reason_to_end(total, before, passed_seconds)
        if reason is not None:
            return reason
    if has_some and len(total.steps) + len(before.steps) >= MAX_STEPS:
        return "short of memory"
    is_end = ends_for_memory(work.plan, total, context, has_some=has_some)
    return "short of memory" if is_end else None


def _note(work: WindowWork, positions: Positions) -> None:
    """Tell the stop rules and the display of a micro-batch that was added, or failed."""
    if work.rules.has_limit:
        work.rules.note_attempt(positions, work.since_seconds - work.noted_seconds)
    work.noted_seconds = work.since_seconds
    total, before = work.total, work.before
    work.context.progress.reach(
        len(before.steps) + len(total.steps),
        before.num_examples + total.num_examples,
        len(before.refused) + len(total.refused),
        are_apart=before.are_apart or total.are_apart,
    )
