"""What a window does when a micro-batch fails: it leaves examples out, or begins again.

A non-finite loss is found before its backward pass: nothing was added, and the window goes on
without the bad examples. A gradient that is not finite, or a backward pass that raised, makes the
vector invalid: the bad examples are found by bisection, in passes whose gradients are discarded,
and the window is summed again without them. To read the vector takes about a hundredth of a
micro-batch of a transformer, so it is checked when the window ends; if it is not finite, the window
is summed again with a check after each micro-batch, which finds the example.

A window that is to be masked is taken apart instead, for whatever fails: example by example, each
in a vector of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from headwater.client.training.context import TrainingContext
from headwater.client.training.fitting import after_failed_allocation
from headwater.client.training.gradient_pass import (
    GRADIENT_FAULT,
    AddMicroBatch,
    InvalidGradients,
    MicroBatchResult,
    NonFiniteLoss,
    backward,
    forward,
    with_norm,
)
from headwater.client.training.sampler import Window
from headwater.client.training.window_sum import WindowSum
from headwater.common.data.example_faults import ExampleFault, loss_fault
from headwater.common.data.example_lengths import Positions
from headwater.common.errors import NonFiniteUpdate
from headwater.common.messages import Plan
from headwater.common.model.vectors import all_finite, saturate
from headwater.common.task import loss_sum_alone

FAULTS = (NonFiniteLoss, InvalidGradients, MemoryError)

# A data set that answers differently each time may give a NaN now and then.
MAX_RETRIES = 3

CHANGING_FAULT = ExampleFault("its micro-batch gives NaN now and then: the data set is random")
MICRO_BATCH_FAULT = ExampleFault("its micro-batch raises, or has a loss that is not finite")
TOGETHER_FAULT = ExampleFault("the sum overflows in its micro-batch, though not alone")


class MicroBatchFault(NamedTuple):
    """Why a micro-batch failed: one of ``FAULTS``, without the pass that it ended."""

    kind: type[BaseException]
    why: ExampleFault

    @staticmethod
    def of(error: BaseException) -> MicroBatchFault:
        return MicroBatchFault(type(error), getattr(error, "fault", GRADIENT_FAULT))


def recover(
    plan: Plan,
    window: Window,
    positions: Positions,
    total: WindowSum,
    context: TrainingContext,
    fault: MicroBatchFault,
) -> WindowSum:
    """Leave out a micro-batch's bad examples, or cut it; return the total, or a restarted one.

    Raises:
        OutOfMemory: one example alone does not fit.
        NonFiniteUpdate: in a plan that hides its data a backward pass failed, and the sum is lost.
    """
    if fault.kind is not MemoryError:
        try:
            return _leave_out_bad(plan, window, positions, total, context, fault)
        except MemoryError:
            pass  # in the search; its passes are freed with the exception, before what follows
    return after_failed_allocation(plan, positions, total, context)


def _leave_out_bad(
    plan: Plan,
    window: Window,
    positions: Positions,
    total: WindowSum,
    context: TrainingContext,
    fault: MicroBatchFault,
) -> WindowSum:
    """Find the examples that made a micro-batch fail, and go on without them.

    In a plan that hides its data, see ``_taken_apart``.
    """
    is_invalid = fault.kind is not NonFiniteLoss  # a forward pass that raised may hide a gradient's
    if plan.hides_data:
        return _taken_apart(plan, positions, total, context, fault)
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


def _taken_apart(
    plan: Plan,
    positions: Positions,
    total: WindowSum,
    context: TrainingContext,
    fault: MicroBatchFault,
) -> WindowSum:
    """Cut a micro-batch that failed into single examples, in a plan that hides its data.

    What an example adds must not hang on the others beside it: a server that lies chooses models at
    which large micro-batches fail, or large windows overflow, and would open the update of the one
    member that it gave small ones. From now on each micro-batch is collected apart (``add_apart``),
    and the window takes the time that it takes. No example is searched for, and without an
    answer time, when passes would show in the time, the micro-batch is left out whole.
    """
    if plan.answer_by is None:
        if fault.kind is InvalidGradients:
            raise _lost(plan, context, fault.why)
        total.leave_out(positions, MICRO_BATCH_FAULT)
        return total
    is_spoiled = fault.kind is InvalidGradients and not total.are_apart
    total.are_apart = True
    if len(positions) == 1 and not is_spoiled:
        total.leave_out(positions, fault.why)
        return total
    total.remaining.extendleft((p,) for p in reversed(positions))
    if is_spoiled:
        context.accumulator.zero()
        return total.restarted([*total.done, *total.remaining])
    return total


def add_apart(
    plan: Plan,
    window: Window,
    positions: Positions,
    context: TrainingContext,
    since_seconds: float,
    *,
    add: AddMicroBatch,
) -> MicroBatchResult:
    """Add a micro-batch by way of a vector of its own, so that it can spoil no other's gradients.

    Of a single example a NaN counts as 0, and an infinity as the largest number: its other
    coordinates count. Beyond float32 the sum stays at the largest number.

    Raises:
        NonFiniteLoss, MemoryError, TaskError: see ``add``.
        InvalidGradients: the gradient of several examples is not finite; nothing was added.
    """
    accumulator = context.accumulator
    with accumulator.apart() as own:
        result = add(plan, window, positions, context, since_seconds)
        if not all_finite(own):
            if len(positions) > 1:
                raise InvalidGradients
            saturate(own)
        unused = accumulator.unused()
    accumulator.add_apart(own, unused)
    return result


def check_vector(plan: Plan, total: WindowSum, context: TrainingContext) -> WindowSum:
    """Check that the vector is finite; return the total, or a restarted one if it is not.

    From then on it is checked after each micro-batch, so that a failure is that micro-batch's.

    Raises:
        NonFiniteUpdate: it is not finite, in a plan that hides its data and has no answer time.
    """
    total.is_careful = True
    try:
        total.steps[-1] = with_norm(total.steps[-1], context)
    except InvalidGradients as error:
        if plan.hides_data and plan.answer_by is None:
            raise _lost(plan, context, error.fault) from error
        total.are_apart = plan.hides_data
        context.accumulator.zero()
        return total.restarted([*total.done, *total.remaining])
    total.needs_check = False
    return total


def _lost(plan: Plan, context: TrainingContext, fault: ExampleFault) -> NonFiniteUpdate:
    return NonFiniteUpdate(
        f"{context.name}, round {plan.round}: a backward pass failed, and a masked round takes "
        f"no time to sum again: {fault.kind}"
    )


def bad_examples(
    plan: Plan,
    window: Window,
    positions: Positions,
    context: TrainingContext,
    *,
    with_backward: bool,
) -> dict[int, ExampleFault]:
    """Return the examples with a non-finite loss or, ``with_backward``, a non-finite gradient.

    With ``with_backward`` each pass starts from a vector of zeros, and the vector is invalid after
    the search; if no example fails alone, the sum overflowed, and all examples are returned.
    Without it, none is returned if the loss of all is finite now: the data set answers differently
    each time.

    Raises:
        MemoryError: an allocation failed during the search.
    """

    def fault_in(some: Positions) -> ExampleFault | None:
        try:
            if not with_backward:
                loss = forward(plan, window, some, context, loss_sum_alone)[0]
                is_finite = math.isfinite(loss.item())
                return None if is_finite else _loss_fault(some, context)
            context.accumulator.zero()
            loss = forward(plan, window, some, context)[0]
            backward(loss)
        except InvalidGradients as error:
            return error.fault
        if math.isfinite(context.accumulator.gradient_norm()):
            return None
        return GRADIENT_FAULT if math.isfinite(loss.item()) else _loss_fault(some, context)

    if not with_backward and fault_in(positions) is None:
        return {}
    return _bisected(positions, fault_in)


def _loss_fault(positions: Positions, context: TrainingContext) -> ExampleFault:
    """Return why the loss is not finite; a batch of several examples is not examined."""
    return loss_fault(context.batches.of(positions) if len(positions) == 1 else None)


def _bisected(
    positions: Positions, fault_in: Callable[[Positions], ExampleFault | None]
) -> dict[int, ExampleFault]:
    """Find by bisection the examples without which the rest is clean.

    If both halves are clean and the whole is not, all examples are returned.
    """
    fault = fault_in(positions)
    if fault is None:
        return {}
    if len(positions) == 1:
        return {positions[0]: fault}
    middle = len(positions) // 2
    bad = _bisected(positions[:middle], fault_in) | _bisected(positions[middle:], fault_in)
    return bad or dict.fromkeys(positions, TOGETHER_FAULT)
