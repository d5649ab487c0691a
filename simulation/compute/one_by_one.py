"""One device after another, by the very code that runs on a real one: the same bits as the wire.

What a device does beside its forward and backward passes takes Python longer by as much as the
passes have put something else into the processor's caches: two to four times. So a few devices are
taken together: all of them are made ready, then each sums its window into a vector of its own, then
all tell of it. What each of them does, and with which numbers, is the same as if it were alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headwater.client.device.hardware import Hardware
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.batches import Batches
from headwater.client.training.context import Workplace
from headwater.client.training.local_update import Trained, told
from headwater.client.training.micro_batches import Place, Walk, Window
from headwater.common.errors import EmptyUpdate, HeadwaterError, error_of, travelling
from headwater.common.messages import Update
from headwater.common.model.parameters import ModelImage
from headwater.common.task import Examples
from headwater.server.fleet import Dropout, UpdateOfMany
from headwater.simulation.compute.window_columns import windows_of
from headwater.simulation.fleet.devices import Called, Devices
from headwater.simulation.fleet.faults import lie
from headwater.simulation.fleet.profiles import moment_of

log = logging.getLogger(__name__)

# Devices taken together, and what their vectors may take: they are to stay in the caches as well.
MOST_TOGETHER, TOGETHER_BYTES = 8, 512 << 10
# Devices whose windows are drawn together; the examples of all of them are opened for it.
MOST_DRAWN = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    """A device that is about to begin."""

    called: Called
    examples: Examples
    window: Window


@dataclass(frozen=True, kw_only=True, slots=True)
class _Equipped:
    """What a device works with in this round."""

    ready: _Ready
    machine: Hardware
    batches: Batches


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """A device that has summed its window."""

    ready: _Ready
    place: Workplace
    trained: Trained


class OneByOne:
    """Trains the called devices in their order."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._accumulators: list[Accumulator] = []

    def train(
        self,
        called: Sequence[Called],
        image: ModelImage,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | UpdateOfMany | Dropout]:
        """Yield each device's answer; its vector is valid until the next one is asked for."""
        model = image.buffer()
        for start in range(0, len(called), MOST_DRAWN):
            ready = self._ready(called[start : start + MOST_DRAWN])
            most = max(min(TOGETHER_BYTES // image.layout.num_bytes, MOST_TOGETHER), 1)
            for first in range(0, len(ready), most):
                yield from self._answers(ready[first : first + most], model, run_id=run_id)

    def answer(self, called: Called, model: memoryview, *, run_id: int) -> Update | Dropout:
        """Let one device work on its plan, and remember its place."""
        return self._answers(self._ready([called]), model, run_id=run_id)[0]

    def _ready(self, called: Sequence[Called]) -> list[_Ready | Dropout]:
        """Open the devices' examples and draw their windows; who has none to open drops out."""
        devices = self._devices
        examples: list[Examples | Dropout] = []
        for one in called:
            try:
                examples.append(devices.training_examples(one.part, one.plan))
            except Exception as error:
                examples.append(_dropout(one, error))
        there, owned = [], []
        for one, some in zip(called, examples, strict=True):
            if not isinstance(some, Dropout):
                there.append(one)
                owned.append(len(some))
        windows = iter(windows_of(there, devices.walks, np.array(owned, dtype=np.int64)))
        return [
            some
            if isinstance(some, Dropout)
            else _Ready(called=one, examples=some, window=next(windows))
            for one, some in zip(called, examples, strict=True)
        ]

    def _answers(
        self, ready: Sequence[_Ready | Dropout], model: memoryview, *, run_id: int
    ) -> list[Update | Dropout]:
        """Let a few devices work on their plans, and remember their places."""
        equipped = [one if isinstance(one, Dropout) else self._equipped(one) for one in ready]
        done: list[_Done | Dropout] = []
        for one, accumulator in zip(equipped, self._accumulators_of(len(ready)), strict=True):
            if isinstance(one, Dropout):
                done.append(one)
                continue
            version = one.ready.called.plan.model_version
            self._devices.resident.load_model(run_id, version, model)
            done.append(self._summed(one, accumulator))
        return [one if isinstance(one, Dropout) else self._told(one) for one in done]

    def _accumulators_of(self, number: int) -> list[Accumulator]:
        """Return so many vectors; the first is the resident's own."""
        resident = self._devices.resident
        if not self._accumulators:
            self._accumulators = [resident.accumulator]
        while len(self._accumulators) < number:
            self._accumulators.append(Accumulator(resident.image))
        return self._accumulators[:number]

    def _equipped(self, one: _Ready) -> _Equipped:
        """Give a device its hardware, and fetch its examples if they are few."""
        called = one.called
        batches = Batches(self._devices.resident.task, one.examples)
        batches.begin(one.window.positions)
        try:
            batches.fetch()
        except Exception as error:
            # One of the examples cannot be had; which one is found out when it is its turn.
            log.debug("%s: not fetched at once: %s", called.name, error)
        machine = self._devices.machine(called.part, round_number=called.plan.round)
        return _Equipped(ready=one, machine=machine, batches=batches)

    def _summed(self, one: _Equipped, accumulator: Accumulator) -> _Done | Dropout:
        resident, ready = self._devices.resident, one.ready
        called = ready.called
        try:
            place = resident.workplace(
                ready.examples, called.name, one.machine, accumulator, one.batches
            )
            trained = resident.sum(called.plan, ready.window, place)
        except Exception as error:
            return _dropout(called, error)
        return _Done(ready=ready, place=place, trained=trained)

    def _told(self, one: _Done) -> Update | Dropout:
        """Return a device's update, and remember its place; of nothing finite, the place behind."""
        devices, called, window = self._devices, one.ready.called, one.ready.window
        part, plan, num_owned = called.part, called.plan, len(one.ready.examples)
        try:
            update = told(plan, window, one.place, one.trained)
        except EmptyUpdate as error:
            devices.walks[part] = Walk(place=window.after(len(window.positions), num_owned))
            return _dropout(called, error)
        except Exception as error:
            return _dropout(called, error)
        num_taken = update.report.num_examples + update.report.num_refused
        devices.walks[part] = Walk(
            place=Place(epoch=window.epoch, offset=window.offset),
            pending_round=plan.round,
            pending_place=window.after(num_taken, num_owned),
        )
        lies = devices.lies(part, round_number=plan.round)
        if lies:
            moment = moment_of(devices.settings, part, round_number=plan.round)
            update = replace(update, values_P=lie(update.values_P, lies, moment))
        return update


def _dropout(called: Called, error: Exception) -> Dropout:
    if isinstance(error, HeadwaterError):
        return Dropout(name=called.name, error=error)
    log.error("the task or the device failed", exc_info=error)
    return Dropout(name=called.name, error=error_of(*travelling(error)))
