"""A client's work in one round: sum the gradients of K micro-batches exactly, and report.

Local steps and client algorithms are in ``headwater.client.local_training.local_work``. Parameters
that stay on the device and the shared ones are differentiated at the same point, so the shared
vector is exact under the device's own parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.client.local_training.local_steps import LocalSteps
from headwater.client.local_training.local_work import (
    ClientAlgorithm,
    LocalWork,
    carry_out,
)
from headwater.client.memory.activation_checkpointing import is_on_in
from headwater.client.privacy.private_update import private_update
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import Window
from headwater.client.training.spool import Spool
from headwater.client.training.window_sum import WindowSum, flat
from headwater.common.errors import EmptyUpdate, NonFiniteUpdate, NothingWeighed
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.model.layout import changed
from headwater.common.model.vectors import CHUNK, all_finite
from headwater.common.optimizers.local_optimizer import path_length
from headwater.common.optimizers.local_terms import LocalTerms
from headwater.common.task import max_weight_per_example, tell_round
from headwater.common.user_code import running

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSum:
    """A window's gradient sum before it becomes an update."""

    values_P: Tensor
    total: WindowSum
    start_seconds: float
    num_taken: int
    """The local steps taken; 1 for an exact sum."""
    unused: tuple[int, ...]
    """The places, among the shared parameters, of those that no loss used."""
    local_L: Tensor
    """The parameters that stay on the device after the window; the model still has those before."""

    @property
    def used(self) -> Sequence[int]:
        """The examples that are used up: those in the sum, and those left out."""
        return [*flat(self.total.done), *self.total.refused]


def train_round(
    plan: Plan, window: Window, context: TrainingContext, spool: Spool | None = None
) -> Update:
    """Sum the window's gradients and return the update, a view of the accumulator's vector.

    Raises:
        HeadwaterError: see ``sum_gradients`` and ``make_update``.
    """
    return make_update(plan, window, context, sum_gradients(plan, window, context, spool))


def sum_gradients(
    plan: Plan,
    window: Window,
    context: TrainingContext,
    spool: Spool | None = None,
    algorithm: ClientAlgorithm | None = None,
) -> LocalSum:
    """Sum the window's gradients into the accumulator, or what a client algorithm makes of them.

    The model's parameters are afterwards as they were.

    Returns the k < K micro-batches done so far at the plan's deadline, on a request to stop, or if
    the device's owner wants it to do less. What the spool holds of the same window is not summed
    again; the time since the window began counts.

    Raises:
        OutOfMemory: one example alone does not fit.
        BuffersChanged, TaskError, TaskFailed, AlgorithmBroken, NonFiniteUpdate: see
            ``headwater.common.errors``.
    """
    image = context.image
    tell_round(context.task, plan.round)
    if not all([module.training for module in image.modules]):  # noqa: C419 - half of the time
        image.model.train()
    is_exact = algorithm is None and not plan.takes_local_steps
    same = [*image.constants(), *(image.trained if is_exact else ())]
    constants = [(name, tensor, tensor._version) for name, tensor in same]
    places = image.places()
    work, before_L = LocalWork(plan, window, context, spool), image.local_L.clone()
    try:
        if algorithm is not None:
            name = f"the client algorithm {type(algorithm).__name__}"
            with running(name):
                carry_out(algorithm, work, name=name)
            if plan.local is not None and plan.local.is_normalized and work.num_taken:
                length = path_length(plan.local, work.num_taken, rate=work.learning_rate)
                context.accumulator.values_P.div_(length)
        elif plan.takes_local_steps:
            carry_out(LocalSteps(plan.local or LocalTerms(), context), work, name="local training")
        else:
            work.sum()
    except NonFiniteUpdate as error:
        if plan.privacy is None:
            raise
        log.warning("%s: %s; a private round sends zeros instead", error.code, error)
        context.accumulator.zero()
        image.local_L.copy_(before_L)
    finally:
        after_L = image.local_L.clone()
        image.local_L.copy_(before_L)
    now = dict(image.constants() + image.trained) if constants else {}
    for name, tensor, version in constants:
        if tensor._version != version or now.get(name) is not tensor:
            raise changed(tensor, name)
    image.check_places(places)  # local steps are taken back
    image.check_still_frozen()
    return LocalSum(
        values_P=context.accumulator.values_P,
        total=work.total,
        start_seconds=work.start_seconds,
        num_taken=max(work.num_taken, 1),
        unused=work.unused or (),
        local_L=after_L,
    )


def make_update(
    plan: Plan, window: Window, context: TrainingContext, local_sum: LocalSum
) -> Update:
    """Scale the sum to the plan's weight and attach its report.

    A private round's update is clipped instead, and reports only what the plan says; it is never
    refused for its data.

    Raises:
        EmptyUpdate: no example could be summed.
        NothingWeighed: all have a weight of 0, in a plan that scales by it or steps along a mean.
        NonFiniteUpdate: the sum overflows float32 at the plan's weight.
    """
    total, values_P = local_sum.total, local_sum.values_P
    if plan.privacy is not None:
        return private_update(
            plan,
            plan.privacy,
            values_P,
            name=context.name,
            weight=max_weight_per_example(context.task) * plan.quota,
            seconds=context.clock.seconds() - local_sum.start_seconds,
            vitals=context.vitals(),
        )
    if not total.num_examples:
        raise EmptyUpdate(
            f"{context.name}, round {plan.round}: none of {len(window.positions)} examples could "
            "be summed: the task raises, a loss or gradient is not finite, or they are too long "
            "for the device's memory"
        )
    # A loss of weight 0, such as a detector's without an object, is a sum like any other.
    weight = total.weight if plan.weigh_as is None else plan.weigh_as
    if not total.weight and (weight or plan.takes_local_steps or plan.algorithm is not None):
        raise NothingWeighed(
            f"{context.name}, round {plan.round}: each of {total.num_examples} examples has a "
            "weight of 0: there is no mean of their losses to scale, or to step along"
        )
    if not scale(values_P, by=weight, over=total.weight):
        raise NonFiniteUpdate(
            f"{context.name}, round {plan.round}: the sum over weight {total.weight} overflows "
            f"float32 when scaled to weight {weight}"
        )
    ratio = weight / total.weight if total.weight else 1.0
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
        local_steps=local_sum.num_taken,
        unused=local_sum.unused,
        vitals=context.vitals(),
        is_checkpointed=is_on_in(context.image.modules),
    )
    return Update(values_P=values_P, report=report)


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
