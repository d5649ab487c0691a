"""Sums the gradients of one window, K micro-batches, into the vector, whatever fails in between.

Faults are handled by summing again, never by correcting the vector. An example that makes the
vector invalid is found, and the window is summed again without it. The vector is checked when the
window ends: if it is not finite, the window is summed again with a check after each micro-batch,
which finds the example. From half of the time to a deadline on it is checked after each in any
case, so that the time left is enough to send something. After an allocation failure the
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

import gc
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator

from headwater.client.memory.activation_checkpointing import is_all_recomputed, switch_on
from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import (
    CHANGING_FAULT,
    MICRO_BATCH_FAULT,
    ForwardFailed,
    InvalidGradients,
    MicroBatchResult,
    NonFiniteLoss,
    add_micro_batch,
    bad_examples,
    with_norm,
)
from headwater.client.training.sampler import Window
from headwater.client.training.stop_rules import StopRules
from headwater.client.training.window_sum import WindowSum
from headwater.common.data.example_faults import ExampleFault, own_position
from headwater.common.data.example_lengths import Positions
from headwater.common.errors import NonFiniteUpdate, OutOfMemory
from headwater.common.messages import MAX_STEPS, Plan, StopReason
from headwater.common.system.heap import keep_mmap_threshold, release_freed_memory

log = logging.getLogger(__name__)

# A data set that answers differently each time may give a NaN now and then.
MAX_RETRIES = 3

TOO_LONG = "it is too long for the memory of the device"

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
        remaining = deque(_micro_batches(plan, window, context))
        total = WindowSum(remaining=remaining, micro_batch_size=plan.micro_batch_size)
    since_seconds = context.clock.seconds()
    start_seconds = since_seconds - math.fsum(step.seconds for step in total.steps)
    while True:
        begun_seconds = since_seconds
        passed_seconds = since_seconds - start_seconds
        reason = _reason_to_end(plan, total, before, context, rules, passed_seconds)
        if reason is not None or (total.needs_check and since_seconds > rules.half_seconds):
            total, is_finite = _checked(plan, total, context)
            if not is_finite:
                since_seconds = context.clock.seconds()
                continue
            if reason is not None:
                _end(plan, window, total, reason)
                break
        if not total.remaining:  # what was left does not fit
            continue
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
        if rules.has_limit:
            rules.note_attempt(positions, since_seconds - begun_seconds)
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


def _micro_batches(plan: Plan, window: Window, context: TrainingContext) -> Iterator[Positions]:
    """Yield the window's micro-batches: its quota first, and each epoch before the next."""
    start = 0
    for positions in [window.positions] if context.lengths is None else window.by_epoch():
        quota = max(plan.quota - start, 0)
        for part in (positions[:quota], positions[quota:]):
            yield from context.cut(part, plan)
        start += len(positions)


