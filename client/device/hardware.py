"""What a device is: its cores and memory, its clock, its sensors, and how fast it trains.

Absent limits and sensors are absent, never zero. A simulated device answers the same questions from
a profile (``headwater.simulation.fleet.virtual_hardware.virtual_hardware``).
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from pathlib import Path
from typing import Protocol

from headwater.client.device.sensors import Sensors
from headwater.client.device.throttle import restraint
from headwater.client.memory.limits import ROOT, MemoryLimits, usable_cores
from headwater.client.memory.peak_model import ProcessMemory
from headwater.client.training.context import Clock, Memory, Restraint, Workplace
from headwater.client.training.probe import probe
from headwater.client.training.probe_fit import Speed
from headwater.common.messages import Vitals
from headwater.common.settings import schema as settings
from headwater.common.system.heap import keep_mmap_threshold

log = logging.getLogger(__name__)


class Hardware(Protocol):
    """The machine under a device, real or simulated."""

    @property
    def clock(self) -> Clock:
        """The device's time."""
        ...

    @property
    def memory(self) -> Memory:
        """The device's memory."""
        ...

    def cores(self) -> float:
        """Return the cores that may be used; a cgroup may grant a fraction of one."""
        ...

    def vitals(self) -> Vitals:
        """Return what the device knows of itself at the moment."""
        ...

    def restraint(self) -> Restraint:
        """Return how much of its time the device gives at the moment, by its settings."""
        ...

    def speed(self, place: Workplace) -> Speed:
        """Measure or look up how fast the device trains this task."""
        ...


class MonotonicClock:
    """The machine's own clock."""

    def seconds(self) -> float:
        return time.monotonic()

    def worked(self, num_examples: int) -> None:
        """Time passes by itself."""


class ThisMachine:
    """The machine that the process runs on."""

    def __init__(self, chosen: settings.ClientSettings | None = None, *, root: Path = ROOT) -> None:
        """Take the owner's settings, and the folder in which /proc and /sys lie."""
        self._chosen = chosen or settings.ClientSettings()
        self._root = root
        self._sensors = Sensors(root)
        self._judged: tuple[Vitals | None, Restraint] = (None, Restraint())
        self.clock: Clock = MonotonicClock()
        self.limits = MemoryLimits(self._chosen.memory_limit_bytes, root=root)
        self.memory = ProcessMemory(self._limit_bytes)
        self._limit_bytes()  # before anything large is allocated

    def _limit_bytes(self) -> int:
        """Return the least memory limit; under one of virtual memory, let freed memory go at once.

        What glibc keeps in its heap counts as used there, also when its pages were given back:
        after a few sizes of micro-batch not one example would fit any more.
        """
        least = self.limits.least()
        if least.is_virtual:
            keep_mmap_threshold()
        return least.num_bytes

    def cores(self) -> float:
        return usable_cores(self._root)

    def vitals(self) -> Vitals:
        line = self.memory.line
        return self._sensors.vitals().model_copy(
            update={
                "memory_limit_bytes": self.limits.least_bytes(),
                "base_bytes": None if line is None else int(line.base),
                "bytes_per_example": None if line is None else line.each,
                "share": self.restraint().share,
            }
        )

    def restraint(self) -> Restraint:
        """See ``Hardware``; judged anew when the sensors were looked at, at most once a second."""
        told = self._sensors.vitals()
        judged, before = self._judged
        if told is not judged:
            now = restraint(told, self._chosen, wall=dt.datetime.now())
            if now != before:
                why = f", {now.reason}" if now.share < 1 else " again"
                log.info("this device gives %.0f %% of its time%s", 100 * now.share, why)
            self._judged = told, now
        return self._judged[1]

    def speed(self, place: Workplace) -> Speed:
        """Probe the task; the memory's line is the one that the probe showed, from now on.

        Raises:
            TaskFailed: none of the first examples can be trained on.
            OutOfMemory: one example alone does not fit.
        """
        probed = probe(place, self._limit_bytes, cores=self.cores())
        self.memory.known = probed.peaks
        return probed.speed
