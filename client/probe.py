"""The probe: what micro-batches take of a device's time and memory, before the first plan.

The size grows from one example, doubling. Before each doubling the peak of the next size is
foreseen from those that were measured, and the probe stops short of the limit: a process that
overstepped a cgroup's would be killed, not told. Both seconds and bytes are lines in the size
(``common.line``), as dispatch rules small models: one micro-batch of 15 takes 0.21 ms, three of 5
take 0.50 ms.

At each stage all sizes so far are timed in turn, so that a load that comes or goes slows all of
them alike. Memory is measured as it will be used: over several passes with different examples, as
the allocator's fragments raise the peak of a transformer's second pass by a tenth.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from client.growth import Point, Probed, foreseen_bytes, reason_to_stop
from client.memory import PeakMemory, give_back, is_allocation_failure, resident_bytes
from client.workplace import Workplace
from common.additive import usable
from common.errors import HeadwaterError, OutOfMemory, TaskFailed
from common.task import batch_of, loss_sum

log = logging.getLogger(__name__)

MOST_EXAMPLES = 256  # plan.max_micro_batch_size: the planner asks for no more

# At a stage the sizes are timed up to so many times, while that takes no longer than this.
MOST_TURNS, TURNS_SECONDS = 7, 0.1

# A pass as short as this is run again at once: of the two, one may have been interrupted.
SHORT_SECONDS = 0.03


def probe(place: Workplace, limit_bytes: Callable[[], int | None]) -> Probed:
    """Measure sizes 1, 2, 4 and so on, until ``reason_to_stop`` gives one or memory runs out.

    The gradients are left in the accumulator.

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
    points: tuple[Point, ...] = ()
    stopped = None
    while stopped is None:
        size = min(2 * points[-1].size, len(positions)) if points else 1
        try:
            points = _stage(place, positions, points, size)
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
                foreseen_bytes=foreseen_bytes(points, 2 * size, kept_bytes, rest_bytes),
                limit_bytes=limit_bytes(),
                seconds=time.perf_counter() - begun,
            )
    log.info("%s probed up to %d examples: %s", place.name, points[-1].size, stopped)
    return Probed(points=points, rest_bytes=rest_bytes, kept_bytes=kept_bytes, stopped=stopped)


def _does_not_fit(place: Workplace) -> OutOfMemory:
    return OutOfMemory(f"{place.name}: one example alone does not fit in memory")


def activation_bytes(place: Workplace, positions: Sequence[int] | None = None) -> float:
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
    place: Workplace, positions: Sequence[int], before: Sequence[Point], size: int
) -> tuple[Point, ...]:
    """Measure a size beside the smaller ones: its peak, and the seconds of all of them anew.

    Raises:
        MemoryError: an allocation failed.
        _ExamplesFailed: the task raised an exception.
    """
    give_back()
    peak = PeakMemory()
    rounds = itertools.cycle(positions)
    sizes = [*(p.size for p in before), size]
    first: dict[int, list[float]] = {one: [] for one in sizes}
    least: dict[int, list[float]] = {one: [] for one in sizes}
    if before:
        _run(place, list(itertools.islice(rounds, size)))  # pages are taken, caches filled
    begun = time.perf_counter()
    for _ in range(MOST_TURNS):
        for one in sizes:
            some = list(itertools.islice(rounds, one))
            seconds = _timed(place, some)
            first[one].append(seconds)
            again = _timed(place, some) if seconds < SHORT_SECONDS else seconds
            least[one].append(min(seconds, again))
        if time.perf_counter() - begun > TURNS_SECONDS:
            break
    peaks = [*(p.peak_bytes for p in before), peak.peak_bytes()]
    return tuple(
        Point(
            size=one,
            seconds=statistics.median(least[one]),
            usual_seconds=statistics.median(first[one]),
            least_seconds=min(least[one]),
            peak_bytes=peak_bytes,
        )
        for one, peak_bytes in zip(sizes, peaks, strict=True)
    )


def _timed(place: Workplace, positions: Sequence[int]) -> float:
    start = time.perf_counter()
    _run(place, positions)
    return time.perf_counter() - start


def _run(place: Workplace, positions: Sequence[int]) -> None:
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


def _working(place: Workplace, *, together: int) -> list[int]:
    """Return up to 256 positions from the whole of the data, of which the first ones work together.

    Spread out, as a folder may be sorted by size. Where the first ones fail, those of the first few
    examples that do not are repeated.

    Raises:
        TaskFailed: all of the first few fail.
        MemoryError: an allocation failed.
    """
    num_examples = len(place.examples)
    num_positions = min(num_examples, MOST_EXAMPLES)
    positions = [n * num_examples // num_positions for n in range(num_positions)]
    try:
        _run(place, positions[:together])
    except _ExamplesFailed as error:
        return _repeated(_usable(place, error), num_positions)
    return positions


def _usable(place: Workplace, error: _ExamplesFailed) -> list[int]:
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


def _saved_bytes(place: Workplace, positions: Sequence[int]) -> int:
    own = place.image.bytes_U8.untyped_storage().data_ptr()
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sum(place.task, place.image.model, batch_of(place.task, place.examples, positions))
    return sum(storages.values())
