"""The sum of one window: K micro-batches added into the vector, whatever goes wrong in between.

Faults are settled by doing the window again, never by patching. An example that spoils the vector
is found, and the window is summed again without it; after an allocation failure it is summed again
in micro-batches of half the size, and at one example with activation checkpointing. What was left
out is counted.

Before that comes the guard, as under a cgroup running out of memory is a kill and no exception. A
micro-batch is begun only if it fits by prediction; else what is left goes on in smaller ones, from
here, as nothing of it was added yet. Where not even one example fits, activation checkpointing is
switched on; where one would not fit with it either, the window ends, and what was summed is sent,
exactly weighted. A window also ends before its quota, or goes beyond it, where the device's pace is
not what its plan foresaw (``client.training.stop_rules``).

A step's seconds are from the end of the one before: what the device does in between takes time in
each round, and a pace without it would lead to quotas that never are done in time.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headwater.client.memory.activation_checkpointing import is_on, switch_on
from headwater.client.training.context import Workplace
from headwater.client.training.gradient_pass import (
    Added,
    LossNotFinite,
    Positions,
    VectorSpoiled,
    add,
    culprits_of_the_gradient,
    culprits_of_the_loss,
)
from headwater.client.training.micro_batches import Window, cut
from headwater.client.training.stop_rules import Watch, num_until_finish
from headwater.common.errors import OutOfMemory
from headwater.common.messages import MOST_STEPS, Plan, Step, StopReason
from headwater.common.system.heap import give_back
from headwater.common.task import Metrics

log = logging.getLogger(__name__)

Adding = Callable[[Plan, Window, Positions, Workplace, float], Added]


@dataclass(kw_only=True, slots=True)
class WindowSum:
    """What was summed over one window; the vector itself is in the accumulator."""

    loss_sum: float = 0.0
    weight: int = 0
    num_examples: int = 0
    metric_sums: Metrics = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    taken: list[Positions] = field(default_factory=list)
    left: deque[Positions] = field(default_factory=deque)
    refused: list[int] = field(default_factory=list)
    num_cut_smaller: int = 0
    micro_batch_size: int = 1
    reason: StopReason = "quota"

    def add(self, positions: Positions, added: Added) -> None:
        """Take note of a micro-batch that is in the vector."""
        self.loss_sum += added.loss_sum
        self.weight += added.step.weight
        self.num_examples += len(positions)
        for name, value in added.metric_sums.items():
            self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value
        self.taken.append(positions)
        self.steps.append(added.step)

    def cut_next(self, most: int) -> None:
        """Cut the next micro-batch in two where it has more examples than so many."""
        first = self.left[0]
        if len(first) > most:
            self.left.popleft()
            self.left.extendleft((first[most:], first[:most]))

    def cut_smaller(self, micro_batch_size: int) -> None:
        """Cut what is left into smaller micro-batches."""
        self.left = deque(cut(_flat(self.left), micro_batch_size))
        self.micro_batch_size = min(self.micro_batch_size, micro_batch_size)
        self.num_cut_smaller += 1


NOTHING = WindowSum()


def sum_window(
    plan: Plan,
    window: Window,
    place: Workplace,
    watch: Watch,
    *,
    before: WindowSum | None = None,
    begun: WindowSum | None = None,
    keep_safe: Callable[[WindowSum], None] | None = None,
    add: Adding = add,
) -> WindowSum:
    """Sum one window into the vector; see the module's text for faults and memory.

    ``before`` is what the plan's other windows came to: it counts towards the plan's limits. With
    ``begun`` the sum goes on from there, and the vector holds its part already. ``keep_safe`` is
    called behind each micro-batch. ``add`` adds one; a rehearsal (``headwater.simulation.compute.modes.dry_run``) only
    takes note of it.

    Raises:
        OutOfMemory: one example alone does not fit, and there is nothing to be sent.
        TaskError: the task breaks a rule.
    """
    before, total = before or NOTHING, begun
    place.batches.begin(window.positions)
    if total is None:
        place.accumulator.zero()
        size, asked = plan.micro_batch_size, plan.quota
        left = [*cut(window.positions[:asked], size), *cut(window.positions[asked:], size)]
        total = WindowSum(left=deque(left), micro_batch_size=size)
    since_seconds = place.clock.seconds()
    start_seconds = since_seconds - math.fsum(step.seconds for step in total.steps)
    while total.left:
        passed_seconds = since_seconds - start_seconds
        reason = _reason_to_end(plan, total, before, place, watch, passed_seconds)
        if reason is not None:
            reached = set(window.positions[: window.positions.index(total.left[0][0])])
            has_quota = reason == "finish" and len(reached) >= plan.quota
            total.reason = "quota" if has_quota else reason
            # One that was refused before the window began again may lie behind its end.
            total.refused = [p for p in total.refused if p in reached]
            break
        positions, num_steps, has_failed = total.left.popleft(), len(total.steps), False
        try:
            total = _add_or_blame(plan, window, positions, total, place, add, since_seconds)
        except MemoryError:
            has_failed = True  # settled below, where the error holds no activations any more
        if has_failed:
            total = _after_failed_allocation(plan, positions, total, place)
        is_added = len(total.steps) > num_steps
        since_seconds = (
            since_seconds + total.steps[-1].seconds if is_added else place.clock.seconds()
        )
        if keep_safe is not None:
            keep_safe(total)
    place.accumulator.check_views()
    _tell(plan, total, place)
    return total


def _reason_to_end(
    plan: Plan,
    total: WindowSum,
    before: WindowSum,
    place: Workplace,
    watch: Watch,
    passed_seconds: float,
) -> StopReason | None:
    """Return why the window ends here; None if the next micro-batch may begin, and fits.

    A report holds ``MOST_STEPS`` micro-batches. No plan asks for more, but smaller ones may lead
    there; what is left is then for the next round.

    Raises:
        OutOfMemory: not even one example fits, and there is nothing to be sent.
    """
    has_some = bool(total.taken or before.taken)
    if has_some:
        steps = total.steps or before.steps
        num_done = total.num_examples + before.num_examples
        if plan.finish_seconds is not None:
            more = num_until_finish(plan, steps, passed_seconds=passed_seconds, num_done=num_done)
            if more == 0:
                return "finish"
            if more is not None:
                total.cut_next(more)
        reason = watch.reason_to_stop(steps, num_done=num_done, num_next=len(total.left[0]))
        if reason is not None:
            return reason
        if len(total.steps) + len(before.steps) >= MOST_STEPS:
            return "short of memory"
    fitting = place.memory.fitting(len(total.left[0]))
    if fitting is None or fitting >= len(total.left[0]) or _can_be_cut(plan, total, place, fitting):
        return None
    if not has_some:
        raise OutOfMemory(f"{place.name}, round {plan.round}: {_prediction(place)}")
    log.warning(
        "%s, round %d: %s; what is summed is sent", place.name, plan.round, _prediction(place)
    )
    return "short of memory"


def _can_be_cut(plan: Plan, total: WindowSum, place: Workplace, fitting: int | None) -> bool:
    """Cut what is left to what fits; False if not even one example does, by prediction."""
    if fitting == 0:
        fitting = _switch_on(plan, len(total.left[0]), place)
    if fitting is not None and fitting < len(total.left[0]):
        if fitting == 0:
            return False
        total.cut_smaller(fitting)
    return True


def _switch_on(plan: Plan, num_examples: int, place: Workplace) -> int | None:
    """Switch activation checkpointing on, if that helps; return the examples that fit then.

    What one example takes with it was measured before memory was short (``client.training.trainer``).
    """
    line, foreseen = place.memory.line, place.checkpointed_bytes
    if foreseen is None or line is None or foreseen >= line.each:
        return 0
    was_on = is_on(place.image.model)
    switch_on(place.image.model)
    place.memory.relieve(foreseen)
    fitting = place.memory.fitting(num_examples)
    if not was_on:
        log.warning(
            "%s, round %d: not one example fits in memory: activation checkpointing is on, "
            "%s fit with it",
            place.name,
            plan.round,
            fitting,
        )
    return fitting


def _prediction(place: Workplace) -> str:
    """Say what one example would take, and of what."""
    line, limit = place.memory.line, place.memory.limit_bytes()
    needed = "more" if line is None else f"{line.at(1) / 2**20:,.0f} MiB"
    given = "what there is" if limit is None else f"{limit / 2**20:,.0f} MiB"
    text = f"one example alone does not fit: by prediction it takes {needed}"
    if is_on(place.image.model):
        return f"{text} with activation checkpointing of {given}"
    helps = "would not help" if place.checkpointed_bytes else "has no blocks, or is not measured"
    return f"{text} of {given}, and activation checkpointing {helps}"


def _add_or_blame(
    plan: Plan,
    window: Window,
    positions: Positions,
    total: WindowSum,
    place: Workplace,
    add: Adding,
    since_seconds: float,
) -> WindowSum:
    """Add one micro-batch, or leave out who is to blame; return the total, or one begun again.

    Raises:
        MemoryError: in the attempt, or in the search for the culprits.
    """
    try:
        total.add(positions, add(plan, window, positions, place, since_seconds))
        return total
    except LossNotFinite:
        bad = culprits_of_the_loss(plan, window, positions, place)
        is_spoiled = False
    except VectorSpoiled:
        # Clean alone, spoiled in the sum: it overflowed, and this micro-batch is to blame.
        bad = culprits_of_the_gradient(plan, window, positions, place)
        is_spoiled = True
    good = tuple(p for p in positions if p not in bad)
    again = [good] if good else []
    if is_spoiled:
        left = [*total.taken, *again, *total.left]
        return _begun_again(total, left, place, refused=[*total.refused, *bad])
    total.refused += bad
    total.left.extendleft(again)
    return total


def _after_failed_allocation(
    plan: Plan, positions: Positions, total: WindowSum, place: Workplace
) -> WindowSum:
    """Begin the window again in micro-batches of half the size, or with checkpointing at size 1.

    Raises:
        OutOfMemory: neither is left.
    """
    size = max(len(positions) // 2, 1)
    if len(positions) == 1:
        model = place.image.model
        text = f"{place.name}, round {plan.round}: one example alone does not fit in memory"
        if is_on(model):
            raise OutOfMemory(f"{text}, not with activation checkpointing either")
        if not switch_on(model):
            raise OutOfMemory(f"{text}, and the model has no blocks to checkpoint")
        place.memory.relieve(place.checkpointed_bytes)
        log.warning("%s: activation checkpointing is on, and the window begins again", text)
    else:
        give_back()
        log.warning("memory ran out at micro-batches of %d: %d from here", len(positions), size)
    left = cut(_flat([*total.taken, positions, *total.left]), size)
    again = _begun_again(total, left, place, refused=total.refused)
    again.micro_batch_size = size
    return again


def _begun_again(
    total: WindowSum, left: Iterable[Positions], place: Workplace, *, refused: list[int]
) -> WindowSum:
    place.accumulator.zero()
    return WindowSum(
        left=deque(left),
        refused=refused,
        num_cut_smaller=total.num_cut_smaller,
        micro_batch_size=total.micro_batch_size,
    )


def _flat(groups: Iterable[Positions]) -> Sequence[int]:
    return [p for group in groups for p in group]


def _tell(plan: Plan, total: WindowSum, place: Workplace) -> None:
    if total.refused:
        log.warning(
            "%s left out %d example(s) in round %d", place.name, len(total.refused), plan.round
        )
    if total.num_cut_smaller:
        log.warning(
            "%s, round %d: micro-batches of %d instead of %d; memory made them smaller %d time(s)",
            place.name,
            plan.round,
            total.micro_batch_size,
            plan.micro_batch_size,
            total.num_cut_smaller,
        )
