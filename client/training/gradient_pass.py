"""One micro-batch: a forward and a backward pass into the vector, and whom to blame for a failure.

A loss that is not finite is caught before its backward pass. Behind a backward pass that raised, or
led to a gradient that is not finite, the vector is spoiled: some layers were added and others not.
The culprits are found by bisection, in passes whose gradients nobody wants.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.client.memory.activation_checkpointing import footprint_bytes, switch_on
from headwater.client.memory.peak_model import is_allocation_failure
from headwater.client.training.backward import run_backward
from headwater.client.training.context import Workplace
from headwater.client.training.micro_batches import Window, seed_of
from headwater.common.errors import HeadwaterError, OutOfMemory, TaskError, TaskFailed
from headwater.common.messages import Plan, Step
from headwater.common.task import Metrics, loss_sum

log = logging.getLogger(__name__)

Positions = tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Added:
    """What a micro-batch that is in the vector came to."""

    loss_sum: float
    metric_sums: Metrics
    step: Step


class LossNotFinite(Exception):
    """Nothing was added."""


class VectorSpoiled(Exception):
    """The vector holds garbage and must be emptied."""


def add(
    plan: Plan,
    window: Window,
    positions: Positions,
    place: Workplace,
    since_seconds: float,
) -> Added:
    """Add the gradients of one micro-batch to the vector; its seconds count from ``since_seconds``.

    Raises:
        LossNotFinite: nothing was added.
        VectorSpoiled: the task raised, or the vector is no longer finite.
        MemoryError: an allocation failed; the vector is spoiled.
        TaskError: the task breaks a rule.
    """
    num_examples, accumulator = len(positions), place.accumulator
    place.memory.begin(num_examples)
    version = accumulator.values_P._version
    loss, weight, metrics = _forward(plan, window, positions, place)
    if accumulator.values_P._version != version:
        raise TaskError(
            "loss_sum changed the gradients of the model, and the sum so far is lost",
            remedy="leave zero_grad, backward and optimizers out of loss_sum",
        )
    loss_value = loss.item()
    if not math.isfinite(loss_value):
        raise LossNotFinite
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TaskError(
                f"loss_sum gave {value} as the sum of the metric {name}",
                remedy="return sums of finite numbers as metrics",
            )
    _backward(loss)
    norm = accumulator.gradient_norm()
    if not math.isfinite(norm):
        raise VectorSpoiled
    place.clock.worked(num_examples)
    return Added(
        loss_sum=loss_value,
        metric_sums=metrics,
        step=Step(
            num_examples=num_examples,
            weight=weight,
            loss=loss_value / weight if weight else 0.0,
            gradient_norm=norm,
            peak_bytes=place.memory.end(num_examples),
            seconds=place.clock.seconds() - since_seconds,
        ),
    )


def _forward(
    plan: Plan, window: Window, positions: Positions, place: Workplace
) -> tuple[Tensor, int, Metrics]:
    """Sum the loss of a micro-batch, with random layers seeded by its first example.

    Raises:
        MemoryError: an allocation failed.
        VectorSpoiled: the task raised an exception; the culprits are to be found.
    """
    seed = _layers_seed(plan.run_seed, window.epoch, place.name) + positions[0]
    torch.default_generator.manual_seed(seed)
    try:
        if plan.precision == "bfloat16":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss_sum(place.task, place.image.model, place.batches.of(positions))
        return loss_sum(place.task, place.image.model, place.batches.of(positions))
    except (HeadwaterError, MemoryError):
        raise
    except Exception as error:
        raise _named(error) from error


@functools.lru_cache(maxsize=64)
def _layers_seed(run_seed: int, epoch: int, name: str) -> int:
    return seed_of("layers", run_seed, epoch, name)


def _backward(loss: Tensor) -> None:
    try:
        run_backward(loss)
    except (HeadwaterError, MemoryError):
        raise
    except Exception as error:
        raise _named(error) from error


def _named(error: Exception) -> Exception:
    if is_allocation_failure(error):
        return MemoryError(str(error))
    return VectorSpoiled(f"{type(error).__name__}: {error}")


def culprits_of_the_loss(
    plan: Plan, window: Window, positions: Positions, place: Workplace
) -> list[int]:
    """Return the examples whose loss is not finite, or all if none is to be found alone.

    Raises:
        MemoryError: an allocation failed in the search.
    """

    def is_clean(some: Positions) -> bool:
        try:
            with torch.no_grad():
                return math.isfinite(_forward(plan, window, some, place)[0].item())
        except VectorSpoiled as error:
            log.debug("%s: an example failed: %s", place.name, error)
            return False

    return _culprits(positions, is_clean) or list(positions)


def culprits_of_the_gradient(
    plan: Plan, window: Window, positions: Positions, place: Workplace
) -> list[int]:
    """Return the examples whose passes fail in the emptied vector; it is spoiled after that.

    Where all are clean alone the sum overflowed, and the whole micro-batch is to blame.

    Raises:
        MemoryError: an allocation failed in the search.
    """

    def is_clean(some: Positions) -> bool:
        place.accumulator.zero()
        try:
            loss, _, _ = _forward(plan, window, some, place)
            _backward(loss)
        except VectorSpoiled as error:
            log.debug("%s: an example failed: %s", place.name, error)
            return False
        return math.isfinite(place.accumulator.gradient_norm())

    return _culprits(positions, is_clean) or list(positions)


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


def check_works(plan: Plan, window: Window, place: Workplace) -> None:
    """Run examples of the window forward and backward, one by one, until one works.

    Where one alone does not fit, activation checkpointing is switched on and they are run again.

    Raises:
        TaskFailed: every one raised; the exception of the last is its cause.
        OutOfMemory: one example alone does not fit.
    """
    try:
        _try_one_by_one(plan, window, place)
    except MemoryError:
        if not switch_on(place.image.model):
            raise OutOfMemory(
                f"{place.name}: one example alone does not fit in memory, and the model has no "
                f"blocks to checkpoint"
            ) from None
    else:
        return
    place.memory.relieve(None)
    try:
        _try_one_by_one(plan, window, place)
    except MemoryError:
        raise OutOfMemory(
            f"{place.name}: one example alone does not fit in memory, not with activation "
            f"checkpointing either"
        ) from None
    log.warning("%s: one example fits only with activation checkpointing: it is on", place.name)


def _try_one_by_one(plan: Plan, window: Window, place: Workplace) -> None:
    failure: VectorSpoiled | None = None
    try:
        for position in window.positions:
            place.accumulator.zero()
            try:
                loss, _, _ = _forward(plan, window, (position,), place)
                _backward(loss)
                return
            except VectorSpoiled as error:
                failure = error
    finally:
        place.accumulator.zero()
    tried = len(window.positions)
    raise TaskFailed(f"all of {tried} examples failed: {failure}") from failure


def checkpointed_bytes(plan: Plan, window: Window, place: Workplace) -> float | None:
    """Foresee what one example takes with activation checkpointing, from the first that works.

    One forward pass, which takes less than one without checkpointing. None if there is nothing to
    checkpoint, or none of the window's examples works.
    """
    for position in window.positions:
        try:
            return footprint_bytes(
                place.image.model, functools.partial(_forward, plan, window, (position,), place)
            )
        except VectorSpoiled as error:
            log.debug("%s: an example failed: %s", place.name, error)
        except MemoryError:
            break
    return None
