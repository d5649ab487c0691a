"""Trial passes over a client's first examples, before the first plan.

They check that the task runs at all, and measure the memory that activation checkpointing takes.
"""

from __future__ import annotations

import functools
import logging

from headwater.client.memory.activation_checkpointing import footprint_bytes, switch_on
from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import InvalidGradients, backward, forward
from headwater.client.training.sampler import SamplerPosition, Window, window
from headwater.common.errors import OutOfMemory, TaskFailed
from headwater.common.messages import Plan

log = logging.getLogger(__name__)

NUM_EXAMPLES = 8  # if so many all raise, the task is at fault and not the examples
PLAN = Plan(round=0, run_seed=0, model_version=0, quota=1, micro_batch_size=1)


def check_runs(context: TrainingContext) -> None:
    """Run the first examples forward and backward, one by one, until one succeeds.

    If one alone does not fit in memory, activation checkpointing is switched on and they run again.

    Raises:
        TaskFailed: every example raised; the exception of the last one is its cause.
        OutOfMemory: one example alone does not fit.
    """
    is_on, does_not_fit = False, f"{context.name}: one example alone does not fit in memory"
    while True:
        try:
            _run_one_by_one(context)
            break
        except MemoryError:
            if is_on:
                raise OutOfMemory(f"{does_not_fit}, even with activation checkpointing") from None
            if not switch_on(context.image.model):
                why = "and the model has no blocks to checkpoint"
                raise OutOfMemory(f"{does_not_fit}, {why}") from None
        is_on = True
        context.memory.use_checkpointing(None)
    if is_on:
        log.warning("%s: one example fits only with activation checkpointing", context.name)


def _run_one_by_one(context: TrainingContext) -> None:
    tried, failure = _first_examples(context), None
    try:
        for position in tried.positions:
            context.accumulator.zero()
            try:
                backward(forward(PLAN, tried, (position,), context)[0])
                return
            except InvalidGradients as error:
                failure = error
    finally:
        context.accumulator.zero()
    raise TaskFailed(f"all of {len(tried.positions)} examples failed: {failure}") from failure


def checkpointed_bytes(context: TrainingContext) -> float | None:
    """Predict the bytes that one example takes with activation checkpointing.

    From one forward pass of the first example that succeeds, which takes less memory than a pass
    without checkpointing. None if the model has no blocks to checkpoint, or no example succeeds.
    """
    tried = _first_examples(context)
    for position in tried.positions:
        one_pass = functools.partial(forward, PLAN, tried, (position,), context)
        try:
            return footprint_bytes(context.image.model, one_pass)
        except InvalidGradients as error:
            log.debug("%s: an example failed: %s", context.name, error)
        except MemoryError:
            break
    return None


def _first_examples(context: TrainingContext) -> Window:
    return window(
        SamplerPosition(),
        quota=min(NUM_EXAMPLES, len(context.examples)),
        run_seed=0,
        name=context.name,
        num_examples=len(context.examples),
    )
