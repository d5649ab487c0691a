"""Sums the windows of devices whose work is foreseen, by the passes of a real device.

Steps, seconds and peaks of such devices are known before (``simulation.compute.dry_run``). What is
left is a device's own forward and backward passes, with its seeds, its batches and its checks; so
the vectors and losses have the wire's bits. Whatever a device would handle, such as an exception or
a vector that is not finite, is left to its own code: ``has_failed`` says for which devices.

For a small model the code of a device between its passes takes as long as the passes.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headwater.client.training.accumulator import Accumulator
from headwater.client.training.batch_fetch import batches_of
from headwater.client.training.gradient_pass import backward, checked_loss, layers_seed
from headwater.client.training.round import scale
from headwater.common.messages import Plan
from headwater.common.task import Metrics, loss_sum, tell_round
from headwater.simulation.compute.device_sums import StepSums
from headwater.simulation.compute.window_rows import BlockRows, WindowRows
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.position_columns import starts_of
from headwater.simulation.vectorised.round_columns import Bools, Floats, Ints, RoundColumns

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSums:
    """The sums of a block's devices, and the ``norms`` [S] of their vectors; NaN if not measured.

    Those of a device that ``has_failed`` [D] mean nothing, nor does its vector.
    """

    sums: StepSums
    norms: Floats
    has_failed: Bools


@dataclass(kw_only=True, slots=True)
class _Window:
    """One device's totals, and its steps so far."""

    loss: float = 0.0
    weight: int = 0
    metrics: Metrics = field(default_factory=dict)
    weights: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(self, loss: float, weight: int, metrics: Metrics) -> None:
        """Add a micro-batch, as ``client.training.window_sum`` does."""
        self.weights.append(weight)
        self.losses.append(loss)
        self.loss += loss
        self.weight += weight
        for name, metric in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + metric


class WindowPasses:
    """Sums windows into vectors, one device after another.

    Micro-batches are seeded only if the task draws random numbers: a block whose passes changed the
    state of torch's generator is summed again, and from then on each is seeded.
    """

    def __init__(self, devices: Devices, *, note_begun: Callable[[int], None]) -> None:
        """``note_begun`` is called with a device's number before its task's code runs."""
        self._devices = devices
        self._note_begun = note_begun
        self._rows = WindowRows(devices)
        self._draws = False

    def sum(
        self, planned: RoundColumns, positions: Ints, accumulators: Sequence[Accumulator]
    ) -> WindowSums:
        """Sum each device's window into an accumulator of its own.

        ``positions`` are the examples of all windows, one device after another.
        """
        image, generator = self._devices.trainer.image, torch.default_generator
        image.model.train()
        same = [*image.constants(), *image.trained]
        constants = [(tensor, tensor._version) for _, tensor in same]
        state, places = generator.get_state(), image.places()
        windows = self._windows(planned, positions, accumulators)
        if not self._draws and not torch.equal(state, generator.get_state()):
            self._draws = True
            windows = self._windows(planned, positions, accumulators)
        now = {id(tensor) for _, tensor in (*image.constants(), *image.trained)}
        image.check_places(places)
        image.check_still_frozen()
        if any(id(one) not in now or one._version != version for one, version in constants):
            windows = [None] * len(windows)
            self._devices.trainer.loaded_model.forget()
        return _joined(windows, planned.num_steps.tolist())

    def _windows(
        self, planned: RoundColumns, positions: Ints, accumulators: Sequence[Accumulator]
    ) -> list[_Window | None]:
        """Return each device's totals; None if it failed."""
        clients, counts = planned.clients, planned.num_examples
        rows: BlockRows | None = None
        with contextlib.suppress(Exception):  # a device cannot open its examples, see below
            rows = self._rows.of_block(clients, positions, counts)
        windows: list[_Window | None] = []
        start = first_step = 0
        sizes, epochs = planned.sizes.tolist(), planned.places.epoch.tolist()
        numbers = (counts.tolist(), planned.num_steps.tolist())
        for client, accumulator, epoch, num_examples, num_steps in zip(
            *(clients, accumulators, epochs), *numbers, strict=True
        ):
            own = slice(start, start + num_examples)
            steps = sizes[first_step : first_step + num_steps]
            self._note_begun(client.part)
            try:
                batches = (
                    self._batches(client, positions[own], steps)
                    if rows is None
                    else rows.batches(own.start, steps)
                )
                if self._draws:
                    batches = _seeded(batches, _seeds(client, epoch, positions[own], steps))
                tell_round(self._devices.trainer.task, client.plan.round)
                windows.append(self._summed(client.plan, accumulator, batches))
            except Exception as error:
                # Its own code finds the example, or says that there is none.
                log.debug("%s is computed alone: %s: %s", client.name, type(error).__name__, error)
                windows.append(None)
            start, first_step = own.stop, first_step + num_steps
        return windows

    def _batches(self, client: ClientPlan, positions: Ints, sizes: Sequence[int]) -> Iterator[Any]:
        examples = self._devices.training_examples(client.part, client.plan)
        return batches_of(self._devices.trainer.task, examples, positions, sizes)

    def _summed(self, plan: Plan, accumulator: Accumulator, batches: Iterator[Any]) -> _Window:
        """Sum one window as ``client.training.window`` does if nothing fails.

        Raises:
            Exception: something failed, as it would on the device, or the sum is not finite.
        """
        trainer, is_narrow = self._devices.trainer, plan.precision == "bfloat16"
        task, model, values_P = trainer.task, trainer.image.model, accumulator.values_P
        window = _Window()
        accumulator.zero()
        for batch in batches:
            num_changes = accumulator.num_changes
            if is_narrow:
                with torch.autocast("cpu", torch.bfloat16):
                    loss, weight, metrics = loss_sum(task, model, batch)
            else:
                loss, weight, metrics = loss_sum(task, model, batch)
            value = checked_loss(loss, metrics, accumulator, num_changes)
            backward(loss)
            # The gradient noise follows from the norms after the first step with weight, and after
            # the last.
            window.norms.append(math.nan if window.weight else _finite_norm(accumulator))
            window.add(value, weight, metrics)
        if math.isnan(window.norms[-1]):
            window.norms[-1] = _finite_norm(accumulator)
        accumulator.check_views()
        weigh_as = plan.weigh_as or window.weight
        if not window.weight or not scale(values_P, by=weigh_as, over=window.weight):
            raise ArithmeticError("the window has no weight, or its scaled sum overflows")
        return window


