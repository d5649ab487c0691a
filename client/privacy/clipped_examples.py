"""A micro-batch of which each example's gradient is clipped before it is added to the vector.

It is for private rounds whose unit is an example (docs/privacy.md): replacing one example by
nothing, or by any other, must move the vector by a bounded amount. Each example therefore passes
alone through the model; its gradient is clipped as a vector of its own, and added. This is right
for every task that has a gradient, whatever its layers are and however its loss weighs examples,
and also in floating point: norms from one pass and gradients from another (as in "ghost" clipping)
may differ by any factor where large terms cancel. It costs the time of micro-batches of one
(``benchmarks.clipped_examples``) and a second vector.
"""

from __future__ import annotations

import math

from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import (
    GRADIENT_FAULT,
    InvalidGradients,
    MicroBatchResult,
    backward,
    forward,
)
from headwater.client.training.sampler import Window
from headwater.common.data.example_faults import ExampleFault, exception_fault, loss_fault
from headwater.common.data.example_lengths import Positions
from headwater.common.errors import HeadwaterError
from headwater.common.messages import Plan, Step
from headwater.common.model.vectors import all_finite
from headwater.common.privacy.clipping import clip_to_norm
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.task import Metrics


def add_clipped_examples(
    plan: Plan,
    window: Window,
    positions: Positions,
    context: TrainingContext,
    since_seconds: float,
) -> MicroBatchResult:
    """Add each example's gradient, clipped to the plan's ``example_bound``, to the vector.

    ===================================  ===================
    an example's gradient                adds
    ===================================  ===================
    norm <= bound                        itself
    norm > bound                         itself, scaled down
    a NaN or an infinity, or such loss   nothing
    the task raises or breaks a rule     nothing
    ===================================  ===================

    What one example adds depends on no other: nothing is searched or summed again. Loss, weight
    and metrics are those of the examples that add something, for the device's own log.

    Raises:
        MemoryError: an allocation failed; the vector is invalid.
        TaskError: the task replaced the model's gradients.
    """
    terms = plan.of(PrivacyTerms)
    assert terms is not None
    assert terms.example_bound is not None
    accumulator, bound = context.accumulator, terms.example_bound
    num_shared = len(accumulator.values_P)
    losses, total_weight, sums = [], 0, Metrics()
    faults: dict[int, ExampleFault] = {}
    load = max(context.load((position,)) for position in positions)
    context.memory.begin(load)
    with accumulator.apart() as memory:
        example_P = memory[:num_shared]
        for position in positions:
            memory.zero_()
            try:
                loss, weight, metrics = forward(plan, window, (position,), context)
                backward(loss)
                value = loss.item()
                if not math.isfinite(value) or not all_finite(example_P):
                    faults[position] = _fault(value, position, context)
                    continue
            except InvalidGradients as error:
                faults[position] = error.fault
                continue
            except HeadwaterError as error:  # a weight of NaN, say: the answer would tell of it
                faults[position] = exception_fault(error)
                continue
            clip_to_norm(example_P, bound)
            accumulator.values_P.add_(example_P)
            losses.append(value)
            total_weight += weight
            for name, metric in metrics.items():
                sums[name] = sums.get(name, 0.0) + metric
    context.clock.worked(context.size(positions))
    loss_sum = sum(losses)  # ``fsum`` raises where it overflows
    return MicroBatchResult(
        loss_sum=loss_sum,
        metric_sums=sums,
        step=Step(
            num_examples=len(positions),
            weight=total_weight,
            loss=loss_sum / total_weight if total_weight else 0.0,
            peak_bytes=context.memory.end(load),
            seconds=context.clock.seconds() - since_seconds,
            size=None if context.lengths is None else context.size(positions),
        ),
        faults=faults,
    )


def _fault(loss: float, position: int, context: TrainingContext) -> ExampleFault:
    """Return why an example's loss or gradient is not finite."""
    if math.isfinite(loss):
        return GRADIENT_FAULT
    try:
        return loss_fault(context.batches.of((position,)))
    except Exception:  # a data set that raises now and then: whatever comes of it leaves no message
        return loss_fault(None)
