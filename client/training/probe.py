"""The probe: what micro-batches take of a device's time and memory, before the first plan.

The size grows from one example, doubling. Before each doubling the peak of the next size is
foreseen from those that were measured, and the probe stops short of the limit: a process that
overstepped a cgroup's would be killed, not told. Both seconds and bytes are lines in the size
(``common.stats.linear_fit``), as dispatch rules small models: one micro-batch of 15 takes 0.21 ms, three of 5
take 0.50 ms.

At each stage all sizes so far are timed in turn, so that a load that comes or goes slows all of
them alike. Memory is measured as it will be used: over several passes with different examples, as
the allocator's fragments raise the peak of a transformer's second pass by a tenth.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from headwater.client.memory.peak_model import PeakMeter, is_allocation_failure, resident_bytes
from headwater.client.training.context import TrainingContext
from headwater.client.training.probe_fit import (
    PROBE_SECONDS,
    ProbePoint,
    ProbeFit,
    predicted_bytes,
    reason_to_stop,
)
from headwater.common.data.additivity import usable
from headwater.common.data.batches import batch_of
from headwater.common.errors import HeadwaterError, OutOfMemory, TaskFailed
from headwater.common.system.heap import give_back
from headwater.common.task import loss_sum

log = logging.getLogger(__name__)

MAX_EXAMPLES = 256  # plan.max_micro_batch_size: the planner asks for no more

# At a stage the sizes are timed up to so many times, while that takes no longer than this.
MOST_TURNS, TURNS_SECONDS = 7, 0.1

# And at the end, while the probe has time left.
SETTLING_TURNS = 15

# A pass as short as this is run again at once: of the two, one may have been interrupted.
SHORT_SECONDS = 0.1


def probe(
    place: TrainingContext, limit_bytes: Callable[[], int | None], *, cores: float = math.inf
) -> ProbeFit:
    """Measure sizes 1, 2, 4 and so on, until ``reason_to_stop`` gives one or memory runs out.

    The gradients are left in the accumulator. ``cores`` is what the process may use in the long
    run: a cgroup lets short passes run at full speed, and makes up for it by pauses later.

    Raises:
        TaskFailed: none of the first examples can be trained on, or none of them twice.
        OutOfMemory: one example alone does not fit.
    """
    begun = time.perf_counter()
    place.image.model.train()
    try:
        positions = _working(place, together=1)
        rest_bytes = _rest_bytes()
        kept_bytes = float(_saved_bytes(place, positions[:1]))
    except MemoryError:
        raise _does_not_fit(place) from None
    points: tuple[ProbePoint, ...] = ()
    stopped = None
    while stopped is None:
        size = min(2 * points[-1].size, len(positions)) if points else 1
        try:
            points = _stage(place, positions, points, size, cores)
            if size == 2:
                kept_bytes = activation_bytes(place, positions)
        except MemoryError:
            if not points:
                raise _does_not_fit(place) from None
            stopped = f"memory ran out at {size} examples"
        except _ExamplesFailed as error:
            if len(set(positions)) == len(positions):
                # There is a bad one among them: go on with a few good ones, repeated.
                positions = _repeated(_usable(place, error), len(positions))
            elif points:
                stopped = f"good examples failed together: {error}"
            else:
                raise TaskFailed(f"examples cannot be trained on twice: {error}") from error
        else:
            stopped = reason_to_stop(
                points,
                num_examples=len(positions),
                foreseen_bytes=predicted_bytes(points, 2 * size, kept_bytes, rest_bytes),
                limit_bytes=limit_bytes(),
                seconds=time.perf_counter() - begun,
            )
    left = PROBE_SECONDS - (time.perf_counter() - begun)
    points = _settled(place, positions, points, left, cores)
    log.info("%s probed up to %d examples: %s", place.name, points[-1].size, stopped)
    return ProbeFit(points=points, rest_bytes=rest_bytes, kept_bytes=kept_bytes, stopped=stopped)


def _does_not_fit(place: TrainingContext) -> OutOfMemory:
    return OutOfMemory(f"{place.name}: one example alone does not fit in memory")


def activation_bytes(place: TrainingContext, positions: Sequence[int] | None = None) -> float:
    """Return the bytes that autograd keeps for one example more, from micro-batches of 1 and 2.

    Storages are counted once each, and the model's own parameters not at all.
    """
    some = (_working(place, together=2) if positions is None else positions)[:2]
    one, two = (_saved_bytes(place, part) for part in (some[:1], some))
    # Beside a longer one an example is padded, and two take more than twice as much as one.
    return float(max(min(two - one, two / 2), one / 2, 1))


class _ExamplesFailed(Exception):
    """The task raised an exception."""


def _stage(
    place: TrainingContext,
    positions: Sequence[int],
    before: Sequence[ProbePoint],
    size: int,
    cores: float,
) -> tuple[ProbePoint, ...]:
    """Measure a size beside the smaller ones: its peak, and the seconds of all of them anew.

    Raises:
        MemoryError: an allocation failed.
        _ExamplesFailed: the task raised an exception.
    """
    give_back()
    peak = PeakMeter()
    if before:
        _run(place, positions[:size])  # pages are taken, caches filled
    taken = _take_turns(
        place, positions, [*(p.size for p in before), size], MOST_TURNS, TURNS_SECONDS, cores
    )
    peaks = [*(p.peak_bytes for p in before), peak.peak_bytes()]
    return tuple(
        _point(one, taken[one], peak_bytes) for one, peak_bytes in zip(taken, peaks, strict=True)
    )


def _settled(
    place: TrainingContext,
    positions: Sequence[int],
    points: tuple[ProbePoint, ...],
    seconds: float,
    cores: float,
) -> tuple[ProbePoint, ...]:
    """Time all sizes anew with what is left of the probe's time; on a busy machine it takes that.

    If there is not enough of it, or the examples fail now, the points stay as they are.
    """
    if seconds < 2 * sum(p.usual_seconds for p in points):
        return points
    try:
        sizes = [p.size for p in points]
        taken = _take_turns(place, positions, sizes, SETTLING_TURNS, seconds, cores)
    except (MemoryError, _ExamplesFailed) as error:
        log.debug("%s: the sizes were not timed anew: %s", place.name, error)
        return points
    return tuple(_point(p.size, taken[p.size], p.peak_bytes) for p in points)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seconds:
    """Of one size's passes: the first of each turn, and the lesser where it was run again."""

    first: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)


