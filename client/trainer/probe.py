"""Measures the seconds and peak bytes of micro-batches before the first plan.

The size starts at one example and doubles. Before each doubling the peak of the next size is
predicted from the measured ones, and the probe stops well below the limit: a cgroup kills a process
that exceeds it. Both seconds and bytes are fitted as lines in the size
(``common.estimates.linear_fit``), because dispatch dominates small models: one micro-batch of
15 takes 0.21 ms, three of 5 take 0.50 ms.

At each stage all sizes so far are timed in turn, so that load of other processes slows all of them
alike. Memory is measured under real conditions: over several passes with different examples, as the
allocator's fragments raise the peak of a transformer's second pass by a tenth.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headwater.client.device.interfaces import Speed
from headwater.client.memory.peak_model import (
    PeakMeter,
    PeakModel,
    resident_bytes,
)
from headwater.client.trainer.kept_bytes import count_by_length, kept_bytes, loss_of
from headwater.client.trainer.probe_fit import (
    PROBE_SECONDS,
    SLOW_SECONDS,
    ProbeFit,
    ProbePoint,
    predicted_bytes,
    reason_to_stop,
)
from headwater.client.training.context import TrainingContext
from headwater.common.additivity.single_examples import usable
from headwater.common.errors import HeadwaterError, OutOfMemory, TaskFailed
from headwater.common.model.chunked_cross_entropy import adding_in_place
from headwater.common.system.heap import release_freed_memory
from headwater.common.user_code.failures import described, is_allocation_failure

log = logging.getLogger(__name__)

MAX_EXAMPLES = 256  # plan.max_micro_batch_size: the planner asks for no more

# In each stage the sizes are timed up to so many times, while that takes no longer than this.
MAX_TURNS, TURNS_SECONDS = 7, 0.1

# At the end they are timed again so many times, if the probe has time left.
FINAL_TURNS = 15

# A pass as short as this is repeated at once: one of the two may have been interrupted.
SHORT_SECONDS = 0.1


class _ExamplesFailed(Exception):
    """The task raised an exception."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Times:
    """Seconds of one size's passes: the first pass of each turn, and the shorter of two."""

    first: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)


