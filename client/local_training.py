"""One round's work on a device: sum the gradients of K micro-batches, exactly.

Faults are settled by doing the window again, never by patching: a backward pass that fails half-way
has added some layers and not others. A loss that is not finite is caught before its backward pass;
a gradient that is not finite, or an exception, empties the vector, the culprits are found by
bisection, and the window is summed again without them. After an allocation failure it is summed
again in micro-batches of half the size. What was left out is counted in the report.

With ``local_steps > 1`` the device takes H steps of plain SGD on means of its own sums (McMahan et
al. 2017, algorithm 1) and sends weight x (parameters before - after), which the server treats as a
gradient.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from client.accumulator import Accumulator
from client.micro_batches import Window, cut, seed_of
from common.errors import (
    BuffersChanged,
    EmptyUpdate,
    HeadwaterError,
    OutOfMemory,
    TaskError,
    TaskFailed,
)
from common.parameters import ModelImage
from common.task import Examples, Metrics, Task, batch_of, loss_sum
from common.update import Plan, Step, StopReason, Update, UpdateReport

log = logging.getLogger(__name__)

Positions = tuple[int, ...]


class Clock(Protocol):
    """Time as the device sees it; a simulated device has one of its own."""

    def seconds(self) -> float:
        """Return seconds since an arbitrary start."""
        ...

    def worked(self, num_examples: int) -> None:
        """Take note that a micro-batch of this size was done."""
        ...


def _own_peak_bytes() -> int:
    with open("/proc/self/status") as status:
        rows = dict(line.split(":", 1) for line in status)
    return int(rows["VmHWM"].split()[0]) * 1024


# The peak is the process's in both; to read it for the thread alone waits for no other thread.
_RUSAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class PeakMemory:
    """The process's peak resident memory since ``reset``.

    Linux resets its mark when 5 is written to /proc/self/clear_refs; elsewhere the mark is that of
    the process's whole life. A process inherits the mark of the one that launched it as a floor
    under what ``getrusage`` tells; where that floor is above its own, /proc is read instead, which
    takes longer.
    """

    def __init__(self) -> None:
        self._clear: int | None = None
        self._is_floored = False
        with contextlib.suppress(OSError):
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            self.reset()
            self._is_floored = self.peak_bytes() > 1.1 * _own_peak_bytes()

    def reset(self) -> None:
        if self._clear is not None:
            os.pwrite(self._clear, b"5", 0)

    def peak_bytes(self) -> int:
        if self._is_floored:
            return _own_peak_bytes()
        return resource.getrusage(_RUSAGE).ru_maxrss * 1024

    def __del__(self) -> None:
        if self._clear is not None:
            os.close(self._clear)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workplace:
    """All that a device needs to work on a plan."""

    task: Task
    image: ModelImage
    accumulator: Accumulator
    examples: Examples
    name: str
    clock: Clock
    memory: PeakMemory
    stop: Callable[[], bool]


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


def train(plan: Plan, window: Window, place: Workplace) -> Update:
    """Sum the window's gradients and return the update, a view of the accumulator's vector.

    At the plan's deadline, or when asked to stop, it returns the k < K micro-batches that it has.

    Raises:
        EmptyUpdate: no example gave a finite loss and gradient.
        OutOfMemory: one example alone does not fit.
        BuffersChanged, TaskFailed, TaskError: see ``common.errors``.
    """
    start_seconds = place.clock.seconds()
    place.image.model.train()
    buffers = [(name, b, b._version) for name, b in place.image.model.named_buffers()]
    if plan.local_steps == 1:
        values_P, total = place.accumulator.values_P, sum_window(plan, window, place, start_seconds)
    else:
        values_P, total = take_local_steps(plan, window, place, start_seconds)
    now = dict(place.image.model.named_buffers())
    for name, buffer, version in buffers:
        if now.get(name) is not buffer or buffer._version != version:
            raise BuffersChanged(f"training changed the buffer {name}")
    if total.weight == 0:
        raise EmptyUpdate(
            f"{place.name}, round {plan.round}: none of {len(window.positions)} examples gave a "
            f"finite loss and gradient"
        )
    report = UpdateReport(
        name=place.name,
        round=plan.round,
        num_examples=total.num_examples,
        weight=total.weight,
        loss_sum=total.loss_sum,
        metric_sums=total.metric_sums,
        micro_batch_size=total.micro_batch_size,
        num_refused=len(total.refused),
        seconds=place.clock.seconds() - start_seconds,
        steps=tuple(total.steps),
        reason="epoch end" if total.reason == "quota" and window.ends_epoch else total.reason,
    )
    return Update(values_P=values_P, report=report)


def sum_window(plan: Plan, window: Window, place: Workplace, start_seconds: float) -> WindowSum:
    """Sum one window into the emptied accumulator; see the module's text for faults."""
    place.accumulator.zero()
    total = WindowSum(micro_batch_size=plan.micro_batch_size)
    queue = deque(cut(window.positions, plan.micro_batch_size))
    while queue:
        if total.taken and (reason := _reason_to_stop(plan, total, place, start_seconds)):
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


