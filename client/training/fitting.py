"""Makes a window's micro-batches fit into memory: cut smaller, with activation checkpointing.

If the memory model predicts that a micro-batch does not fit, the remaining examples continue in
smaller ones; nothing has to be summed again. If not even one example fits, activation checkpointing
is switched on; if one still does not fit, the window ends, and the sum so far is sent with its
exact weight. After an allocation failure the window is summed again in micro-batches of half the
size, and at one example with activation checkpointing.
"""

from __future__ import annotations

import gc
import logging
from collections import deque

from headwater.client.memory.activation_checkpointing import is_all_recomputed, switch_on
from headwater.client.training.context import TrainingContext
from headwater.client.training.window_sum import WindowSum
from headwater.common.data.example_faults import ExampleFault, own_position
from headwater.common.data.example_lengths import Positions
from headwater.common.errors import OutOfMemory
from headwater.common.messages import Plan
from headwater.common.system.heap import keep_mmap_threshold, release_freed_memory

log = logging.getLogger(__name__)

TOO_LONG = "it is too long for the memory of the device"


def ends_for_memory(
    plan: Plan, total: WindowSum, context: TrainingContext, *, has_some: bool
) -> bool:
    """Cut the next micro-batch until it fits; return whether the window ends, as nothing does.

    An example that is longer than usual and does not fit alone is left out, and the next may begin.

    Raises:
        OutOfMemory: not even one example of the usual length fits, and there is nothing to send.
    """
    while total.remaining and not _make_fit(total, context):
        if _leave_out_long(total, context):
            continue
        text = f"{context.name}, round {plan.round}: {context.why_one_does_not_fit()}"
        if not has_some:
            raise OutOfMemory(text)
        log.warning("%s; the sum so far is sent", text)
        return True
    return False


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


def after_failed_allocation(
    plan: Plan, positions: Positions, total: WindowSum, context: TrainingContext
) -> WindowSum:
    """Restart the window with micro-batches of half the size; at size 1 with checkpointing.

    An example that is longer than usual, and fails alone even so, is left out.

    Raises:
        OutOfMemory: size 1 with checkpointing failed, or there is nothing to checkpoint.
    """
    gc.collect()  # frames of the task, or of a layer, may hold the failed pass in a cycle
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


def log_reductions(plan: Plan, total: WindowSum, context: TrainingContext) -> None:
    """Log if memory made the window's micro-batches smaller."""
    where = f"{context.name}, round {plan.round}"
    if total.num_reductions:
        log.warning(
            "%s: micro-batches of %d instead of %d; memory made them smaller %d time(s)",
            where,
            total.micro_batch_size,
            plan.micro_batch_size,
            total.num_reductions,
        )
