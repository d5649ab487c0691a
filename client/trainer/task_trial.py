"""The check of a task before the first plan: on this client's own examples, within its memory.

The gradients are added in the accumulator, so the check takes the memory of a training pass of as
many examples as it compares, and no second vector. A large or slow model is compared on two
examples instead of four, and without gradients if two are predicted not to fit. Of a model that
takes seconds for an example no more examples are looked at than these two. If one of them has
passed backward already, when its memory was measured, the other passes forward alone.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from headwater.client.memory.activation_checkpointing import switch_on
from headwater.client.memory.footprint import Footprint, footprint
from headwater.client.memory.peak_model import PeakMeter, guarded_bytes, resident_bytes
from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import InvalidGradients, backward, forward
from headwater.client.training.sampler import SamplerPosition, Window, window
from headwater.common.additivity.comparison import Comparison
from headwater.common.additivity.example_cache import ExampleCache
from headwater.common.additivity.single_examples import NUM_TRIED, SingleExamples
from headwater.common.additivity.sums import Sums
from headwater.common.additivity.survey import Survey, look_over
from headwater.common.additivity.trial_state import as_it_was
from headwater.common.data.example_faults import ExampleFault, summary
from headwater.common.data.example_lengths import Positions
from headwater.common.errors import (
    BuffersChanged,
    HeadwaterError,
    HiddenState,
    NoFiniteExample,
    OutOfMemory,
    TaskFailed,
    TaskNotAdditive,
)
from headwater.common.messages import Plan
from headwater.common.system.heap import release_freed_memory
from headwater.common.wording import bytes_text, counted

log = logging.getLogger(__name__)

NUM_EXAMPLES = 8  # tried for the footprint
PLAN = Plan(round=0, run_seed=0, model_version=0, quota=1, micro_batch_size=1)

# More than two examples are compared only if their passes take no longer than this together, and
# gradients only if one example takes no longer.
MAX_SECONDS = 2.0
# A batch of the survey takes about this much, and at most so many examples.
SURVEY_BYTES, MAX_SURVEY_BATCH = 64 << 20, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What a passed check found: how many examples are left out and why, and what is notable."""

    num_examples: int
    num_seen: int
    left_out: str | None
    """How many of the examples cannot be trained on, and why; None if all can."""
    notes: tuple[str, ...]
    survey_batch_size: int = 1
    """The examples that a forward pass may take at a time."""
    is_undecided: bool = False
    """Whether the loss of all examples that were compared is 0, so that nothing could be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedExample:
    """An example that passed forward and backward, with a finite gradient."""

    position: int
    sums: Sums
    seconds: float


def check_task(context: TrainingContext, *, passed: PassedExample | None = None) -> CheckReport:
    """Check that the task runs on real examples, and that what it returns is a sum.

    If ``passed`` took long, it does not pass again, unless the task or its data draw random
    numbers. If one example alone does not fit in memory, activation checkpointing is switched on.
    The accumulator's vector is zero afterwards.

    Raises:
        TaskFailed: every example that was tried raised, or examples raise together.
        NoFiniteExample: no example has a finite loss and gradient.
        TaskNotAdditive, BuffersChanged: see ``headwater.common.additivity.comparison``.
        OutOfMemory: one example alone does not fit.
    """
    room, name, is_switched_on = _Room(context, passed), context.name, False
    does_not_fit = f"{name}: one example alone does not fit in memory{room.text}"
    while True:
        try:
            report = _checked(context, room, passed)
            break
        except MemoryError:
            if is_switched_on:
                raise OutOfMemory(f"{does_not_fit}, even with activation checkpointing") from None
            if not _switch_on(context):
                why = "and the model has no blocks to checkpoint"
                raise OutOfMemory(f"{does_not_fit}, {why}") from None
            is_switched_on = True
    if is_switched_on:
        log.warning("%s: one example fits only with activation checkpointing", name)
    return report


def _switch_on(context: TrainingContext) -> bool:
    is_on = switch_on(context.image.model)
    if is_on:
        context.memory.use_checkpointing(None)
    return is_on


def _checked(context: TrainingContext, room: _Room, passed: PassedExample | None) -> CheckReport:
    task, model, examples = context.task, context.image.model, context.examples
    with as_it_was(model):
        cache = ExampleCache(task, examples)
        singles = SingleExamples(task, model, cache, has_gradients=not room.is_slow)
        comparison = Comparison(singles)
        lengths = context.lengths
        tried = [*(range(len(examples)) if lengths is None else lengths.sample)[:NUM_TRIED]]
        if passed is not None and room.is_slow and cache.is_fixed(passed.position):
            singles.sums[passed.position] = passed.sums
            tried.insert(0, passed.position)
        singles.add(tried, room.may_add)
        if singles.sums:
            comparison.run(room.may_train_on)
        zero: set[str] = set()

        def compare_pieces(cache: ExampleCache, positions: Sequence[int]) -> None:
            if singles.sums:
                zero.update(comparison.compare_pieces(cache, positions))

        survey = Survey(num_examples=len(examples))
        if not (singles.sums and room.is_slow):
            survey = look_over(
                *(task, model, examples),
                batch_size=room.survey_size(),
                after_first=compare_pieces,
                lengths=lengths,
                may_pass=room.may_pass,
            )
        if not singles.sums:
            singles.add(survey.good[:NUM_TRIED], room.may_add)
            comparison.run(room.may_train_on)
    faults = survey.faults | singles.faults
    if not singles.sums:
        raise _all_failed(context, survey, faults)
    notes = [
        *comparison.notes,
        *(
            f"the metric {metric} is 0 for all examples that were compared: whether it is a sum "
            "could not be checked"
            for metric in sorted(zero)
        ),
    ]
    is_undecided = not any(one.loss for one in singles.sums.values())
    if is_undecided:
        notes.append(
            "the loss of all examples that were compared is 0: whether it is a sum could not be "
            "told, and is looked at again in the first round"
        )
    if not any(one.weight for one in singles.sums.values()):
        notes.append(
            "no example that was compared has a weight, so nothing is learned from them: look at "
            "what loss_sum counts (are all targets ignored?)"
        )
    num_seen = len({*survey.seen, *singles.sums, *faults})
    return CheckReport(
        num_examples=len(examples),
        num_seen=num_seen,
        left_out=_left_out(context, num_seen, faults),
        notes=tuple(notes),
        survey_batch_size=room.survey_size(),
        is_undecided=is_undecided,
    )


def compare_more(context: TrainingContext) -> bool:
    """Compare the sums of another client's first examples; return whether they told something.

    What the first client's examples do not show, as a loss over pairs where it has none, another
    one's may. Examples that cannot be trained on are that client's own matter.

    Raises:
        TaskNotAdditive, HiddenState, BuffersChanged: see ``check_task``.
    """
    room = _Room(context, None)
    with as_it_was(context.image.model):
        cache = ExampleCache(context.task, context.examples)
        singles = SingleExamples(context.task, context.image.model, cache)
        lengths = context.lengths
        tried = [*(range(len(context.examples)) if lengths is None else lengths.sample)]
        try:
            singles.add(tried[:NUM_TRIED], room.may_add)
            Comparison(singles).run(room.may_train_on)
        except (TaskNotAdditive, HiddenState, BuffersChanged):
            raise
        except (HeadwaterError, MemoryError) as error:
            log.debug("%s: nothing was compared: %s", context.name, error)
    return any(one.loss for one in singles.sums.values())


def _left_out(
    context: TrainingContext, num_seen: int, faults: dict[int, ExampleFault]
) -> str | None:
    if not faults:
        return None
    return (
        f"{len(faults):,} of {_seen(context, num_seen)} cannot be trained on and will be left out\n"
        f"{summary(faults, context.examples)}"
    )


def _seen(context: TrainingContext, num_seen: int) -> str:
    total = len(context.examples)
    return counted(num_seen, "example") + (f" looked at, of {total:,}," if num_seen < total else "")


def _all_failed(
    context: TrainingContext, survey: Survey, faults: dict[int, ExampleFault]
) -> TaskFailed | NoFiniteExample:
    first = faults[min(faults)]
    num_seen = len({*survey.seen, *faults})
    if all(fault.detail for fault in faults.values()):
        return TaskFailed(f"all of {_seen(context, num_seen)} failed: {first.detail}")
    return NoFiniteExample(
        f"{context.name}: none of {_seen(context, num_seen)} has a finite loss and gradient\n"
        f"{summary(faults, context.examples)}"
    )


class _Room:
    """The memory and time that trial passes may take, from what the passes so far took."""

    def __init__(self, context: TrainingContext, passed: PassedExample | None) -> None:
        release_freed_memory()
        self._context, self._memory = context, context.memory
        self._rest_bytes = resident_bytes()
        self._peak = PeakMeter()
        self._begun, self._begun_cpu = time.monotonic(), time.process_time()
        self._seconds_each = self._least_seconds = 0.0 if passed is None else passed.seconds

    def may_add(self, num_examples: int) -> bool:
        """Return whether to compare so many examples' gradients; one fewer has passed alone."""
        # On a busy machine passes take longer than their CPU time, on several cores less.
        seconds = time.monotonic() - self._begun, time.process_time() - self._begun_cpu
        self._seconds_each = max(min(seconds) / (num_examples - 1), self._least_seconds)
        is_fast = num_examples == 2 or self._seconds_each * num_examples <= MAX_SECONDS
        return is_fast and self.may_train_on(num_examples)

    @property
    def is_slow(self) -> bool:
        """Whether one example's pass takes longer than a comparison may."""
        return self._seconds_each > MAX_SECONDS

    def may_train_on(self, num_examples: int) -> bool:
        """Return whether a batch of so many examples is predicted to fit, and passes fast."""
        return not self.is_slow and self._has(num_examples * self._each)

    def _has(self, num_bytes: float) -> bool:
        """Return whether the limit has room for so many bytes more than at rest."""
        limit, rest = self._memory.limit_bytes(), self._rest_bytes
        return limit is None or rest + num_bytes <= guarded_bytes(limit, rest)

    @property
    def text(self) -> str:
        """What is left of the limit, for an error."""
        limit, rest = self._memory.limit_bytes(), self._rest_bytes
        if limit is None:
            return ""
        return f", of which {bytes_text(rest)} of {bytes_text(limit)} are taken before it"

    def may_pass(self, positions: Positions) -> bool:
        """Return whether a batch of the survey is predicted to fit."""
        return self._has(self._context.load(positions) * self._each)

    def survey_size(self) -> int:
        """Return how many examples a forward pass of the survey takes at a time."""
        return int(max(min(SURVEY_BYTES / self._each, MAX_SURVEY_BATCH), 1))

    @property
    def _each(self) -> float:
        # Of the passes of single examples; a pass of several raises it further.
        return float(max(self._peak.peak_bytes() - self._rest_bytes, 1))


