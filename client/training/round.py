"""A client's round: sum the gradients of its window's examples exactly, and report.

``carry_out`` is all of a plain round. What a plan asks for beyond it is done by features at a few
moments (``Feature``), in the order of ``headwater.client.features``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.client.memory.activation_checkpointing import is_on_in
from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import AddMicroBatch, add_micro_batch
from headwater.client.training.sampler import Window
from headwater.client.training.stop_rules import StopRules
from headwater.client.training.window import sum_window
from headwater.client.training.window_sum import WindowSum, flat
from headwater.common.errors import EmptyUpdate, NonFiniteUpdate, NothingWeighed
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.model.layout import changed
from headwater.common.model.parameters import ModelImage
from headwater.common.model.vectors import CHUNK, all_finite, saturate
from headwater.common.task import tell_round

if TYPE_CHECKING:
    from headwater.client.training.spool import Spool


class Feature:
    """What a plan asks for beyond a plain round; a feature overrides the moments that it needs."""

    moves_model = False
    """Whether the shared parameters change within the round, and are set back at its end."""

    def prepare(self, work: Work) -> None:
        """Set plain values of the work, before its window."""

    def train(self, work: Work) -> bool:
        """Make the vector in place of ``sum_examples``; return whether it did."""
        return False

    def summed(self, work: Work, weight: int) -> None:
        """Use gradients that are complete: those of the window, or of a part that is stepped on.

        ``weight`` is what their losses were summed over.
        """

    def failed(self, work: Work, error: NonFiniteUpdate) -> bool:
        """Make a value of an error; return whether the round goes on with it."""
        return False

    def stepping(self, work: Work, optimizer: torch.optim.Optimizer) -> None:
        """Change a new local optimizer, before its first step."""

    def direction(self, work: Work, mean_P: Tensor) -> None:
        """Change the mean gradient [P] of a local step in place, before the step is taken."""

    def sums(self, work: Work) -> Mapping[str, Tensor]:
        """Return the sums beside the model's that the plan asks of the feature, by name."""
        return {}

    def finish(self, work: Work) -> Update | None:
        """Return the update in place of ``plain_update``; None: that one."""
        return None


@dataclass(kw_only=True, slots=True)
class Work:
    """A plan that is being carried out, and what came of it so far."""

    plan: Plan
    window: Window
    context: TrainingContext
    spool: Spool | None = None
    features: Sequence[Feature] = ()
    add: AddMicroBatch = add_micro_batch
    """Adds one micro-batch to the vector."""
    total: WindowSum = field(init=False)
    """Counts, losses and metrics of what was summed; the sum is in the accumulator's vector."""
    start_seconds: float = field(init=False)
    """When the round began, by the clock; with a spool, before the power was cut."""
    least_tested: int = 0
    """A test on fewer examples than these is on none: those of a masked device show in its sum."""
    num_steps: int = 1
    """The steps that the model has taken within the round; 1 for an exact sum."""
    unused: tuple[int, ...] | None = None
    """The places of the shared parameters that none of the losses used; None before a sum."""
    before_L: Tensor = field(init=False, repr=False)
    """The parameters that stay on the device, as they were before the round."""
    after_L: Tensor = field(init=False, repr=False)
    """The same after the round; the model has those before."""

    def __post_init__(self) -> None:
        self.total = WindowSum(micro_batch_size=self.plan.micro_batch_size)
        self.start_seconds = self.context.clock.seconds()
        self.before_L = self.after_L = self.context.image.local_L.clone()

    @property
    def values_P(self) -> Tensor:  # noqa: N802 - a tensor's dimensions are in capitals
        """The accumulator's vector."""
        return self.context.accumulator.values_P

    @property
    def used(self) -> Sequence[int]:
        """The examples that are used up: those in the sum, and those left out."""
        return [*flat(self.total.done), *self.total.refused]

    def note_summed(self, weight: int) -> None:
        """Note that gradients are complete, of losses that were summed over this weight."""
        now = self.context.accumulator.unused()
        before = now if self.unused is None else self.unused
        self.unused = now if now == before else tuple(sorted({*now} & {*before}))
        for feature in self.features:
            feature.summed(self, weight)


def carry_out(work: Work) -> Update:
    """Carry out a plan; return the update, a view of the accumulator's vector.

    Raises:
        HeadwaterError: see ``sum_round`` and ``update_of``.
    """
    sum_round(work)
    return update_of(work)


