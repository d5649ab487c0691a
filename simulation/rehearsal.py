"""What a device will do with its plan, without doing it: its micro-batches, and when each ends.

It is the device's own walk through its window (``client.window_sum``), with the same clock, memory
and restraint; only that a micro-batch is taken note of instead of computed. So the virtual clock's
answers are those of a device that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from client.accumulator import Accumulator
from client.device import Hardware
from client.micro_batches import Place, Walk, Window, window
from client.passes import Added, Positions
from client.stopping import Watch
from client.window_sum import sum_window
from client.workplace import Workplace
from common.task import Examples
from common.update import MOST_STEPS, Plan, Step, StopReason, Vitals
from simulation.devices import Called, Devices


class CannotForesee(Exception):
    """Only computing tells what the device will do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreseen:
    """What a device will do in a round; ``sizes``, seconds and bytes are those of its steps.

    ``positions`` gives its examples in the order in which it takes them. ``is_whole`` means that
    they are all that it has: their sum needs no order.
    """

    called: Called
    positions: Callable[[], list[int]]
    num_examples: int
    is_whole: bool
    sizes: list[int]
    step_seconds: list[float]
    peak_bytes: list[int]
    micro_batch_size: int
    seconds: float
    reason: StopReason
    vitals: Vitals
    num_left: int
    walk: Walk
    examples: Callable[[], Examples]


def foresee(devices: Devices, called: Called) -> Foreseen:
    """Foresee what a device will do.

    Raises:
        CannotForesee: not one example fits in its memory without activation checkpointing.
        HeadwaterError: its examples cannot be opened.
    """
    resident, plan = devices.resident, called.plan
    machine = devices.machine(called.part, round_number=plan.round)
    if machine.memory.fitting(1) == 0:
        raise CannotForesee
    walk = devices.walk(called.part).settle(plan.counted_round)
    if _is_plain(plan, machine):
        return _foresee_plain(devices, called, machine, walk)
    taken, place = resident.at(
        devices.identity(called.part), machine, plan, walk, cast(Accumulator, _NO_VECTOR)
    )
    begun = place.clock.seconds()
    total = sum_window(plan, taken, place, Watch(plan, place, begun), add=_take_note)
    num_taken, num_examples = total.num_examples, len(place.examples)
    ends_epoch = total.reason == "quota" and taken.ends_epoch
    return Foreseen(
        called=called,
        positions=lambda: [position for some in total.taken for position in some],
        num_examples=num_taken,
        is_whole=False,
        sizes=[step.num_examples for step in total.steps],
        step_seconds=[step.seconds for step in total.steps],
        peak_bytes=[step.peak_bytes for step in total.steps],
        micro_batch_size=total.micro_batch_size,
        seconds=place.clock.seconds() - begun,
        reason="epoch end" if ends_epoch else total.reason,
        vitals=place.vitals(),
        num_left=max(num_examples - taken.offset - num_taken, 0),
        walk=walk.pend(plan.round, taken.after(num_taken, num_examples)),
        examples=lambda: place.examples,
    )


def _is_plain(plan: Plan, machine: Hardware) -> bool:
    """Say whether nothing can end the window early, or cut its micro-batches smaller."""
    fitting = machine.memory.fitting(plan.micro_batch_size)
    return (
        plan.deadline_seconds is None
        and plan.finish_seconds is None
        and plan.share is None  # nothing is taken off on battery
        and plan.held_out_fraction == 0
        and plan.accumulation_steps <= MOST_STEPS
        and (fitting is None or fitting >= plan.micro_batch_size)
    )


def _foresee_plain(devices: Devices, called: Called, machine: Hardware, walk: Walk) -> Foreseen:
    """Foresee a walk to the window's end: what ``foresee`` comes to, ten times as fast."""
    plan, clock, memory = called.plan, machine.clock, machine.memory
    examples = devices.examples(called.part)
    num_owned = len(examples)
    place = walk.place
    if place.offset >= num_owned:  # as ``client.micro_batches.window`` has it
        place = Place(epoch=place.epoch + 1)
    num_examples = min(plan.quota, num_owned - place.offset)
    ends_epoch = num_examples < plan.quota

    def positions() -> list[int]:
        name, seed = called.name, plan.run_seed
        return list(
            window(
                place, quota=plan.quota, run_seed=seed, name=name, num_examples=num_owned
            ).positions
        )

    whole, rest = divmod(num_examples, plan.micro_batch_size)
    sizes = [plan.micro_batch_size] * whole + [rest] * (rest > 0)
    begun = clock.seconds()
    since = clock.seconds()  # the model has come
    step_seconds, peak_bytes = [], []
    for size in sizes:
        clock.worked(size)
        now = clock.seconds()
        step_seconds.append(now - since)
        peak_bytes.append(memory.end(size))
        since = now
    behind = place.offset + num_examples
    after = Place(epoch=place.epoch + 1) if behind >= num_owned else replace(place, offset=behind)
    return Foreseen(
        called=called,
        positions=positions,
        num_examples=num_examples,
        is_whole=num_examples == num_owned,
        sizes=sizes,
        step_seconds=step_seconds,
        peak_bytes=peak_bytes,
        micro_batch_size=plan.micro_batch_size,
        seconds=since - begun,
        reason="epoch end" if ends_epoch else "quota",
        vitals=machine.vitals(),
        num_left=num_owned - behind,
        walk=walk.pend(plan.round, after),
        examples=lambda: examples,
    )


def _take_note(
    plan: Plan,
    window: Window,
    positions: Positions,
    place: Workplace,
    since_seconds: float,
) -> Added:
    """Let a micro-batch take its seconds and bytes, and add nothing.

    Raises:
        MemoryError: it would cross the simulated limit.
    """
    place.memory.begin(len(positions))
    place.clock.worked(len(positions))
    step = Noted(
        num_examples=len(positions),
        weight=len(positions),
        seconds=place.clock.seconds() - since_seconds,
        peak_bytes=place.memory.end(len(positions)),
    )
    return Added(loss_sum=0.0, metric_sums={}, step=cast(Step, step))


@dataclass(kw_only=True, slots=True)
class Noted:
    """What the walk through a window reads of a step."""

    num_examples: int
    weight: int
    seconds: float
    peak_bytes: int


class _NoVector:
    """What stands for the vector where nothing is added."""

    def zero(self) -> None:
        """Do nothing."""

    def check_views(self) -> None:
        """Do nothing."""


_NO_VECTOR: Any = _NoVector()
