"""Computes one device after another with the code of a real device, so the bits are the wire's.

A device's Python work takes two to four times as long after a forward and backward pass, which
fills the processor's caches with other data. So a few devices go through each stage together: all
are prepared, then each sums its window into a vector of its own, then all make their updates. Each
device computes the same numbers as it would alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from headwater.client.algorithms.lookup import algorithm_for
from headwater.client.compression.error_feedback import encoded_update
from headwater.client.device.interfaces import Hardware
from headwater.client.local_training.local_update import LocalSum, make_update
from headwater.client.trainer.left_out_log import LeftOutLog
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.batch_fetch import Batches
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import (
    ExampleOrder,
    Window,
    window,
    window_length,
)
from headwater.common.compression.model_difference import SentModel
from headwater.common.errors import EmptyUpdate, HeadwaterError, error_of, travelling
from headwater.common.messages import Plan, Update
from headwater.common.model.local_state import LocalState
from headwater.common.task import Examples
from headwater.server.fleet import Dropout
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.faults import falsify
from headwater.simulation.fleet.position_columns import NO_ROUND, Ints, PlaceColumns
from headwater.simulation.fleet.window_columns import window_positions
from headwater.simulation.vectorised.round_columns import samplers_of

log = logging.getLogger(__name__)

# Devices that go through the stages together, and the bytes of their vectors: these must stay in
# the processor's caches.
MAX_TOGETHER, TOGETHER_BYTES = 8, 512 << 10
# Devices whose examples are opened and whose permutations are drawn together.
MAX_DRAWN = 512


def next_window(devices: Devices, client: ClientPlan, num_examples: int) -> Window:
    """Return the examples that a device trains on next, out of ``num_examples``."""
    plan = client.plan
    return window(
        devices.positions[client.part].settle(plan.counted_round).place,
        quota=plan.quota,
        num_more=plan.max_examples - plan.quota,
        run_seed=plan.run_seed,
        name=client.name,
        num_examples=num_examples,
    )


def next_windows(devices: Devices, opened: Sequence[tuple[ClientPlan, Examples]]) -> list[Window]:
    """Return the ``next_window`` of each device, with the permutations drawn in columns."""
    if len(opened) == 1:  # in columns, one window takes 150 us instead of 25
        return [next_window(devices, client, len(examples)) for client, examples in opened]
    clients, plans = [one for one, _ in opened], [one.plan for one, _ in opened]
    parts = np.array([one.part for one in clients], dtype=np.int64)
    owned = np.array([len(examples) for _, examples in opened], dtype=np.int64)
    places = devices.positions.settle(parts, _counted_rounds(clients)).of_existing(owned)
    lengths = [
        window_length(plan.quota, plan.max_examples - plan.quota, number)
        for plan, number in zip(plans, owned.tolist(), strict=True)
    ]
    samplers = samplers_of(clients, owned)
    positions = iter(window_positions(samplers, places, np.array(lengths)).tolist())
    return [
        Window(
            positions=tuple(islice(positions, length)),
            place=place,
            order=ExampleOrder(client.plan.run_seed, client.name, len(examples)),
        )
        for place, length, (client, examples) in zip(places, lengths, opened, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenedClient:
    """A device with its examples, and its window of this round."""

    client: ClientPlan
    examples: Examples
    window: Window


@dataclass(frozen=True, kw_only=True, slots=True)
class _PreparedClient:
    """A device with its window's batches, and its hardware for this round."""

    opened: _OpenedClient
    batches: Batches
    hardware: Hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainedClient:
    """A device whose window is summed."""

    opened: _OpenedClient
    context: TrainingContext
    local: LocalState
    local_sum: LocalSum