def sum_round(work: Work) -> None:
    """Sum the window's gradients into the accumulator, or what a feature makes of them.

    The model's parameters are afterwards as they were.

    The vector has the k < K micro-batches done so far at the plan's deadline, on a request to stop,
    or if the device's owner wants it to do less. What the spool holds of the same window is not
    summed again; the time since the window began counts.

    Raises:
        OutOfMemory: one example alone does not fit.
        BuffersChanged, TaskError, TaskFailed, AlgorithmBroken, NonFiniteUpdate: see
            ``headwater.common.errors``.
    """
    image, features = work.context.image, work.features
    tell_round(work.context.task, work.plan.round)
    for feature in features:
        feature.prepare(work)
    if not all([module.training for module in image.modules]):  # noqa: C419 - half of the time
        image.model.train()
    with _unchanged(image, is_moved=any(feature.moves_model for feature in features)):
        try:
            if not work.plan.asks_model:
                pass_examples(work)
            elif not any(feature.train(work) for feature in features):
                sum_examples(work)
        except NonFiniteUpdate as error:
            if not any(feature.failed(work, error) for feature in features):
                raise
        finally:
            work.after_L = image.local_L.clone()
            image.local_L.copy_(work.before_L)


def pass_examples(work: Work) -> None:
    """Count the examples of the window without a gradient; each weighs one."""
    used = work.window.positions[: work.plan.quota]
    work.total.num_examples = work.total.weight = len(used)
    work.total.done.append(tuple(used))


def sum_examples(work: Work) -> None:
    """Sum the gradients of all examples of the window; continue the sum that the spool holds.

    Raises:
        HeadwaterError: see ``headwater.client.training.window.sum_window``.
    """
    plan, window, context = work.plan, work.window, work.context
    resumed = after_each = None
    if work.spool is not None:
        spooled = work.spool.open(plan, window, context, work.start_seconds)
        resumed, after_each = spooled.load(), spooled.save
        work.start_seconds = spooled.start_seconds
    rules = StopRules(plan, context, work.start_seconds)
    work.total = sum_window(
        plan, window, context, rules, resumed=resumed, after_each=after_each, add=work.add
    )
    work.note_summed(work.total.weight)


@contextmanager
def _unchanged(image: ModelImage, *, is_moved: bool) -> Iterator[None]:
    """Check that training leaves alone what it must: buffers, and parameters but those it steps.

    Raises:
        BuffersChanged: it does not.
    """
    same = [*image.constants(), *(() if is_moved else image.trained)]
    constants = [(name, tensor, tensor._version) for name, tensor in same]
    places = image.places()
    yield
    now = dict(image.constants() + image.trained) if constants else {}
    for name, tensor, version in constants:
        if tensor._version != version or now.get(name) is not tensor:
            raise changed(tensor, name)
    image.check_places(places)  # local steps are taken back
    image.check_still_frozen()


def update_of(work: Work) -> Update:
    """Return the sum as an update, with its report.

    Raises:
        HeadwaterError: see ``plain_update``.
    """
    sums: dict[str, Tensor] = {}
    if work.total.num_examples:  # else there is nothing to send
        for feature in work.features:
            sums |= feature.sums(work)
    found = (feature.finish(work) for feature in work.features)
    update = next((update for update in found if update is not None), None) or plain_update(work)
    return replace(update, sums=_weighed(sums, work, update)) if sums else update


def _weighed(sums: Mapping[str, Tensor], work: Work, update: Update) -> Mapping[str, Tensor]:
    """Scale the sums of which a mean is taken to the update's weight, as its vector was."""
    weight, summed = update.report.weight, work.total.weight
    if weight == summed or not summed:
        return sums
    asked = work.plan.extra_sums(work.context.image.layout.num_parameters).of
    return {
        key: values * (weight / summed) if key in asked and asked[key].is_mean else values
        for key, values in sums.items()
    }


def plain_update(work: Work) -> Update:
    """Scale the sum to the plan's weight and attach its report.

    Raises:
        EmptyUpdate: no example could be summed.
        NothingWeighed: all have a weight of 0, in a plan that scales by it or steps along a mean.
        NonFiniteUpdate: the sum overflows float32 at the plan's weight.
    """
    plan, context, total = work.plan, work.context, work.total
    if not total.num_examples:
        raise EmptyUpdate(
            f"{context.name}, round {plan.round}: none of {len(work.window.positions)} examples "
            "could be summed: the task raises, a loss or gradient is not finite, or they are too "
            "long for the device's memory"
        )
    # A loss of weight 0, such as a detector's without an object, is a sum like any other.
    weight = total.weight if plan.weigh_as is None else plan.weigh_as
    is_moved = any(feature.moves_model for feature in work.features)
    if not total.weight and (weight or is_moved):
        raise NothingWeighed(
            f"{context.name}, round {plan.round}: each of {total.num_examples} examples has a "
            "weight of 0: there is no mean of their losses to scale, or to step along"
        )
    is_finite = scale(work.values_P, by=weight, over=total.weight)
    if plan.hides_data:
        saturate(work.values_P)
    elif not is_finite:
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
        seconds=context.clock.seconds() - work.start_seconds,
        steps=tuple(total.steps),
        reason=total.reason,
        local_steps=work.num_steps,
        unused=work.unused or (),
        vitals=context.vitals(),
        is_checkpointed=is_on_in(context.image.modules),
    )
    return Update(values_P=work.values_P if plan.asks_model else work.values_P[:0], report=report)


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