def _end(plan: Plan, window: Window, total: WindowSum, reason: StopReason) -> None:
    """End the window, before its remaining examples if there are any."""
    if not total.remaining:
        return
    num_passed = len(window.positions) - sum(map(len, total.remaining))
    has_quota = reason == "finish" and num_passed >= plan.quota
    total.reason = "quota" if has_quota else reason


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

    An example that is longer than usual and does not fit alone is left out, and the next may begin.

    Raises:
        OutOfMemory: not even one example of the usual length fits, and there is nothing to send.
    """
    if not total.remaining:
        return "quota"
    has_some = bool(total.done or before.done)
    if has_some and context.should_stop():
        return "asked to stop"
    if rules.has_limit:
        reason = rules.reason_to_end(total, before, passed_seconds)
        if reason is not None:
            return reason
    if has_some and len(total.steps) + len(before.steps) >= MAX_STEPS:
        return "short of memory"
    while total.remaining and not _make_fit(total, context):
        if _leave_out_long(total, context):
            continue
        text = f"{context.name}, round {plan.round}: {context.why_one_does_not_fit()}"
        if not has_some:
            raise OutOfMemory(text)
        log.warning("%s; the sum so far is sent", text)
        return "short of memory"
    return None


# Memory.


def _make_fit(total: WindowSum, context: TrainingContext) -> bool:
    """Cut the next micro-batch until it is predicted to fit; False if an example alone does not."""
    first = total.remaining[0]
    load = context.load(first)
    fitting = context.memory.fitting(load)
    if fitting is None or fitting >= load:
        return True
    least = min(context.load((position,)) for position in first)
    if fitting < least:
        possible = context.fitting_with_checkpointing(load, least=least)
        if possible is None or possible >= load:
            return True
        fitting = possible
    if fitting < least:
        return False
    total.remaining = deque(context.cut_smaller(total.remaining, fitting))
    total.micro_batch_size = min(total.micro_batch_size, max(int(fitting), 1))
    total.num_reductions += 1
    return context.load(total.remaining[0]) <= fitting


def _leave_out_long(total: WindowSum, context: TrainingContext) -> bool:
    """Leave out the next examples, none of which fits, if usual ones do; return whether they do."""
    first, usual = total.remaining[0], context.memory.fitting(1.0)
    if context.lengths is None or usual is None or usual < 1.0:
        return False
    number = own_position(context.examples, first[0])
    why = context.why_one_does_not_fit(context.load(first[:1]))
    detail = f"position {number} has length {context.lengths[first[0]]:,}: {why}"
    fault = ExampleFault(TOO_LONG, detail)
    total.leave_out(total.remaining.popleft(), fault)
    return True


def _after_failed_allocation(
    plan: Plan, positions: Positions, total: WindowSum, context: TrainingContext
) -> WindowSum:
    """Restart the window with micro-batches of half the size; at size 1 with checkpointing.

    An example that is longer than usual, and fails alone even so, is left out.

    Raises:
        OutOfMemory: size 1 with checkpointing failed, or there is nothing to checkpoint.
    """
    gc.collect()  # the failed pass: the frames of its exception hold it, in a cycle
    load, left = context.load(positions), [positions]
    if len(positions) == 1:
        model = context.image.model
        text = f"{context.name}, round {plan.round}: one example alone does not fit in memory"
        was_on = is_all_recomputed(model)
        if not was_on and switch_on(model):
            context.memory.use_checkpointing(context.checkpointed_bytes)
            log.warning("%s: activation checkpointing is on, and the window begins again", text)
        elif load > 1.0:
            total.leave_out(positions, ExampleFault(TOO_LONG))
            left.clear()
        elif was_on:
            raise OutOfMemory(f"{text}, even with activation checkpointing")
        else:
            raise OutOfMemory(f"{text}, and the model has no blocks to checkpoint")
    else:
        keep_mmap_threshold()
        release_freed_memory()
        size = len(positions) // 2
        log.warning("memory ran out at micro-batches of %d: %d from here", len(positions), size)
    total.micro_batch_size = min(total.micro_batch_size, max(int(load / 2), 1))
    groups = context.cut_smaller([*total.done, *left, *total.remaining], load / 2)
    context.accumulator.zero()
    return total.restarted(groups)


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
        result = add(plan, window, positions, context, since_seconds)
        # The gradient noise follows from the norms after the first step with weight and the last.
        if result.needs_check and (total.is_careful or not total.weight):
            result.step, result.needs_check = with_norm(result.step, context), False
        total.add(positions, result)
        return total
    except NonFiniteLoss:
        is_invalid = False
    except ForwardFailed:
        is_invalid = not plan.is_masked  # nothing was added
    except InvalidGradients as error:
        is_invalid = True
        _raise_if_masked(plan, context, error)
    if plan.is_masked:
        total.leave_out(positions, MICRO_BATCH_FAULT)
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


def _checked(plan: Plan, total: WindowSum, context: TrainingContext) -> tuple[WindowSum, bool]:
    """Check that the vector is finite; if it is not, return a restarted total and False.

    From then on it is checked after each micro-batch, so that a failure is that micro-batch's.

    Raises:
        NonFiniteUpdate: in a masked round it is not finite.
    """
    if not total.needs_check:
        return total, True
    total.is_careful = True
    try:
        total.steps[-1] = with_norm(total.steps[-1], context)
    except InvalidGradients as error:
        _raise_if_masked(plan, context, error)
        context.accumulator.zero()
        return total.restarted([*total.done, *total.remaining]), False
    total.needs_check = False
    return total, True


def _raise_if_masked(plan: Plan, context: TrainingContext, error: InvalidGradients) -> None:
    if plan.is_masked:
        raise NonFiniteUpdate(
            f"{context.name}, round {plan.round}: a backward pass failed, and a masked round takes "
            f"no time to sum again: {error.fault.kind}"
        ) from error


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
