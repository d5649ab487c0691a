"""Computes one device after another by the passes of a real device, so the bits are the wire's.

Devices whose work is foreseen sum their windows in blocks: each into a vector of its own, with
nothing but passes in between (``simulation.compute.window_passes``). Their reports are columns. Any
other device runs its own code from the plan to the report: if it takes local steps, has parameters
or a compression of its own, lies, runs out of memory, or has an example that cannot be trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from headwater.client.features import algorithm_for, own_rounds
from headwater.client.training.accumulator import Accumulator
from headwater.common.errors import EmptyUpdate, HeadwaterError, error_of, travelling
from headwater.common.messages import Plan, Update
from headwater.server.aggregation.round_reports import in_all
from headwater.server.fleet import Dropout, UpdateBlock
from headwater.simulation.compute.dry_run import foreseen_alone
from headwater.simulation.compute.report_columns import CohortReports
from headwater.simulation.compute.window_passes import WindowPasses
from headwater.simulation.fleet.devices import ClientPlan, ClientPlans, Devices
from headwater.simulation.fleet.faults import falsify
from headwater.simulation.fleet.position_columns import ranges, starts_of
from headwater.simulation.vectorised.round_columns import Ints, RoundColumns

if TYPE_CHECKING:
    from headwater.common.flower.sent_model import SentModel
    from headwater.common.sums.encoded_vector import VectorCoding

log = logging.getLogger(__name__)

# Devices of a block, and the bytes of their vectors: these should stay in the processor's caches.
MAX_TOGETHER, TOGETHER_BYTES = 64, 1 << 20


class OneByOne:
    """Trains devices in their order; see ``simulation.fleet.devices.Compute``."""

    num_nodes = None

    def __init__(
        self, devices: Devices, *, note_begun: Callable[[int], None] = lambda _: None
    ) -> None:
        """``note_begun`` is called with a device's number before its task's code runs."""
        self._devices = devices
        self._note_begun = note_begun
        self._passes = WindowPasses(devices, note_begun=note_begun)
        self._accumulators: list[Accumulator] = []

    def train(
        self,
        clients: Sequence[ClientPlan],
        image: SentModel,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | UpdateBlock | Dropout]:
        """Yield the devices' replies; the vectors are valid until the next reply is requested."""
        yield from self.replies(
            clients, image.buffer(), run_id=run_id, timeout_seconds=timeout_seconds
        )

    def close(self) -> None:
        """End nothing: it computes in this process."""

    def replies(
        self,
        clients: Sequence[ClientPlan],
        model: memoryview,
        *,
        run_id: int,
        timeout_seconds: float | None,
        accumulators: Sequence[Accumulator] | None = None,
    ) -> Iterator[Update | UpdateBlock | Dropout]:
        """Let devices carry out their plans on the model of this image, and store their positions.

        The replies are in the devices' order; see ``train``. The vectors of a series are those of
        the devices' ``accumulators`` if there are some.
        """
        columns = foreseen_alone(self._devices, clients, timeout_seconds=timeout_seconds)
        positions = columns.positions(np.arange(len(columns)))
        starts, counts = starts_of(columns.num_examples), columns.num_examples
        row_of = {part: row for row, part in enumerate(columns.parts.tolist())}
        clients = ClientPlans.of(clients)
        rows = list(map(row_of.get, clients.parts.tolist()))
        for block in _blocks(rows, self._at_once):
            first = clients[block.start]
            # Training of the device before may have changed what must stay as it was sent.
            self._devices.trainer.loaded_model.load(run_id, first.plan.model_version, model)
            if rows[block.start] is None:
                yield self._alone(first)
                continue
            at = np.array(rows[block])
            own = positions[ranges(starts[at], counts[at])]
            vectors = (
                self._some_accumulators(len(at)) if accumulators is None else accumulators[block]
            )
            for reply in self._series(columns.some(at), own, vectors):
                if isinstance(reply, ClientPlan):
                    self._devices.trainer.loaded_model.load(run_id, reply.plan.model_version, model)
                    yield self._alone(reply)
                else:
                    yield reply

    @property
    def _at_once(self) -> int:
        num_bytes = self._devices.trainer.image.layout.num_bytes
        return max(min(TOGETHER_BYTES // num_bytes, MAX_TOGETHER), 1)

    def _series(
        self, planned: RoundColumns, positions: Ints, accumulators: Sequence[Accumulator]
    ) -> Iterator[UpdateBlock | ClientPlan]:
        """Sum the windows of a block; yield the updates, and the devices that must do it alone."""
        self._devices.trainer.checkpointed.set_up(planned.clients[0].name)
        found = self._passes.sum(planned, positions, accumulators)
        vectors = [accumulator.values_P for accumulator in accumulators]
        done = zip(accumulators, found.has_failed.tolist(), strict=False)
        reports = CohortReports(
            planned=planned,
            sums=found.sums,
            norms=found.norms,
            unused=in_all([accumulator.unused() for accumulator, failed in done if not failed]),
            are_summed=False,
        )
        if not found.has_failed.any():
            yield UpdateBlock(vectors=vectors, reports=reports)
            return
        ends = np.flatnonzero(found.has_failed).tolist()
        for start, end in zip([0, *(end + 1 for end in ends)], [*ends, len(planned)], strict=True):
            if end > start:
                some = reports.some(np.arange(start, end))
                yield UpdateBlock(vectors=vectors[start:end], reports=some)
            if end < len(planned):
                yield planned.clients[end]

    def _some_accumulators(self, number: int) -> list[Accumulator]:
        """Return this many vectors; a single one is the trainer's own, which is never one of many.

        So a device of a block may be computed alone before the block's other vectors are read.
        """
        trainer = self._devices.trainer
        if self._at_once == 1:
            return [trainer.accumulator]
        while len(self._accumulators) < number:
            self._accumulators.append(Accumulator(trainer.image))
        return self._accumulators[:number]

    def _alone(self, client: ClientPlan) -> Update | Dropout:
        """Let a device carry out its plan by its own code, and store its position."""
        devices, trainer = self._devices, self._devices.trainer
        part, plan = client.part, client.plan
        identity, sampler = devices.identity(part), devices.positions[part]
        self._note_begun(part)
        try:
            own = own_rounds(plan, devices.settings, partial(devices.feature_store, part))
            update, moved = trainer.train(
                identity,
                devices.hardware(part, round_number=plan.round),
                plan,
                sampler,
                algorithm=algorithm_for(plan, devices.settings.algorithm, name=client.name),
                store=devices.local_store(part),
                more=own,
            )
            num_values = trainer.image.layout.num_parameters
            update = update.as_sent(plan, num_values=num_values)
            for one in own:
                one.keep()
            update = self._as_sent(update, plan, part)
        except EmptyUpdate as error:
            devices.positions[part] = trainer.skip(identity, plan, sampler).passed()
            return _dropout(client, error)
        except Exception as error:
            return _dropout(client, error)
        devices.positions[part] = moved
        return update

    def _as_sent(self, update: Update, plan: Plan, part: int) -> Update:
        """Return a device's update as the server reads it: encoded and decoded, or falsified.

        Raises:
            NonFiniteUpdate, StateError: see ``encoded_update``; or the server would refuse it.
        """
        devices, values_P, coding = self._devices, update.values_P, plan.coding
        if coding is not None:
            data = self._encoded(update, plan, coding, part)
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

    def _encoded(self, update: Update, plan: Plan, coding: VectorCoding, part: int) -> bytearray:
        if "compression" not in plan.terms:  # a coding of the user's
            return coding.encode(update.values_P, update.name)
        from headwater.client.compression.error_feedback import encoded_update

        return encoded_update(update, plan, self._devices.error_feedback(part))[1]


def _blocks(rows: Sequence[int | None], at_once: int) -> Iterator[slice]:
    """Cut a row of devices into blocks of those that are foreseen; any other is alone."""
    start = 0
    for end, row in enumerate(rows):
        if row is None or end - start == at_once:
            if end > start:
                yield slice(start, end)
            start = end
        if row is None:
            yield slice(end, end + 1)
            start = end + 1
    if start < len(rows):
        yield slice(start, len(rows))


def _dropout(client: ClientPlan, error: Exception) -> Dropout:
    if isinstance(error, HeadwaterError):
        return Dropout(name=client.name, error=error)
    log.error("the task or the device failed", exc_info=error)
    return Dropout(name=client.name, error=error_of(*travelling(error)))
