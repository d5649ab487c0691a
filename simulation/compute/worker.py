"""Computes devices for the simulator, in a process of its own, by the device's own code.

It has a model of its own and loads each round's parameters from the simulator's. What it keeps from
order to order is a cache: the process may be killed at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.client.training.accumulator import Accumulator
from headwater.common.data.batches import UnsupportedBatch
from headwater.common.messages import Update
from headwater.common.system.heap import keep_freed_memory
from headwater.server.fleet import UpdateBlock
from headwater.simulation.compute.batched import BatchedCompute
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.compute.orders import (
    Order,
    PlainReport,
    Result,
    SumOrder,
    SumResult,
    TrainOrder,
    TrainResult,
    WorkerSettings,
    parts_of,
    plain_report,
)
from headwater.simulation.compute.report_columns import CohortReports
from headwater.simulation.fleet.devices import Devices


class Worker:
    """One process's devices and model."""

    def __init__(
        self, start: WorkerSettings, *, note_begun: Callable[[int], None] = lambda _: None
    ) -> None:
        """Load the task; ``note_begun`` is called with a device's number before its code runs."""
        torch.set_num_threads(start.settings.threads or 1)
        keep_freed_memory()
        self._devices = Devices(start.settings)
        self.image = self._devices.trainer.image
        self._one_by_one = OneByOne(self._devices, note_begun=note_begun)
        self._batched: BatchedCompute | None = None
        self._start = start
        self.vectors: list[Tensor] = []
        """The slots [P] that orders name."""
        self._accumulators: list[Accumulator] = []

    def adopt_frozen(self, read_only: Tensor, own: Tensor) -> None:
        """Take the server's frozen part, as bytes: to read, and a copy that may be written to."""
        assert self._start.frozen is not None
        self._devices.trainer.loaded_model.frozen_source = read_only, self._start.frozen
        self.image.adopt_frozen(own, self._start.frozen)

    def use(self, vectors: Sequence[Tensor]) -> None:
        """Sum into these slots from now on."""
        self.vectors = list(vectors)
        # Devices with parameters of their own are computed alone, and their vectors copied.
        own = [] if self.image.layout.num_local else self.vectors
        self._accumulators = [Accumulator(self.image, vector) for vector in own]

    def carry_out(self, order: Order, model: memoryview) -> Result:
        """Compute an order's devices on the model of this image."""
        return self._sum(order, model) if isinstance(order, SumOrder) else self._train(order, model)

    def _sum(self, order: SumOrder, model: memoryview) -> SumResult:
        try:
            if self._batched is None:
                self._batched = BatchedCompute(
                    self._devices, first=order.first, with_norms=order.with_norms
                )
            columns = order.planned
            self._batched.begin(columns, model, run_id=order.run_id)
            return self._batched.sums(columns)
        except UnsupportedBatch as error:
            return str(error)

    def _train(self, order: TrainOrder, model: memoryview) -> TrainResult:
        start = time.perf_counter()
        devices, clients = self._devices, order.clients
        checkpointed, parts = devices.trainer.checkpointed, parts_of(clients)
        devices.positions.store(parts, order.states)
        for name in order.checkpointed:
            checkpointed.add(name)
        replies: list[PlainReport | tuple[str, str] | None] = []
        blocks: list[CohortReports] = []
        sums: dict[int, dict[str, NDArray[np.float32]]] = {}
        accumulators = self._accumulators
        for reply in self._one_by_one.replies(
            clients,
            model,
            run_id=order.run_id,
            timeout_seconds=order.timeout_seconds,
            accumulators=[accumulators[slot] for slot in order.slots] if accumulators else None,
        ):
            if isinstance(reply, UpdateBlock):  # its vectors are in their slots
                assert isinstance(reply.reports, CohortReports)
                replies += [None] * len(reply.vectors)
                blocks.append(reply.reports.without_clients())
                continue
            if isinstance(reply, Update):
                slot = self.vectors[order.slots[len(replies)]]
                slot[: len(reply.values_P)].copy_(reply.values_P)  # some rounds ask for none
                if reply.sums:
                    sums[len(replies)] = {key: one.numpy() for key, one in reply.sums.items()}
                replies.append(plain_report(reply.report))
            else:
                replies.append((type(reply.error).__name__, reply.error.message))
        return TrainResult(
            states=devices.positions.states(parts),
            checkpointed=[client.name for client in clients if client.name in checkpointed],
            blocks=blocks,
            replies=replies,
            sums=sums,
            seconds=time.perf_counter() - start,
        )
