"""The machine that the process runs on: cores, memory, clock and sensors.

A limit or sensor that the machine lacks is reported as absent, never as zero.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from contextlib import AbstractContextManager
from pathlib import Path

from headwater.client.device.interfaces import Clock, Speed, SpeedProbe, TimeShare
from headwater.client.device.sensors import Sensors
from headwater.client.memory.allocation_bound import bounded
from headwater.client.memory.peak_model import ProcessMemory
from headwater.client.memory.process_limits import ROOT, MemoryLimits, usable_cores
from headwater.client.node_features import time_share_rule
from headwater.common.messages import Vitals
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.common.system.heap import keep_mmap_threshold
from headwater.common.user_code.run_scope import cached_in_scope

log = logging.getLogger(__name__)


class MonotonicClock:
    """The machine's own clock."""

    def seconds(self) -> float:
        return time.monotonic()

    def worked(self, size: float) -> None:
        """Do nothing: real time passes by itself."""


class ThisMachine:
    """The machine that the process runs on; implements ``Hardware``."""

    def __init__(self, chosen: ClientSettings | None = None, *, root: Path = ROOT) -> None:
        """Take the owner's settings, and the folder that holds /proc and /sys."""
        self._chosen = chosen or ClientSettings()
        self._root = root
        self._sensors = Sensors(root)
        self._judged: tuple[Vitals | None, TimeShare] = (None, TimeShare())
        self.clock: Clock = MonotonicClock()
        self.limits = MemoryLimits(self._chosen.memory_limit_bytes, root=root)
        self.memory = ProcessMemory(self._limit_bytes)
        self._limit_bytes()  # before anything large is allocated

    def _limit_bytes(self) -> int:
        """Return the lowest memory limit; under one of virtual memory, free memory at once.

        Such a limit also counts what glibc keeps in its heap, even after the pages were returned:
        after a few micro-batch sizes not one example would fit any more.
        """
        lowest = self.limits.lowest()
        if lowest.is_virtual:
            keep_mmap_threshold()
        return lowest.num_bytes

    def cores(self) -> float:
        return usable_cores(self._root)

    def vitals(self) -> Vitals:
        line = self.memory.line
        return self._sensors.vitals().model_copy(
            update={
                "memory_limit_bytes": self.limits.lowest().num_bytes,
                "base_bytes": None if line is None else int(line.base),
                "bytes_per_example": None if line is None else line.each,
                "share": self.time_share().share,
            }
        )

    def time_share(self) -> TimeShare:
        """See ``Hardware``; computed again when the sensors were read, at most once a second."""
        vitals = self._sensors.vitals()
        judged, before = self._judged
        if vitals is not judged:
            now = time_share_rule()(vitals, self._chosen, wall=dt.datetime.now())
            if now != before:
                why = f", {now.reason}" if now.share < 1 else " again"
                log.info("this device gives %.0f %% of its time%s", 100 * now.share, why)
            self._judged = vitals, now
        return self._judged[1]

    def bounded(self) -> AbstractContextManager[None]:
        return bounded(self._limit_bytes())

    def speed(self, probe: SpeedProbe) -> Speed:
        """See ``Hardware``; from now on the memory predicts by the measured peaks."""
        with self.bounded():
            speed, self.memory.known = probe.measure(self._limit_bytes, cores=self.cores())
        return speed


def this_machine(identity: object, settings: Settings, layout: object) -> ThisMachine:
    """Return the machine that the process runs on, for any client and model (``HardwareOf``)."""
    return _this_machine(settings.client)


@cached_in_scope()
def _this_machine(chosen: ClientSettings) -> ThisMachine:
    """Make the machine once: its memory model is kept as long as the run."""
    return ThisMachine(chosen)
