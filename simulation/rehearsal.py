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
from client.micro_batches import Walk, Window
from client.passes import Added, Positions
from client.stopping import Watch
from client.window_sum import sum_window
from client.workplace import Workplace
from common.task import Examples
from common.update import Plan, Step, StopReason, Vitals
from simulation.devices import Called, Devices


class CannotForesee(Exception):
    """Only computing tells what the device will do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreseen:
    """What a device will do in a round; ``sizes``, seconds and bytes are those of its steps."""

    called: Called
    positions: list[int]
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
    window, place = resident.at(devices.identity(called.part), machine, plan, walk)
    place = replace(place, accumulator=cast(Accumulator, _NO_VECTOR))
    begun = place.clock.seconds()
    total = sum_window(plan, window, place, Watch(plan, place, begun), add=_take_note)
    num_taken, num_examples = total.num_examples, len(place.examples)
    ends_epoch = total.reason == "quota" and window.ends_epoch
    return Foreseen(
        called=called,
        positions=[position for taken in total.taken for position in taken],
        sizes=[step.num_examples for step in total.steps],
        step_seconds=[step.seconds for step in total.steps],
        peak_bytes=[step.peak_bytes for step in total.steps],
        micro_batch_size=total.micro_batch_size,
        seconds=place.clock.seconds() - begun,
        reason="epoch end" if ends_epoch else total.reason,
        vitals=place.vitals(),
        num_left=max(num_examples - window.offset - num_taken, 0),
        walk=walk.pend(plan.round, window.after(num_taken, num_examples)),
        examples=lambda: place.examples,
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
    step = Step.model_construct(
        num_examples=len(positions),
        weight=len(positions),
        loss=0.0,
        seconds=place.clock.seconds() - since_seconds,
        peak_bytes=place.memory.end(len(positions)),
    )
    return Added(loss_sum=0.0, metric_sums={}, step=step)


class _NoVector:
    """What stands for the vector where nothing is added."""

    def zero(self) -> None:
        """Do nothing."""

    def check_views(self) -> None:
        """Do nothing."""


_NO_VECTOR: Any = _NoVector()
