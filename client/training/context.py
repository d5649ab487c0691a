"""All that a device needs to work on a plan: task, model, examples, clock, and an eye on itself.

Clock, memory and restraint are the machine's (``headwater.client.device.hardware.hardware``) or a simulated device's
(``headwater.simulation.fleet.virtual_hardware.virtual_hardware``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

from headwater.client.training.accumulator import Accumulator
from headwater.client.training.batches import Batches
from headwater.common.messages import StopReason, Vitals
from headwater.common.model.parameters import ModelImage
from headwater.common.stats.linear_fit import Line
from headwater.common.task import Examples, Task


class Clock(Protocol):
    """Time as the device sees it; a simulated device has one of its own."""

    def seconds(self) -> float:
        """Return seconds since an arbitrary start."""
        ...

    def worked(self, num_examples: int) -> None:
        """Take note that a micro-batch of this size was done."""
        ...


class Memory(Protocol):
    """What micro-batches take of the memory that there is."""

    @property
    def line(self) -> Line | None:
        """Peak bytes of the process as a line in the micro-batch size; None before any is known."""
        ...

    def limit_bytes(self) -> int | None:
        """Return the bytes that the process may hold now, or None if nothing limits it."""
        ...

    def fitting(self, num_examples: int) -> int | None:
        """Return the largest micro-batch that fits by prediction, with a margin; None if unknown.

        0 where not even one example does. ``num_examples`` is what is to be taken if it fits.
        """
        ...

    def begin(self, num_examples: int) -> None:
        """Take note that a micro-batch of this size begins."""
        ...

    def end(self, num_examples: int) -> int:
        """Learn from the micro-batch that just ended; return the peak bytes of the time."""
        ...

    def relieve(self, bytes_per_example: float | None) -> None:
        """Take note that activation checkpointing is on, and what an example takes with it.

        By prediction, and not known if None. What was dropped is to be given back at once from now
        on. Again with the same figure it changes nothing.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Restraint:
    """How much of its time a device gives, and why not all of it."""

    share: float = 1.0
    reason: StopReason = "quota"


NO_BATCHES = Batches(cast(Task, None), ())


@dataclass(frozen=True, kw_only=True, slots=True)
class Workplace:
    """All that a device needs to work on a plan."""

    task: Task
    image: ModelImage
    accumulator: Accumulator
    examples: Examples
    name: str
    clock: Clock
    memory: Memory
    stop: Callable[[], bool]
    checkpointed_bytes: float | None = None
    """Of one example with activation checkpointing, by prediction; not set: not known, or there is
    nothing to checkpoint."""
    restraint: Callable[[], Restraint] = Restraint
    vitals: Callable[[], Vitals] = Vitals
    batches: Batches = field(default=NO_BATCHES, repr=False)
    """Of the task and the examples; made anew if they are of others."""

    def __post_init__(self) -> None:
        """Be ready for the first window."""
        if not self.batches.are_of(self.task, self.examples):
            object.__setattr__(self, "batches", Batches(self.task, self.examples))