class OneByOne:
    """Trains devices in their order; see ``simulation.fleet.devices.Compute``."""

    def __init__(
        self, devices: Devices, *, note_begun: Callable[[int], None] = lambda _: None
    ) -> None:
        """``note_begun`` is called with a device's number before its task's code runs."""
        self._devices = devices
        self._note_begun = note_begun
        self._accumulators: list[Accumulator] = []
        self._left_out_log = LeftOutLog()

    def train(
        self,
        clients: Sequence[ClientPlan],
        image: SentModel,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | Dropout]:
        """Yield each device's reply; its vector is valid until the next reply is requested."""
        yield from self.replies(clients, image.buffer(), run_id=run_id)

    def replies(
        self, clients: Sequence[ClientPlan], model: memoryview, *, run_id: int
    ) -> Iterator[Update | Dropout]:
        """Let devices carry out their plans on the model of this image, and store their positions.

        A vector is valid until the next reply is requested.
        """
        num_bytes = self._devices.trainer.image.layout.num_bytes
        at_once = max(min(TOGETHER_BYTES // num_bytes, MAX_TOGETHER), 1)
        for start in range(0, len(clients), MAX_DRAWN):
            opened = self._open(clients[start : start + MAX_DRAWN])
            for first in range(0, len(opened), at_once):
                yield from self._replies(opened[first : first + at_once], model, run_id=run_id)

    def _replies(
        self, opened: Sequence[_OpenedClient | Dropout], model: memoryview, *, run_id: int
    ) -> list[Update | Dropout]:
        """Let a few devices carry out their plans, and store their positions."""
        prepared = [one if isinstance(one, Dropout) else self._prepare(one) for one in opened]
        trained: list[_TrainedClient | Dropout] = []
        for one, accumulator in zip(prepared, self._some_accumulators(len(opened)), strict=True):
            if isinstance(one, Dropout):
                trained.append(one)
                continue
            version = one.opened.client.plan.model_version
            self._devices.trainer.loaded_model.load(run_id, version, model)
            trained.append(self._train(one, accumulator))
        replies = [one if isinstance(one, Dropout) else self._update(one) for one in trained]
        pairs = zip(trained, replies, strict=True)
        self._store_positions(
            [
                one
                for one, reply in pairs
                if isinstance(reply, Update) and not isinstance(one, Dropout)
            ]
        )
        return replies

    def _some_accumulators(self, number: int) -> list[Accumulator]:
        """Return this many vectors; the first is the trainer's own."""
        trainer = self._devices.trainer
        if not self._accumulators:
            self._accumulators = [trainer.accumulator]
        while len(self._accumulators) < number:
            self._accumulators.append(Accumulator(trainer.image))
        return self._accumulators[:number]

    def _open(self, clients: Sequence[ClientPlan]) -> list[_OpenedClient | Dropout]:
        """Open the devices' examples, and choose the windows of those that could open them."""
        examples: list[Examples | Dropout] = []
        for client in clients:
            self._note_begun(client.part)
            try:
                examples.append(self._devices.training_examples(client.part, client.plan))
            except Exception as error:
                examples.append(_dropout(client, error))
        pairs = list(zip(clients, examples, strict=True))
        opened = [(one, own) for one, own in pairs if not isinstance(own, Dropout)]
        windows = iter(next_windows(self._devices, opened))
        return [
            own
            if isinstance(own, Dropout)
            else _OpenedClient(client=client, examples=own, window=next(windows))
            for client, own in pairs
        ]

    def _prepare(self, one: _OpenedClient) -> _PreparedClient:
        """Fetch the examples of a device's window if they are few, and get its hardware."""
        client = one.client
        self._note_begun(client.part)
        batches = Batches(self._devices.trainer.task, one.examples)
        batches.begin(one.window.positions)
        try:
            batches.fetch()
        except Exception as error:
            # An example cannot be read; the micro-batch with it will fail, and name it.
            log.debug("%s: examples are fetched per micro-batch: %s", client.name, error)
        hardware = self._devices.hardware(client.part, round_number=client.plan.round)
        return _PreparedClient(opened=one, batches=batches, hardware=hardware)

    def _train(self, one: _PreparedClient, accumulator: Accumulator) -> _TrainedClient | Dropout:
        trainer, opened = self._devices.trainer, one.opened
        client = opened.client
        self._note_begun(client.part)
        try:
            context = trainer.context(
                opened.examples, client.name, one.hardware, accumulator, one.batches
            )
            store = self._devices.local_store(client.part)
            local = trainer.load_local(self._devices.identity(client.part), client.plan, store)
            algorithm = algorithm_for(
                client.plan, self._devices.settings.algorithm, name=client.name
            )
            local_sum = trainer.sum(client.plan, opened.window, context, algorithm=algorithm)
        except Exception as error:
            return _dropout(client, error)
        return _TrainedClient(opened=opened, context=context, local=local, local_sum=local_sum)

    def _update(self, one: _TrainedClient) -> Update | Dropout:
        """Return a device's update; an unusable window is skipped."""
        devices, client, window = self._devices, one.opened.client, one.opened.window
        part, plan = client.part, client.plan
        try:
            self._left_out_log.note(plan, one.local_sum.total, one.context)
            update = make_update(plan, window, one.context, one.local_sum)
            store = devices.local_store(part)
            if store is not None:
                local = one.local.pend(plan.round, one.local_sum.local_L)
                store.write(local, one.context.image.layout)
            update = self._as_sent(update, plan, part)
        except EmptyUpdate as error:
            settled = devices.positions[part].settle(plan.counted_round)
            place = window.after(len(window.positions))
            devices.positions[part] = replace(settled, place=place)
            return _dropout(client, error)
        except Exception as error:
            return _dropout(client, error)
        return update

    def _as_sent(self, update: Update, plan: Plan, part: int) -> Update:
        """Return a device's update as the server reads it: encoded and decoded, or falsified.

        Raises:
            NonFiniteUpdate, StateError: see ``encoded_update``; or the server would refuse it.
        """
        devices, values_P, coding = self._devices, update.values_P, plan.coding
        if coding is not None:
            _, data = encoded_update(update, plan, devices.error_feedback(part))
            coding.read(data, update.name, values_P.numel()).decode_into(values_P)
        faults = devices.falsifications(part, round_number=plan.round)
        if not faults:
            return update
        moment = devices.fleet.moment(part, round_number=plan.round)
        values_P = falsify(values_P, faults, moment)
        if coding is not None:
            data = coding.encode(values_P, update.name)
            values_P = coding.read(data, update.name, values_P.numel()).tensor()
        return replace(update, values_P=values_P)

    def _store_positions(self, updated: Sequence[_TrainedClient]) -> None:
        """Store the positions of devices that have made an update, all of one round."""
        if not updated:
            return
        clients, afters = [one.opened.client for one in updated], []
        for one in updated:
            window = one.opened.window
            is_whole = one.opened.client.plan.is_private_by_example  # as ``client.trainer`` passes
            used = window.positions if is_whole else one.local_sum.used
            afters.append(window.after_use_of(used))
        parts = np.array([client.part for client in clients], dtype=np.int64)
        positions = self._devices.positions
        positions.settle(parts, _counted_rounds(clients))
        places = PlaceColumns.of([one.opened.window.place for one in updated])
        positions.set_pending(parts, places, clients[0].plan.round, PlaceColumns.of(afters))


def _counted_rounds(clients: Sequence[ClientPlan]) -> Ints:
    return np.array([one.plan.counted_round or NO_ROUND for one in clients], dtype=np.int64)


def _dropout(client: ClientPlan, error: Exception) -> Dropout:
    if isinstance(error, HeadwaterError):
        return Dropout(name=client.name, error=error)
    log.error("the task or the device failed", exc_info=error)
    return Dropout(name=client.name, error=error_of(*travelling(error)))
