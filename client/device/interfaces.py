"""Interfaces of the machine that a client runs on, real or simulated.

``headwater.client.device.hardware.ThisMachine`` implements them with the operating system,
``headwater.simulation.fleet.virtual_hardware`` with a simulated device's profile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from headwater.client.memory.peak_model import PeakModel
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import StopReason, Vitals
from headwater.common.model.parameters import ModelImage
from headwater.common.task import Examples, Task


class Clock(Protocol):
    """The device's time; a simulated device has a clock of its own."""

    def seconds(self) -> float:
        """Return seconds since an arbitrary start."""

    def worked(self, size: float) -> None:
        """Record that a micro-batch of this size is done; a simulated clock advances."""


class Memory(Protocol):
    """Memory use of micro-batches: its limit, its prediction, and its measurement.

    A size is a number of examples; where these differ in length, of the usual length.
    """

    @property
    def line(self) -> Line | None:
        """Peak bytes of the process as a line in the micro-batch size; None before it is known."""

    def limit_bytes(self) -> int | None:
        """Return how many bytes the process may use now; None without a limit."""

    def fitting(self, size: float) -> float | None:
        """Return the largest micro-batch size predicted to fit, with a margin; None if unknown.

        0 if nothing fits. ``size`` is what the caller would like.
        """

    def begin(self, size: float) -> None:
        """Record that a micro-batch of this size begins."""

    def end(self, size: float) -> int:
        """Learn from the micro-batch that just ended; return its peak bytes."""

    def expect(self, *, rest_bytes: int, peak_bytes: int) -> None:
        """Take the measured peak of a micro-batch of one example as known, before any other is."""

    def holding(self, num_bytes: int) -> AbstractContextManager[None]:
        """Count so many bytes more than before to every peak while the block runs.

        For what local steps keep beside model and gradient, before it is allocated.
        """

    def use_checkpointing(self, bytes_per_example: float | None) -> None:
        """Record that activation checkpointing is on, and the bytes that an example then takes.

        The bytes are a prediction; None if unknown. From now on freed memory is returned to the
        system at once. A second call with the same prediction changes nothing.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeShare:
    """The share of its time that a device gives to training, and why it is not all of it."""

    share: float = 1.0
    reason: StopReason = "quota"


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Training speed: a micro-batch of s examples takes a + b s seconds.

    Beyond the fastest micro-batch size b no longer falls.
    """

    seconds_per_micro_batch: float
    seconds_per_example: float
    fastest_micro_batch_size: int | None = None


class SpeedProbe(Protocol):
    """Measures micro-batches of the client's task in this process."""

    task: Task
    image: ModelImage
    examples: Examples

    def measure(
        self, limit_bytes: Callable[[], int | None], *, cores: float
    ) -> tuple[Speed, PeakModel]:
        """Measure seconds and peak bytes of micro-batches of growing size.

        Raises:
            TaskFailed: none of the first examples can be trained on.
            OutOfMemory: one example alone does not fit.
        """

    def spread(self) -> list[int]:
        """Return the positions of the examples that are measured."""

    def activation_bytes(self) -> float:
        """Return the bytes that autograd keeps for each additional example.

        Raises:
            TaskFailed: none of the first examples can be trained on.
        """


class Hardware(Protocol):
    """The machine that a client runs on, real or simulated."""

    @property
    def clock(self) -> Clock:
        """The device's time."""

    @property
    def memory(self) -> Memory:
        """The device's memory."""

    def cores(self) -> float:
        """Return the number of usable cores; a cgroup may grant a fraction of one."""

    def vitals(self) -> Vitals:
        """Return the device's current measurements of itself."""

    def time_share(self) -> TimeShare:
        """Return the share of its time that the device gives now, by its owner's settings."""

    def bounded(self) -> AbstractContextManager[None]:
        """Let an allocation beyond the memory limit raise MemoryError while the block runs.

        Otherwise the kernel kills the process.
        """

    def speed(self, probe: SpeedProbe) -> Speed:
        """Measure how fast the device trains; a simulated device looks it up.

        Raises:
            TaskFailed, OutOfMemory: see ``SpeedProbe``.
        """