def _seeds(client: ClientPlan, epoch: int, positions: Ints, sizes: Sequence[int]) -> list[int]:
    """Return the seeds of a window's micro-batches (``client.training.gradient_pass``)."""
    seed = layers_seed(client.plan.run_seed, epoch, client.name)
    return [seed + first for first in positions[starts_of(np.array(sizes))].tolist()]


def _seeded(batches: Iterator[Any], seeds: Sequence[int]) -> Iterator[Any]:
    """Yield batches; each is read after its seed is set, as examples may draw numbers, too."""
    for seed in seeds:
        torch.default_generator.manual_seed(seed)
        yield next(batches)


def _finite_norm(accumulator: Accumulator) -> float:
    norm = accumulator.gradient_norm()
    if not math.isfinite(norm):
        raise ArithmeticError("the vector is not finite")
    return norm


def _joined(windows: Sequence[_Window | None], num_steps: Sequence[int]) -> WindowSums:
    """Return the windows' totals as columns; those of a failed window are ones."""
    found = next((window for window in windows if window is not None), None)
    names = list(found.metrics) if found is not None else []
    columns: list[_Window] = []
    has_failed = []
    for window, number in zip(windows, num_steps, strict=True):
        is_usable = window is not None and list(window.metrics) == names
        has_failed.append(not is_usable)
        if window is None or not is_usable:
            ones = [1.0] * number
            window = _Window(
                weight=1,
                metrics=dict.fromkeys(names, 0.0),
                weights=[1] * number,
                losses=ones,
                norms=ones,
            )
        columns.append(window)
    sums = StepSums(
        weight=np.array([window.weight for window in columns], dtype=np.float64),
        loss=np.array([window.loss for window in columns]),
        metrics={name: np.array([window.metrics[name] for window in columns]) for name in names},
        of_steps=(
            np.array([one for window in columns for one in window.weights], dtype=np.float64),
            np.array([one for window in columns for one in window.losses]),
        ),
    )
    norms = np.array([one for window in columns for one in window.norms])
    return WindowSums(sums=sums, norms=norms, has_failed=np.array(has_failed, dtype=np.bool_))