def predicted_footprint(context: TrainingContext) -> Footprint | None:
    """Predict the bytes that one example takes, with activation checkpointing and without.

    From one forward pass of the first example that succeeds, which takes less memory than a pass
    without checkpointing. None if the model has no blocks to checkpoint, or no example succeeds.
    """
    found, _ = try_examples(context, footprint, with_backward=False)
    return found


Found = TypeVar("Found")


def try_examples(
    context: TrainingContext,
    measured: Callable[[nn.Module, Callable[[], object]], Found | None],
    *,
    with_backward: bool = True,
) -> tuple[Found | None, PassedExample | None]:
    """Return what ``measured`` returns for the model and a pass of the first example that succeeds.

    Behind it the example itself. Both are None if none of the first few does, or memory runs out.
    """
    tried = first_examples(context)
    sums = Sums(0.0, 0, {})

    def one_pass(position: int) -> None:
        nonlocal sums
        loss, weight, metrics = forward(PLAN, tried, (position,), context)
        sums = Sums(loss.item(), weight, metrics)
        if with_backward:
            backward(loss)

    for position in tried.positions:
        begun, begun_cpu = time.monotonic(), time.process_time()
        try:
            found = measured(context.image.model, functools.partial(one_pass, position))
        except InvalidGradients as error:
            log.debug("%s: an example failed: %s", context.name, error)
        except MemoryError:
            break
        else:
            seconds = min(time.monotonic() - begun, time.process_time() - begun_cpu)
            return found, PassedExample(position=position, sums=sums, seconds=seconds)
    return None, None


def first_examples(context: TrainingContext) -> Window:
    """Return a few examples to try, of about the usual length where lengths differ."""
    some = window(
        SamplerPosition(),
        quota=min(NUM_EXAMPLES, len(context.examples)),
        run_seed=0,
        name=context.name,
        num_examples=len(context.examples),
    )
    if context.lengths is None:
        return some
    return replace(some, positions=tuple(context.lengths.sample[:NUM_EXAMPLES]))
