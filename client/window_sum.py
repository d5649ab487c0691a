"""The sum of one window: K micro-batches added into the vector, whatever goes wrong in between.

Faults are settled by doing the window again, never by patching: a backward pass that fails half-way
has added some layers and not others. A loss that is not finite is caught before its backward pass;
a gradient that is not finite, or an exception, empties the vector, the culprits are found by
bisection, and the window is summed again without them. After an allocation failure it is summed
again in micro-batches of half the size. What was left out is counted.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from client.micro_batches import Window, cut, seed_of
from client.workplace import Workplace
from common.errors import HeadwaterError, OutOfMemory, TaskError, TaskFailed
from common.task import Metrics, batch_of, loss_sum
from common.update import Plan, Step, StopReason

log = logging.getLogger(__name__)

Positions = tuple[int, ...]

RECENT_STEPS = 8  # the slowest of these says how long the next may take


@dataclass(kw_only=True, slots=True)
class WindowSum:
    """What was summed over one window; the vector itself is in the accumulator."""

    loss_sum: float = 0.0
    weight: int = 0
    metric_sums: Metrics = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    taken: list[Positions] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    micro_batch_size: int = 1
    reason: StopReason = "quota"

    @property
    def num_examples(self) -> int:
        return sum(len(positions) for positions in self.taken)


class _LossNotFinite(Exception):
    """Nothing was added."""


class _VectorSpoiled(Exception):
    """The vector holds garbage and must be emptied."""


def sum_window(plan: Plan, window: Window, place: Workplace, start_seconds: float) -> WindowSum:
    """Sum one window into the emptied accumulator; see the module's text for faults."""
    place.accumulator.zero()
    total = WindowSum(micro_batch_size=plan.micro_batch_size)
    queue = deque(cut(window.positions, plan.micro_batch_size))
    while queue:
        if total.taken and (reason := reason_to_stop(plan, total, place, start_seconds)):
            total.reason = reason
            # One that was refused before the window began again may lie behind the stop.
            reached = window.positions[: window.positions.index(queue[0][0])]
            total.refused = [p for p in total.refused if p in reached]
            break
        positions = queue.popleft()
        try:
            bad, is_spoiled = _add_or_blame(plan, window, positions, total, place)
        except MemoryError:
            size = max(len(positions) // 2, 1)
            if len(positions) == 1:
                raise OutOfMemory(
                    f"{place.name}, round {plan.round}: one example alone does not fit in memory"
                ) from None
            log.warning("memory ran out at micro-batches of %d: %d from here", len(positions), size)
            left = [p for group in (*total.taken, positions, *queue) for p in group]
            total = _begin_again(total, place, micro_batch_size=size)
            queue = deque(cut(left, size))
            continue
        good = tuple(p for p in positions if p not in bad)
        if is_spoiled:
            redo = [*total.taken, *([good] if good else []), *queue]
            total = _begin_again(total, place, refused=bad)
            queue = deque(redo)
        elif bad:
            total.refused += bad
            queue.extendleft([good] if good else [])
    place.accumulator.check_views()
    if total.refused:
        log.warning(
            "%s left out %d example(s) in round %d", place.name, len(total.refused), plan.round
        )
    return total


def _add_or_blame(
    plan: Plan, window: Window, positions: Positions, total: WindowSum, place: Workplace
) -> tuple[list[int], bool]:
    """Add one micro-batch, or return whom to leave out and whether the vector is spoiled.

    Raises:
        MemoryError: in the attempt, or in the search for the culprits.
    """
    try:
        _add(plan, window, positions, total, place)
    except _LossNotFinite:
        bad = _culprits(positions, lambda p: _loss_is_finite(plan, window, p, place))
        return bad or list(positions), False
    except _VectorSpoiled:
        # Clean alone, spoiled in the sum: it overflowed, and this micro-batch is to blame.
        bad = _culprits(positions, lambda p: _backward_is_finite(plan, window, p, place))
        return bad or list(positions), True
    return [], False


def _begin_again(
    total: WindowSum,
    place: Workplace,
    *,
    refused: Sequence[int] = (),
    micro_batch_size: int | None = None,
) -> WindowSum:
    place.accumulator.zero()
    return WindowSum(
        refused=[*total.refused, *refused],
        micro_batch_size=micro_batch_size or total.micro_batch_size,
    )


def reason_to_stop(
    plan: Plan, total: WindowSum, place: Workplace, start_seconds: float
) -> StopReason | None:
    """Stop when asked to, or when the next micro-batch would end after the deadline."""
    if place.stop():
        return "asked to stop"
    if plan.deadline_seconds is not None:
        next_end = (
            place.clock.seconds()
            - start_seconds
            + max(step.seconds for step in total.steps[-RECENT_STEPS:])
        )
        if next_end > plan.deadline_seconds:
            return "deadline"
    return None


def _add(
    plan: Plan, window: Window, positions: Positions, total: WindowSum, place: Workplace
) -> None:
    """Add one micro-batch to the accumulator and take note of it."""
    start_seconds = place.clock.seconds()
    place.memory.begin(len(positions))
    version = place.accumulator.values_P._version
    loss, weight, metrics = _forward(plan, window, positions, place)
    if place.accumulator.values_P._version != version:
        raise TaskError(
            "loss_sum changed the gradients of the model, and the sum so far is lost",
            remedy="leave zero_grad, backward and optimizers out of loss_sum",
        )
    loss_value = loss.item()
    if not math.isfinite(loss_value):
        raise _LossNotFinite
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TaskError(
                f"loss_sum gave {value} as the sum of the metric {name}",
                remedy="return sums of finite numbers as metrics",
            )
    _backward(loss)
    norm = place.accumulator.gradient_norm()
    if not math.isfinite(norm):
        raise _VectorSpoiled
    place.clock.worked(len(positions))
    total.loss_sum += loss_value
    total.weight += weight
    for name, value in metrics.items():
        total.metric_sums[name] = total.metric_sums.get(name, 0.0) + value
    total.taken.append(positions)
    total.steps.append(
        Step.model_construct(
            num_examples=len(positions),
            weight=weight,
            loss=loss_value / weight if weight else 0.0,
            gradient_norm=norm,
            seconds=place.clock.seconds() - start_seconds,
            peak_bytes=place.memory.end(len(positions)),
        )
    )


def _forward(
    plan: Plan, window: Window, positions: Positions, place: Workplace
) -> tuple[Tensor, int, Metrics]:
    """Sum the loss of a micro-batch, with random layers seeded by its first example.

    Raises:
        MemoryError: an allocation failed.
        _VectorSpoiled: the task raised an exception; the culprits are to be found.
    """
    seed = _layers_seed(plan.run_seed, window.epoch, place.name) + positions[0]
    torch.default_generator.manual_seed(seed)
    autocast = (
        torch.autocast("cpu", dtype=torch.bfloat16)
        if plan.precision == "bfloat16"
        else contextlib.nullcontext()
    )
    try:
        with autocast:
            return loss_sum(
                place.task, place.image.model, batch_of(place.task, place.examples, positions)
            )
    except (HeadwaterError, MemoryError):
        raise
    except Exception as error:
        raise _named(error) from error


@lru_cache(maxsize=64)
def _layers_seed(run_seed: int, epoch: int, name: str) -> int:
    return seed_of("layers", run_seed, epoch, name)


def _backward(loss: Tensor) -> None:
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except MemoryError:
        raise
    except Exception as error:
        raise _named(error) from error


def _named(error: Exception) -> Exception:
    """Tell an allocation failure, which torch raises as a RuntimeError, from any other."""
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return MemoryError(str(error))
    return _VectorSpoiled(f"{type(error).__name__}: {error}")


def _culprits(positions: Positions, is_clean: Callable[[Positions], bool]) -> list[int]:
    """Find by bisection the examples without which the rest is clean.

    If both halves are clean and the whole is not, the whole is to blame.
    """
    if is_clean(positions):
        return []
    if len(positions) == 1:
        return list(positions)
    middle = len(positions) // 2
    bad = [*_culprits(positions[:middle], is_clean), *_culprits(positions[middle:], is_clean)]
    return bad or list(positions)


def _loss_is_finite(plan: Plan, window: Window, positions: Positions, place: Workplace) -> bool:
    try:
        with torch.no_grad():
            return math.isfinite(_forward(plan, window, positions, place)[0].item())
    except _VectorSpoiled as error:
        log.debug("%s: an example failed: %s", place.name, error)
        return False


def _backward_is_finite(plan: Plan, window: Window, positions: Positions, place: Workplace) -> bool:
    """Try a forward and backward pass in the emptied vector."""
    place.accumulator.zero()
    try:
        loss, _, _ = _forward(plan, window, positions, place)
        _backward(loss)
    except _VectorSpoiled as error:
        log.debug("%s: an example failed: %s", place.name, error)
        return False
    return math.isfinite(place.accumulator.gradient_norm())


def check_works(plan: Plan, window: Window, place: Workplace) -> None:
    """Run examples of the window forward and backward, one by one, until one works.

    Raises:
        TaskFailed: every one raised; the exception of the last is its cause.
        OutOfMemory: one example alone does not fit.
    """
    failure: _VectorSpoiled | None = None
    try:
        for position in window.positions:
            place.accumulator.zero()
            try:
                loss, _, _ = _forward(plan, window, (position,), place)
                _backward(loss)
                return
            except _VectorSpoiled as error:
                failure = error
    except MemoryError:
        raise OutOfMemory(f"{place.name}: one example alone does not fit in memory") from None
    finally:
        place.accumulator.zero()
    tried = len(window.positions)
    raise TaskFailed(f"all of {tried} examples failed: {failure}") from failure
