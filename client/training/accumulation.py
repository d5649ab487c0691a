"""Sums the gradients of one window, K micro-batches, into the vector, whatever fails in between.

Faults are handled by summing again, never by correcting the vector. An example that makes the
vector invalid is found, and the window is summed again without it. After an allocation failure the
window is summed again in micro-batches of half the size, and at one example with activation
checkpointing. Every example left out is counted.

A cgroup kills a process that runs out of memory instead of raising an exception. A micro-batch
therefore begins only if the memory model predicts that it fits. If it does not, the remaining
examples continue in smaller micro-batches; nothing has to be summed again. If not even one example
fits, activation checkpointing is switched on; if one still does not fit, the window ends, and the
sum so far is sent with its exact weight. A window also ends before its quota, or after it, if the
device is slower or faster than planned (``headwater.client.training.stop_rules``).

A step's time counts from the end of the step before: time between micro-batches recurs in every
round, and quotas planned without it would never be done in time.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable

from headwater.client.memory.activation_checkpointing import is_on, switch_on
from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import (
    CHANGING_FAULT,
    MICRO_BATCH_FAULT,
    ForwardFailed,
    InvalidGradients,
    MicroBatchResult,
    NonFiniteLoss,
    Positions,
    add_micro_batch,
    bad_examples,
)
from headwater.client.training.sampler import Window, split
from headwater.client.training.stop_rules import StopRules, num_until_finish
from headwater.client.training.window_sum import WindowSum, flat
from headwater.common.errors import NonFiniteUpdate, OutOfMemory
from headwater.common.messages import MAX_STEPS, Plan, StopReason
from headwater.common.system.heap import release_freed_memory

log = logging.getLogger(__name__)

# A data set that answers differently each time may give a NaN now and then.
MAX_RETRIES = 3

AddMicroBatch = Callable[[Plan, Window, Positions, TrainingContext, float], MicroBatchResult]


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
    """Sum one window into the vector; the module's docstring describes faults and memory.

    ``before`` has the totals of the plan's earlier windows, which count towards the plan's limits.
    ``resumed`` continues a sum that the vector already holds. ``after_each`` is called after each
    micro-batch. ``add`` adds one; the simulator's dry run passes a function that only advances
    clock and memory (``headwater.simulation.compute.dry_run``).

    Raises:
        OutOfMemory: one example alone does not fit, and there is nothing to send.
        TaskError: the task breaks a rule.
    """
    before, total = before or EMPTY_SUM, resumed
    context.batches.begin(window.positions)
    if total is None:
        context.accumulator.zero()
        size, quota = plan.micro_batch_size, plan.quota
        within, beyond = window.positions[:quota], window.positions[quota:]
        remaining = deque([*split(within, size), *split(beyond, size)])
        total = WindowSum(remaining=remaining, micro_batch_size=size)
    since_seconds = context.clock.seconds()
    start_seconds = since_seconds - math.fsum(step.seconds for step in total.steps)
    while total.remaining:
        more = rules.num_until_answer()
        if more == 0:
            _end(plan, window, total, "deadline")
            break
        if more is not None:
            total.limit_next(more)
        begun_seconds = since_seconds
        passed_seconds = since_seconds - start_seconds
        reason = _reason_to_end(plan, total, before, context, rules, passed_seconds)
        if reason is not None:
            _end(plan, window, total, reason)
            break
        positions, num_steps = total.remaining.popleft(), len(total.steps)
        has_failed = False
        try:
            total = _add_or_leave_out(plan, window, positions, total, context, add, since_seconds)
        except MemoryError:
            has_failed = True  # handled outside, where the exception no longer holds activations
        if has_failed:
            total = _after_failed_allocation(plan, positions, total, context)
        is_added = len(total.steps) > num_steps
        since_seconds = (
            since_seconds + total.steps[-1].seconds if is_added else context.clock.seconds()
        )
        rules.note_attempt(since_seconds - begun_seconds, num_examples=len(positions))
        context.progress.reach(
            len(before.steps) + len(total.steps),
            before.num_examples + total.num_examples,
            len(before.refused) + len(total.refused),
        )
        if after_each is not None:
            after_each(total)
    context.accumulator.check_views()
    _log_reductions(plan, total, context)
    return total


def _end(plan: Plan, window: Window, total: WindowSum, reason: StopReason) -> None:
    """End the window before its remaining examples."""
    done, end = flat(total.done), -1
    for position in (*done, total.remaining[0][0]):
        end = window.positions.index(position, end + 1)
    has_quota = reason == "finish" and end >= plan.quota
    total.reason = "quota" if has_quota else reason
    # An example refused before the window was summed again may come after the new end.
    refused = Counter(window.positions[:end]) - Counter(done)
    total.refused = list(refused.elements())


def _reason_to_end(
    plan: Plan,
    total: WindowSum,
    before: WindowSum,
    context: TrainingContext,
    rules: StopRules,
    passed_seconds: float,
) -> StopReason | None:
    """Return why the window ends here; None if the next micro-batch may begin, and fits.

    A report holds at most ``MAX_STEPS`` micro-batches. No plan asks for more, but smaller ones may
    reach the limit; the remaining examples are then left to the next round.

    Raises:
        OutOfMemory: not even one example fits, and there is nothing to send.
    """
    has_some = bool(total.done or before.done)
    if has_some:
        steps = total.steps or before.steps
        num_done = total.num_examples + before.num_examples
        if plan.finish_seconds is not None:
            more = num_until_finish(plan, steps, passed_seconds=passed_seconds, num_done=num_done)
            if more == 0:
                return "finish"
            if more is not None:
                total.limit_next(more)
        num_next = len(total.remaining[0])
        reason = rules.reason_to_stop(steps, num_done=num_done, num_next=num_next)
        if reason is not None:
            return reason
        if len(total.steps) + len(before.steps) >= MAX_STEPS:
            return "short of memory"
    num_next = len(total.remaining[0])
    fitting = context.memory.fitting(num_next)
    if fitting is None or fitting >= num_next or _make_fit(total, context, fitting):
        return None
    text = f"{context.name}, round {plan.round}: {context.why_one_does_not_fit()}"
    if not has_some:
        raise OutOfMemory(text)
    log.warning("%s; the sum so far is sent", text)
    return "short of memory"


# Memory.


def _make_fit(total: WindowSum, context: TrainingContext, fitting: int) -> bool:
    """Reduce the micro-batches to the size predicted to fit; False if one example does not fit."""
    num_next = len(total.remaining[0])
    possible = fitting or context.fitting_with_checkpointing(num_next)
    if possible is not None and 0 < possible < num_next:
        total.reduce_micro_batches(possible)
    return possible != 0


def _after_failed_allocation(
    plan: Plan, positions: Positions, total: WindowSum, context: TrainingContext
) -> WindowSum:
    """Restart the window with micro-batches of half the size; at size 1 with checkpointing.

    Raises:
        OutOfMemory: size 1 with checkpointing failed, or there is nothing to checkpoint.
    """
    size = max(len(positions) // 2, 1)
    if len(positions) == 1:
        model = context.image.model
        text = f"{context.name}, round {plan.round}: one example alone does not fit in memory"
        if is_on(model):
            raise OutOfMemory(f"{text}, even with activation checkpointing")
        if not switch_on(model):
            raise OutOfMemory(f"{text}, and the model has no blocks to checkpoint")
        context.memory.use_checkpointing(context.checkpointed_bytes)
        log.warning("%s: activation checkpointing is on, and the window begins again", text)
    else:
        release_freed_memory()
        log.warning("memory ran out at micro-batches of %d: %d from here", len(positions), size)
    total.micro_batch_size = size
    positions_left = flat([*total.done, positions, *total.remaining])
    context.accumulator.zero()
    return total.restarted(split(positions_left, size))


# Bad examples.


def _add_or_leave_out(
    plan: Plan,
    window: Window,
    positions: Positions,
    total: WindowSum,
    context: TrainingContext,
    add: AddMicroBatch,
    since_seconds: float,
) -> WindowSum:
    """Add one micro-batch, or leave out its bad examples; return the total, or a restarted one.

    In a masked round a micro-batch with a bad example is left out whole: the passes of a search
    take time, which the server sees.

    Raises:
        MemoryError: an allocation failed in the pass, or in the search for bad examples.
        NonFiniteUpdate: in a masked round a backward pass failed, and the sum is lost.
    """
    try:
        total.add(positions, add(plan, window, positions, context, since_seconds))
        return total
    except NonFiniteLoss:
        is_invalid = False
    except ForwardFailed:
        is_invalid = not plan.is_masked  # nothing was added
    except InvalidGradients as error:
        is_invalid = True
        if plan.is_masked:
            raise NonFiniteUpdate(
                f"{context.name}, round {plan.round}: a backward pass failed, and a masked round "
                f"takes no time to sum again: {error.fault.kind}"
            ) from error
    if plan.is_masked:
        total.refused += positions
        total.faults |= dict.fromkeys(positions, MICRO_BATCH_FAULT)
        return total
    bad = bad_examples(plan, window, positions, context, with_backward=is_invalid)
    if not bad:  # only of a loss: nothing was added, and the micro-batch is fetched again
        total.num_retries += 1
        if total.num_retries > MAX_RETRIES:
            bad = dict.fromkeys(positions, CHANGING_FAULT)
    # An example may be in the micro-batch twice: a window may be longer than the data.
    total.refused += [p for p in positions if p in bad]
    total.faults |= bad
    good = tuple(p for p in positions if p not in bad)
    if good:
        total.remaining.appendleft(good)
    if is_invalid:
        context.accumulator.zero()
        return total.restarted([*total.done, *total.remaining])
    return total


def _log_reductions(plan: Plan, total: WindowSum, context: TrainingContext) -> None:
    where = f"{context.name}, round {plan.round}"
    if total.num_reductions:
        log.warning(
            "%s: micro-batches of %d instead of %d; memory made them smaller %d time(s)",
            where,
            total.micro_batch_size,
            plan.micro_batch_size,
            total.num_reductions,
        )