def _point(size: int, seconds: _Seconds, peak_bytes: int) -> ProbePoint:
    return ProbePoint(
        size=size,
        seconds=statistics.median(seconds.least),
        usual_seconds=statistics.median(seconds.first),
        least_seconds=min(seconds.least),
        peak_bytes=peak_bytes,
    )


def _take_turns(
    place: TrainingContext,
    positions: Sequence[int],
    sizes: Sequence[int],
    most: int,
    seconds: float,
    cores: float,
) -> dict[int, _Seconds]:
    """Time the sizes in turn, on examples that are others each time; at least one turn.

    Raises:
        MemoryError, _ExamplesFailed: as ``_run``.
    """
    rounds = itertools.cycle(positions)
    taken = {size: _Seconds() for size in sizes}
    begun = time.perf_counter()
    for _ in range(most):
        for size, times in taken.items():
            some = list(itertools.islice(rounds, size))
            once = _timed(place, some, cores)
            again = _timed(place, some, cores) if once < SHORT_SECONDS else once
            times.first.append(once)
            times.least.append(min(once, again))
        if time.perf_counter() - begun > seconds:
            break
    return taken


def _timed(place: TrainingContext, positions: Sequence[int], cores: float) -> float:
    """Return a pass's seconds: by the wall, or what its CPU time takes in the long run, if more."""
    start, cpu_start = time.perf_counter(), time.process_time()
    _run(place, positions)
    cpu_seconds = time.process_time() - cpu_start
    return max(time.perf_counter() - start, cpu_seconds / cores)


def _run(place: TrainingContext, positions: Sequence[int]) -> None:
    try:
        batch = batch_of(place.task, place.examples, positions)
        loss, _, _ = loss_sum(place.task, place.image.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    except HeadwaterError:
        raise
    except Exception as error:
        if is_allocation_failure(error):
            raise MemoryError(str(error)) from error
        raise _ExamplesFailed(f"{type(error).__name__}: {error}") from error


def _working(place: TrainingContext, *, together: int) -> list[int]:
    """Return up to 256 positions from the whole of the data, of which the first ones work together.

    Spread out, as a folder may be sorted by size. Where the first ones fail, those of the first few
    examples that do not are repeated.

    Raises:
        TaskFailed: all of the first few fail.
        MemoryError: an allocation failed.
    """
    num_examples = len(place.examples)
    num_positions = min(num_examples, MAX_EXAMPLES)
    positions = [n * num_examples // num_positions for n in range(num_positions)]
    try:
        _run(place, positions[:together])
    except _ExamplesFailed as error:
        return _repeated(_usable(place, error), num_positions)
    return positions


def _usable(place: TrainingContext, error: _ExamplesFailed) -> list[int]:
    log.debug("%s: some examples failed: %s", place.name, error)
    found = usable(place.task, place.image.model, place.examples)
    place.accumulator.zero()  # the trial took the gradients out of the vector
    if not found:
        raise TaskFailed(f"none of the first examples can be trained on: {error}") from error
    return found


def _repeated(positions: Sequence[int], num_positions: int) -> list[int]:
    return list(itertools.islice(itertools.cycle(positions), num_positions))


def _rest_bytes() -> int:
    give_back()
    return resident_bytes()


def _saved_bytes(place: TrainingContext, positions: Sequence[int]) -> int:
    own = place.image.bytes_U8.untyped_storage().data_ptr()
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a node that held its own output would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sum(place.task, place.image.model, batch_of(place.task, place.examples, positions))
    return sum(storages.values())
