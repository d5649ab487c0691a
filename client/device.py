"""What a device is: the cores and memory it may use, its clock, and how fast it trains.

Absent limits are absent, never zero. A simulated device answers the same questions from a profile
(``simulation.fleet``).
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch

from client.memory import ProcessMemory
from client.workplace import Clock, Memory, Restraint, Workplace
from common import settings
from common.additive import usable
from common.errors import HeadwaterError, TaskFailed
from common.line import Line
from common.task import batch_of, loss_sum
from common.update import Vitals

log = logging.getLogger(__name__)

# Beside the activations kept for the backward pass, their gradients and temporaries live a while.
WORKING_FACTOR = 2.0

PROBED_EXAMPLES = 8
PROBES, FEWEST_PROBES, PROBE_SECONDS = 15, 3, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A micro-batch of size s takes a + b s seconds; beyond the fastest size b falls no more."""

    seconds_per_micro_batch: float
    seconds_per_example: float
    fastest_micro_batch_size: int | None = None


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

    def __init__(self, chosen: settings.Client | None = None) -> None:
        chosen = chosen or settings.Client()
        self.clock: Clock = MonotonicClock()
        self.memory = ProcessMemory(self.memory_limit_bytes)
        self._limit_bytes = chosen.memory_limit_bytes

    def cores(self) -> float:
        usable = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        return min([float(usable or 1), *_cgroup_cores()])

    def memory_limit_bytes(self) -> int | None:
        own = psutil.Process().memory_info().rss
        limits = [psutil.virtual_memory().available + own, *_cgroup_memory_bytes()]
        return min(limits if self._limit_bytes is None else [*limits, self._limit_bytes])

    def vitals(self) -> Vitals:
        line = self.memory.line
        return Vitals(
            memory_limit_bytes=self.memory_limit_bytes(),
            base_bytes=None if line is None else int(line.base),
            bytes_per_example=None if line is None else line.each,
        )

    def restraint(self) -> Restraint:
        return Restraint()

    def speed(self, place: Workplace) -> Speed:
        """Time micro-batches of 1 and of up to 8 examples in turn, and lay a line through them.

        Raises:
            TaskFailed: none of the first examples can be trained on.
        """
        positions = _sample(place, PROBED_EXAMPLES)
        large = len(positions)
        one, many = _median_seconds(place, positions)
        # Through both points, or through the origin where the noise would have it fall.
        per_example = (many - one) / (large - 1) if large > 1 else one
        per_example = min(max(per_example, 0.0), many / large)
        self.memory.line = Line(
            base=float(psutil.Process().memory_info().rss),
            each=activation_bytes(place) * WORKING_FACTOR,
        )
        return Speed(
            seconds_per_micro_batch=max(one - per_example, 0.0),
            seconds_per_example=max(per_example, 1e-9),
        )


def _sample(place: Workplace, most: int) -> list[int]:
    """Return the first positions, or some of the first that work if they do not work together."""
    first = list(range(min(most, len(place.examples))))
    try:
        _run(place, first)
    except HeadwaterError:
        raise
    except Exception as error:
        log.debug("the first %d examples failed: %s", len(first), error)
        working = usable(place.task, place.image.model, place.examples)[:most]
        if not working:
            raise TaskFailed(f"none of the first examples can be trained on: {error}") from error
        return working
    return first


def _run(place: Workplace, positions: Sequence[int]) -> None:
    batch = batch_of(place.task, place.examples, positions)
    loss, _, _ = loss_sum(place.task, place.image.model, batch)
    loss.backward()  # type: ignore[no-untyped-call]


def _median_seconds(place: Workplace, positions: Sequence[int]) -> tuple[float, float]:
    """Return the seconds of a micro-batch of one example and of one of all, in turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    begun = time.perf_counter()
    while len(seconds[1]) < PROBES and (
        len(seconds[1]) < FEWEST_PROBES or time.perf_counter() - begun < PROBE_SECONDS
    ):
        for part, measured in zip((positions[:1], positions), seconds, strict=True):
            start = time.perf_counter()
            _run(place, part)
            measured.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def activation_bytes(place: Workplace) -> float:
    """Return the bytes that autograd keeps for one example more, from micro-batches of 1 and 2.

    Storages are counted once each, and the model's own parameters not at all.
    """
    own = place.image.bytes_U8.untyped_storage().data_ptr()
    positions = _sample(place, 2)
    kept = [_saved_bytes(place, some, own) for some in (positions[:1], positions)]
    return float(max(kept[1] - kept[0], kept[0] / 2, 1))


def _saved_bytes(place: Workplace, positions: Sequence[int], own: int) -> int:
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sum(place.task, place.image.model, batch_of(place.task, place.examples, positions))
    return sum(storages.values())


def _cgroup_cores() -> Iterator[float]:
    """Yield the CPU quota of the process's cgroups, version 2 and version 1, where there is one."""
    for folder in _cgroup_folders("cpu"):
        v2 = _words(folder / "cpu.max")
        if len(v2) == 2 and v2[0] != "max":
            yield int(v2[0]) / int(v2[1])
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0:
            yield int(quota[0]) / int(period[0])


def _cgroup_memory_bytes() -> Iterator[int]:
    """Yield the memory limits of the process's cgroups, version 2 and version 1."""
    for folder in _cgroup_folders("memory"):
        for file in ("memory.max", "memory.limit_in_bytes"):
            words = _words(folder / file)
            if words and words[0].isdigit() and int(words[0]) < 2**60:
                yield int(words[0])


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of the process's cgroup and of all above it, for one controller."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controllers
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            yield folder
            folder = folder.parent
        yield base


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