def take_local_steps(
    plan: Plan, window: Window, place: Workplace, start_seconds: float
) -> tuple[Tensor, WindowSum]:
    """Take H local steps and return weight x (before - after) with the totals of all steps."""
    image = place.image
    before_P = image.values_P.clone()
    optimizer = torch.optim.SGD(image.trainable(), lr=plan.local_learning_rate)
    size = math.ceil(plan.accumulation_steps / plan.local_steps) * plan.micro_batch_size
    total = WindowSum(micro_batch_size=plan.micro_batch_size)
    try:
        for positions in cut(window.positions, size):
            if total.taken and (reason := _reason_to_stop(plan, total, place, start_seconds)):
                total.reason = reason
                break
            part = Window(
                positions=positions,
                epoch=window.epoch,
                offset=window.offset + total.num_examples,
                ends_epoch=False,
            )
            done = sum_window(plan, part, place, start_seconds)
            if done.weight:
                place.accumulator.values_P.div_(done.weight)
                optimizer.step()
            total = _joined(total, done)
            if done.reason != "quota":
                break
        # The vector is free again: it takes the difference.
        values_P = torch.sub(before_P, image.values_P, out=place.accumulator.values_P)
        values_P.mul_(total.weight)
    finally:
        image.values_P.copy_(before_P)
    if not math.isfinite(float(values_P.abs().max())):
        raise EmptyUpdate(
            f"{place.name}, round {plan.round}: the local steps diverged",
            remedy="lower --local-learning-rate or --local-steps",
        )
    return values_P, total


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


def _joined(first: WindowSum, second: WindowSum) -> WindowSum:
    names = first.metric_sums.keys() | second.metric_sums.keys()
    return WindowSum(
        loss_sum=first.loss_sum + second.loss_sum,
        weight=first.weight + second.weight,
        metric_sums={
            n: first.metric_sums.get(n, 0.0) + second.metric_sums.get(n, 0.0) for n in sorted(names)
        },
        steps=first.steps + second.steps,
        taken=first.taken + second.taken,
        refused=first.refused + second.refused,
        micro_batch_size=second.micro_batch_size,
        reason=second.reason,
    )


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


def _reason_to_stop(
    plan: Plan, total: WindowSum, place: Workplace, start_seconds: float
) -> StopReason | None:
    """Stop when asked to, or when the next micro-batch would end after the deadline."""
    if place.stop():
        return "asked to stop"
    if plan.deadline_seconds is not None:
        next_end = place.clock.seconds() - start_seconds + total.steps[-1].seconds
        if next_end > plan.deadline_seconds:
            return "deadline"
    return None


def _add(
    plan: Plan, window: Window, positions: Positions, total: WindowSum, place: Workplace
) -> None:
    """Add one micro-batch to the accumulator and take note of it."""
    start_seconds = place.clock.seconds()
    place.memory.reset()
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
            peak_bytes=place.memory.peak_bytes(),
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