class ExampleProbe:
    """Measures micro-batches of a client's own examples; implements ``SpeedProbe``.

    The gradients are left in the accumulator.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.task, self.image, self.examples = context.task, context.image, context.examples
        self._name, self._accumulator = context.name, context.accumulator
        self._context, self._lengths = context, context.lengths

    def measure(
        self, limit_bytes: Callable[[], int | None], *, cores: float
    ) -> tuple[Speed, PeakModel]:
        """Return the fitted speed and peaks of ``fit``."""
        fit = self.fit(limit_bytes, cores=cores)
        return fit.speed, fit.peaks

    def fit(self, limit_bytes: Callable[[], int | None], *, cores: float) -> ProbeFit:
        """Measure sizes 1, 2, 4 and so on, until ``reason_to_stop`` or an allocation failure.

        If one example's pass takes ``SLOW_SECONDS``, no larger size is measured.

        ``cores`` is the process's long-term share: a cgroup lets short passes run at full speed and
        pauses the process later.

        Raises:
            TaskFailed: none of the first examples can be trained on, or none of them twice.
            OutOfMemory: one example alone does not fit.
        """
        begun = time.perf_counter()
        self.image.model.train()
        does_not_fit = f"{self._name}: one example alone does not fit in memory"
        points: tuple[ProbePoint, ...] = ()
        stopped = None
        release_freed_memory()
        peak = PeakMeter()
        try:
            positions, seconds = self._passed(together=1, cores=cores)
            peak_bytes = peak.peak_bytes()
            release_freed_memory()
            rest_bytes = resident_bytes()
            forward_begun = time.perf_counter()
            kept = float(kept_bytes(self._context, positions[:1]))
            # A first pass alone may have been slow for what it found cold.
            if min(seconds, 3 * (time.perf_counter() - forward_begun)) >= SLOW_SECONDS:
                points = (_point(1, _Times(first=[seconds], least=[seconds]), peak_bytes),)
                stopped = f"it took {seconds:.1f} s"
        except MemoryError:
            raise OutOfMemory(does_not_fit) from None
        while stopped is None:
            size = min(2 * points[-1].size, len(positions)) if points else 1
            try:
                points = self._stage(positions, points, size, cores)
                if size == 2:
                    kept = self.activation_bytes(positions)
            except MemoryError:
                if not points:
                    raise OutOfMemory(does_not_fit) from None
                stopped = f"memory ran out at {size} examples"
            except _ExamplesFailed as error:
                if len(set(positions)) == len(positions):
                    # One of them is bad: continue with a few good ones, repeated.
                    positions = _repeated(self._usable(error), len(positions))
                elif points:
                    stopped = f"good examples failed together: {error}"
                else:
                    raise TaskFailed(f"examples cannot be trained on twice: {error}") from error
            else:
                stopped = reason_to_stop(
                    points,
                    num_examples=len(positions),
                    next_bytes=predicted_bytes(points, 2 * size, kept, rest_bytes),
                    limit_bytes=limit_bytes(),
                    seconds=time.perf_counter() - begun,
                )
        lengths = self._lengths
        if lengths is not None and lengths.record.cost is None:
            lengths.record.cost = count_by_length(
                self._context, limit_bytes=limit_bytes(), rest_bytes=rest_bytes
            )
        left = PROBE_SECONDS - (time.perf_counter() - begun)
        points = self._timed_again(positions, points, left, cores)
        log.info("%s: probed up to %d examples: %s", self._name, points[-1].size, stopped)
        return ProbeFit(points=points, rest_bytes=rest_bytes, kept_bytes=kept, stopped=stopped)

    def activation_bytes(self, positions: Sequence[int] | None = None) -> float:
        """Return the bytes that autograd keeps per additional example, from sizes 1 and 2.

        Each storage counts once; the model's own parameters do not count.
        """
        some = (self._passed(together=2)[0] if positions is None else positions)[:2]
        one, two = (kept_bytes(self._context, part) for part in (some[:1], some))
        return float(max(two - one, one / 2, 1))

    def _stage(
        self,
        positions: Sequence[int],
        before: Sequence[ProbePoint],
        size: int,
        cores: float,
    ) -> tuple[ProbePoint, ...]:
        """Measure the peak of a new size, and time it and all smaller sizes again.

        Raises:
            MemoryError: an allocation failed.
            _ExamplesFailed: the task raised an exception.
        """
        release_freed_memory()
        peak = PeakMeter()
        if before:
            self._run(positions[:size])  # allocates pages and fills caches
        sizes = [*(p.size for p in before), size]
        times = self._take_turns(positions, sizes, MAX_TURNS, TURNS_SECONDS, cores)
        peaks = [*(p.peak_bytes for p in before), peak.peak_bytes()]
        return tuple(
            _point(one, times[one], peak_bytes)
            for one, peak_bytes in zip(times, peaks, strict=True)
        )

    def _timed_again(
        self,
        positions: Sequence[int],
        points: tuple[ProbePoint, ...],
        seconds: float,
        cores: float,
    ) -> tuple[ProbePoint, ...]:
        """Time all sizes again in the probe's remaining ``seconds``, which helps on a busy machine.

        The points stay as they are if the time is too short, or the examples fail now.
        """
        if seconds < 2 * sum(p.usual_seconds for p in points):
            return points
        try:
            sizes = [p.size for p in points]
            times = self._take_turns(positions, sizes, FINAL_TURNS, seconds, cores)
        except (MemoryError, _ExamplesFailed) as error:
            log.debug("%s: the sizes were not timed again: %s", self._name, error)
            return points
        return tuple(_point(p.size, times[p.size], p.peak_bytes) for p in points)

    def _take_turns(
        self,
        positions: Sequence[int],
        sizes: Sequence[int],
        max_turns: int,
        seconds: float,
        cores: float,
    ) -> dict[int, _Times]:
        """Time the sizes in turn, at least once each, on different examples every time.

        Raises:
            MemoryError, _ExamplesFailed: see ``_run``.
        """
        endless = itertools.cycle(positions)
        times = {size: _Times() for size in sizes}
        begun = time.perf_counter()
        for _ in range(max_turns):
            for size, of_size in times.items():
                some = list(itertools.islice(endless, size))
                first = self._timed(some, cores)
                second = self._timed(some, cores) if first < SHORT_SECONDS else first
                of_size.first.append(first)
                of_size.least.append(min(first, second))
            if time.perf_counter() - begun > seconds:
                break
        return times

    def _timed(self, positions: Sequence[int], cores: float) -> float:
        """Return a pass's wall time, or what its CPU time takes in the long run if that is more."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self._run(positions)
        cpu_seconds = time.process_time() - cpu_start
        return max(time.perf_counter() - start, cpu_seconds / cores)

    def _run(self, positions: Sequence[int]) -> None:
        """Run one forward and backward pass.

        Raises:
            MemoryError: an allocation failed.
            _ExamplesFailed: the task raised an exception.
        """
        try:
            loss = loss_of(self._context, positions)
            with adding_in_place():
                loss.backward()  # type: ignore[no-untyped-call]
        except HeadwaterError:
            raise
        except Exception as error:
            if is_allocation_failure(error):
                raise MemoryError(str(error)) from error
            raise _ExamplesFailed(described(error)) from error

    def spread(self) -> list[int]:
        """Return up to 256 positions spread over the data, as a folder may be sorted by size.

        Where examples differ in length, all have the usual one, and may repeat.
        """
        num_examples = len(self.examples)
        number = min(num_examples, MAX_EXAMPLES)
        if (lengths := self._lengths) is not None:
            usual = [p for p in lengths.sample if lengths[p] == lengths.usual]
            return _repeated(usual, number)
        return [n * num_examples // number for n in range(number)]

    def _passed(self, *, together: int, cores: float = math.inf) -> tuple[list[int], float]:
        """Pass the first examples together; return the positions to measure, and the seconds.

        The positions are up to 256. If the first ones fail, those of a few that work are repeated,
        and the seconds are 0.

        Raises:
            TaskFailed: all of the first few fail.
            MemoryError: an allocation failed.
        """
        positions = self.spread()
        try:
            return positions, self._timed(positions[:together], cores)
        except _ExamplesFailed as error:
            return _repeated(self._usable(error), len(positions)), 0.0

    def _usable(self, error: _ExamplesFailed) -> list[int]:
        log.debug("%s: some examples failed: %s", self._name, error)
        tried = None if self._lengths is None else self._lengths.sample
        positions = usable(self.task, self.image.model, self.examples, tried)
        self._accumulator.zero()  # ``usable`` replaced the gradients
        if not positions:
            raise TaskFailed(f"none of the first examples can be trained on: {error}") from error
        return positions


def _point(size: int, times: _Times, peak_bytes: int) -> ProbePoint:
    return ProbePoint(
        size=size,
        seconds=statistics.median(times.least),
        usual_seconds=statistics.median(times.first),
        least_seconds=min(times.least),
        peak_bytes=peak_bytes,
    )


def _repeated(positions: Sequence[int], num_positions: int) -> list[int]:
    return list(itertools.islice(itertools.cycle(positions), num_positions))
