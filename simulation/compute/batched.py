"""Computes many devices in one pass: their summed gradient (fused), or each one's norms too.

With local steps each device has a row of parameters of its own in the pass, and takes its steps
beside the others' (``simulation.vectorised.stacked_steps``).

First the dry run predicts the examples that each device uses and the time it takes
(``simulation.compute.dry_run``); then the examples of all devices go through the model together.
A device is computed alone, by its own code, if it cannot be predicted, has more examples than fit
in a pass, or meets a loss or a gradient that is not finite: its own code finds the bad example.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headwater.common.data.batches import UnsupportedBatch
from headwater.common.errors import LateUpdate, WorkerDied
from headwater.common.messages import Update
from headwater.common.model.vectors import all_finite, zero_tensors
from headwater.common.task import tell_round
from headwater.common.terms import Terms
from headwater.server.fleet import Dropout, UpdateBlock
from headwater.simulation.compute.dry_run import predict_round
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.compute.report_columns import BlockSums
from headwater.simulation.fleet.devices import ClientPlan, ClientPlans, Compute, Devices
from headwater.simulation.fleet.position_columns import ranges
from headwater.simulation.vectorised.example_rows import ExampleRows, Rows
from headwater.simulation.vectorised.linear_layers import LinearLayers
from headwater.simulation.vectorised.passes import (
    Block,
    check_sums,
    check_vectors,
    checked_layers,
    sum_gradients,
    sum_with_layer_norms,
    sum_with_norms,
)
from headwater.simulation.vectorised.per_example import PerExampleModel
from headwater.simulation.vectorised.round_columns import Floats, RoundColumns

if TYPE_CHECKING:
    from headwater.common.flower.sent_model import SentModel
    from headwater.simulation.compute.orders import SumResult
    from headwater.simulation.compute.worker_pool import WorkerPool
    from headwater.simulation.vectorised.stacked_steps import StackedSteps

log = logging.getLogger(__name__)

# Activations that the examples of one pass may keep for the backward pass, and the most examples in
# a pass. Passes of 4,096 took 1.1 times as long as those of 16,384 with an MLP 64-128-10, and 1.2
# times with norms from its layers.
PASS_BYTES = 64 << 20
MAX_AT_ONCE = 1 << 14
# The most in a batch without vmap, whose passes cost less to begin: its activations stay in the
# processor's caches, and 15,000 digits took 0.92 times as long in batches of 4,096 as in one.
MAX_IN_BATCH = 1 << 12
# Examples of one block of devices, and their vectors or their copies of parameters.
MAX_ROWS = 1 << 14
VECTORS_BYTES = 16 << 20
# Of devices that take local steps together: parameters, gradients, state, and what a pass adds.
STACKED_BYTES = 64 << 20
# Of a larger model, reading each device's own parameters takes the time: local steps one by one
# took 2.9 times as long as in a pass with 9,610 parameters, 1.7 with 34,000 and 1.0 with 102,000.
MAX_STACKED_PARAMETERS = 1 << 16
# If fewer vectors fit, a micro-batch alone is enough work for a pass, and devices are computed one
# by one: for a transformer of 4.9M parameters that took 0.8 times as long as vmap over examples.
MIN_VECTORS = 16


class VectorsTooLarge(UnsupportedBatch):
    """Devices computed together would need as many passes as computed one by one."""


class BatchedCompute:
    """Computes the devices of a round together; see ``simulation.fleet.devices.Compute``."""

    def __init__(self, devices: Devices, *, first: int, with_norms: bool) -> None:
        """Test it on the first examples of device number ``first``.

        Raises:
            UnsupportedBatch: the task, its model or its batches cannot be computed together.
            VectorsTooLarge: each device needs a vector of its own, and few fit in memory.
        """
        self._first, self._with_norms = first, with_norms
        self._devices = devices
        self._pool: WorkerPool | None = None
        self._alone: Compute = OneByOne(devices)
        self._steps: StackedSteps | None = None
        trainer = devices.trainer
        self._examples = ExampleRows(trainer.task, most_held=devices.cache_size)
        self._model = PerExampleModel(trainer.task, trainer.image, self._examples)
        self._at_once = MAX_AT_ONCE
        memory_line = devices.hardware(first, round_number=1).memory.line
        if memory_line is not None and memory_line.each:
            self._at_once = int(min(max(PASS_BYTES / memory_line.each, 1), MAX_AT_ONCE))
        self._max_vectors = VECTORS_BYTES // (4 * trainer.image.layout.num_parameters)
        self._layers: LinearLayers | None = None
        self._test(first)
        # The rows of the test are all examples of a device, with those that it holds out.
        self._examples.drop()

    @property
    def num_nodes(self) -> int | None:
        """See ``Compute``."""
        return self._alone.num_nodes

    def share(self, pool: WorkerPool) -> None:
        """Let these processes compute the blocks, and the devices that are computed alone."""
        self._pool = self._alone = pool

    def close(self) -> None:
        """End the processes, if there are any."""
        if self._pool is not None:
            self._pool.close()

    def _test(self, first: int) -> None:
        """Compare the passes with the device's own code on the first examples of a device.

        Raises:
            UnsupportedBatch, VectorsTooLarge: see ``__init__``.
        """
        devices, trainer, with_norms = self._devices, self._devices.trainer, self._with_norms
        loss, rows, unused = check_sums(
            trainer, devices.identity(first), self._model, self._examples
        )
        if unused and (with_norms or devices.settings.local.is_on):
            name = trainer.image.layout.trainable[unused[0]].name
            raise UnsupportedBatch(
                f"no loss uses {name}, and without a pass of its own a device cannot tell that "
                f"from a gradient of zero"
            )
        if devices.settings.local.is_on:
            self._steps = self._checked_steps(rows)
            return
        if not with_norms:
            if self._model.takes_batches:
                self._at_once = min(self._at_once, MAX_IN_BATCH)
            return
        if devices.settings.plan.precision == "float32":
            self._layers = checked_layers(
                loss, self._model, rows, trainer.accumulator, max_bytes=VECTORS_BYTES
            )
        if self._layers is not None:
            copies_bytes = 4 * max(self._layers.num_others, 1)
            self._at_once = int(min(self._at_once, max(VECTORS_BYTES // copies_bytes, 1)))
        elif self._max_vectors < MIN_VECTORS:
            raise VectorsTooLarge(
                f"vectors of {trainer.image.layout.num_parameters:,} parameters are too large"
            )
        else:
            check_vectors(trainer, self._model, self._examples, rows)

    def _checked_steps(self, rows: Rows) -> StackedSteps:
        """Return the local steps of many devices, tested on some examples' rows.

        Raises:
            UnsupportedBatch, VectorsTooLarge: see ``__init__``.
        """
        devices, chosen = self._devices, self._devices.settings
        num_parameters = devices.trainer.image.layout.num_parameters
        if num_parameters > MAX_STACKED_PARAMETERS:
            raise VectorsTooLarge(
                f"local steps of {num_parameters:,} parameters are no faster in one pass"
            )
        from headwater.common.local_training.local_terms import local_terms
        from headwater.simulation.vectorised.stacked_steps import StackedSteps

        steps = StackedSteps(
            devices.trainer,
            self._examples,
            local_terms(chosen.local, chosen.plan),
            rate=chosen.local.rate,
            takes_batches=self._model.takes_batches,
        )
        self._max_vectors = STACKED_BYTES // steps.bytes_of_each
        if self._max_vectors < MIN_VECTORS:
            number = devices.trainer.image.layout.num_parameters
            raise VectorsTooLarge(
                f"the vectors of local steps of {number:,} parameters are too large"
            )
        steps.check(rows)
        return steps

    def train(
        self,
        clients: Sequence[ClientPlan],
        image: SentModel,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | UpdateBlock | Dropout]:
        """Yield the sums of the devices' updates, then the updates of devices computed alone."""
        foreseen, alone = self._split(clients)
        prediction = predict_round(self._devices, foreseen)
        yield from prediction.dropouts
        alone += prediction.alone
        columns = prediction.columns
        if timeout_seconds is not None:
            is_late = columns.seconds > timeout_seconds
            for at in np.flatnonzero(is_late).tolist():
                name = columns.clients[at].name
                seconds = columns.seconds[at]
                late = f"{name} took {seconds:.1f} s, the deadline is {timeout_seconds:.1f} s"
                yield Dropout(name=name, error=LateUpdate(late))
            columns = columns.some(np.flatnonzero(~is_late)) if is_late.any() else columns
        if self._layers is not None:  # all examples of a device are in one pass
            is_large = columns.num_examples > self._at_once
            alone += [columns.clients[at] for at in np.flatnonzero(is_large).tolist()]
            columns = columns.some(np.flatnonzero(~is_large)) if is_large.any() else columns
        if self._pool is None and len(columns):
            self.begin(columns, image.buffer(), run_id=run_id)
        blocks = list(self._blocks(columns))
        for block, sums in zip(blocks, self._sums_of(blocks, image, run_id), strict=True):
            if isinstance(sums, WorkerDied):
                yield from (Dropout(name=one.name, error=sums) for one in block.clients)
                continue
            update, rest = self._finite(block, sums, image, run_id)
            alone += rest
            if update is not None:
                yield update
        yield from self._alone.train(alone, image, run_id=run_id, timeout_seconds=timeout_seconds)

    def _sums_of(
        self, blocks: Sequence[RoundColumns], image: SentModel, run_id: int
    ) -> Iterator[SumResult | WorkerDied]:
        """Yield each block's sums, or why there are none."""
        if self._pool is None:
            yield from map(self._sums_here, blocks)
        else:
            yield from self._pool.sums(
                blocks, image, run_id=run_id, first=self._first, with_norms=self._with_norms
            )

    def _sums_here(self, block: RoundColumns) -> SumResult:
        try:
            return self.sums(block)
        except UnsupportedBatch as reason:  # on other numbers of examples than the self-test
            return str(reason)

    def begin(self, columns: RoundColumns, model: memoryview, *, run_id: int) -> None:
        """Load the model of a round's devices."""
        trainer, plan = self._devices.trainer, columns.clients[0].plan
        trainer.loaded_model.load(run_id, plan.model_version, model)
        tell_round(trainer.task, plan.round)

    def _split(self, clients: Sequence[ClientPlan]) -> tuple[ClientPlans, list[ClientPlan]]:
        """Separate the liars, and the devices whose plans' terms ask for more than a sum.

        Each of them needs a vector of its own.
        """
        devices, called = self._devices, ClientPlans.of(clients)
        is_alone = np.array(called.table.of_each(self._are_alone), dtype=np.bool_)
        if devices.has_liars:
            is_alone |= [
                bool(devices.falsifications(one.part, round_number=one.plan.round))
                for one in called
            ]
        if not is_alone.any():
            return called, []
        return called.some(np.flatnonzero(~is_alone)), [*called.some(np.flatnonzero(is_alone))]

    def _are_alone(self, terms: Mapping[str, Terms]) -> bool:
        """Whether a plan with these terms is carried out by the device's own code."""
        return any(
            one.why_alone is not None and not (one.has_columns and self._steps is not None)
            for one in terms.values()
        )

    def _blocks(self, columns: RoundColumns) -> Iterator[RoundColumns]:
        """Cut a cohort into blocks whose examples, and vectors if they have any, fit in memory."""
        has_vectors = self._with_norms and self._layers is None
        max_rows = self._at_once * 4 if has_vectors else MAX_ROWS
        num_vectors = columns.num_steps
        if self._steps is not None:  # devices of like numbers of steps together
            max_rows, num_vectors = MAX_ROWS, np.ones_like(num_vectors)
            columns = columns.some(np.argsort(-columns.num_local_steps, kind="stable"))
        limits = [(np.cumsum(columns.num_examples), max_rows)]
        if has_vectors:
            limits.append((np.cumsum(num_vectors), self._max_vectors))
        start = 0
        while start < len(columns):
            ends = [
                int(np.searchsorted(sums, most + (sums[start - 1] if start else 0), "right"))
                for sums, most in limits
            ]
            end = max(min(ends), start + 1)
            is_all = end - start == len(columns)
            yield columns if is_all else columns.some(np.arange(start, end))
            start = end

    def _finite(
        self, block: RoundColumns, sums: SumResult, image: SentModel, run_id: int
    ) -> tuple[UpdateBlock | None, list[ClientPlan]]:
        """Return a block's update, and the devices that are computed alone.

        Without those that are not finite the block is summed again.
        """
        rest: list[ClientPlan] = []
        while isinstance(sums, BlockSums):
            values_P, reports = torch.from_numpy(sums.values_P), sums.reports(block)
            bad = reports.is_not_finite
            if not bad.any() and not (all_finite(values_P) and self._is_known(values_P)):
                bad[:] = True
            if not bad.any():
                return UpdateBlock(vectors=[values_P], reports=reports), rest
            rest += [block.clients[at] for at in np.flatnonzero(bad).tolist()]
            if bad.all():
                return None, rest
            block = block.some(np.flatnonzero(~bad))
            if self._pool is not None:  # whose processes are at the blocks that follow
                self.begin(block, image.buffer(), run_id=run_id)
            sums = self._sums_here(block)
        log.info("%d devices are computed one by one: %s", len(block), sums)
        return None, rest + list(block.clients)

    def _is_known(self, values_P: Tensor) -> bool:
        """Whether the passes tell a gradient of zero from none at all; if not, devices' own do."""
        if not self._with_norms and self._steps is None:
            return True
        spans = self._devices.trainer.image.layout.spans
        return not zero_tensors(values_P, spans, range(len(spans)))

    def sums(self, columns: RoundColumns) -> BlockSums:
        """Return the sums of a block of devices, at the model that is loaded.

        Raises:
            UnsupportedBatch: its examples cannot go through the model together.
        """
        rows, precision = self._rows(columns), columns.clients[0].plan.precision
        if self._steps is not None:
            from headwater.common.local_training.terms import LocalPlan

            local = columns.clients[0].plan.of(LocalPlan)
            assert local is not None
            updates = self._steps.train(
                columns,
                rows,
                self._devices.trainer.image.values_P,
                rate=local.learning_rate,
                precision=precision,
                at_once=self._at_once,
            )
            # torch's sum would make a float64 copy of the whole matrix.
            values = np.add.reduce(updates.values_DP.numpy(), axis=0, dtype=np.float64)
            return BlockSums(
                values_P=values,
                rows=updates.sums,
                norms=updates.norms,
                update_norms=updates.update_norms,
            )
        block = Block(
            rows=rows,
            factors=self._factors(columns, rows, precision),
            sizes=columns.sizes,
            num_steps=columns.num_steps,
            precision=precision,
            at_once=self._at_once,
        )
        model, accumulator = self._model, self._devices.trainer.accumulator
        if not self._with_norms:
            values_P, sums, unused = sum_gradients(model, accumulator, block)
            return BlockSums(values_P=values_P.numpy(), rows=sums, is_ordered=False, unused=unused)
        if self._layers is None:
            values_P, sums, norms = sum_with_norms(model, block)
        else:
            values_P, sums, norms = sum_with_layer_norms(model, accumulator, self._layers, block)
        return BlockSums(values_P=values_P.numpy(), rows=sums, norms=norms)

    def _rows(self, block: RoundColumns) -> Rows:
        """Return the rows of a block's examples, in the order in which the devices use them.

        Without norms, a device that uses all its examples keeps the data's order: it saves time.
        """
        parts = block.parts.tolist()
        self._examples.make_room(parts)
        starts, devices = self._examples.starts, self._devices
        if not starts.keys() >= set(parts):
            for one in block.clients:
                if one.part not in starts:
                    self._examples.add(one.part, devices.training_examples(one.part, one.plan))
        starts_D = np.array([starts[part] for part in parts])
        counts = block.num_examples
        rows = ranges(starts_D, counts)
        is_permuted = np.ones(len(block), dtype=np.bool_) if self._with_norms else ~block.is_whole
        at = np.flatnonzero(is_permuted)
        rows[np.repeat(is_permuted, counts)] = np.repeat(
            starts_D[at], counts[at]
        ) + block.positions(at)
        return rows

    def _factors(self, block: RoundColumns, rows: Rows, precision: str) -> Floats | None:
        """Return the factor of each example's gradient if the plans set the devices' weights."""
        if not block.weigh_as[0]:
            return None
        counts = block.num_examples
        weights = np.concatenate(
            [
                self._model.weights(rows[start : start + self._at_once], precision)
                for start in range(0, len(rows), self._at_once)
            ]
        )
        summed = np.add.reduceat(weights, np.cumsum(counts) - counts)
        ratios = block.weigh_as / np.maximum(summed, 1.0)
        return np.repeat(ratios, counts)
