"""A process that computes devices for the simulator, one after another, by the device's own code.

It has a model of its own and loads each round's parameters from shared memory. An order names some
devices, their plans and their positions; the result has the reports, the new positions, and the
vectors in slots of shared memory. Nothing else about a device depends on the process that computes
it. The process may be killed at any time, and ends when the simulator closes its pipe or ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.client.training.accumulator import Accumulator
from headwater.common.messages import Step, Update, UpdateReport
from headwater.common.model.frozen_part import Fingerprint
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.common.system.console import start_log
from headwater.common.system.heap import (
    freeze_loaded_objects,
    keep_freed_memory,
    rare_collections,
)
from headwater.common.system.lasting_output import lasting_output
from headwater.common.system.portability import PipeEnd
from headwater.server.fleet import UpdateBlock
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.compute.report_columns import CohortReports
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.position_columns import Ints, StateColumns

ALIGNMENT_BYTES = 64  # a cache line


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """The first message to a worker."""

    settings: Settings
    number: int
    num_workers: int
    num_slots: int
    is_verbose: bool
    frozen: Fingerprint | None = None
    """Of the frozen part in shared memory; None if the worker's own is the server's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOrder:
    """A piece of a round: devices to compute; their vectors go into ``slots``."""

    clients: list[ClientPlan]
    slots: list[int]
    run_id: int
    timeout_seconds: float | None
    states: StateColumns
    checkpointed: list[str]
    """Those of the devices that recompute activations."""


def parts_of(clients: Sequence[ClientPlan]) -> Ints:
    """Return the devices' numbers."""
    return np.array([client.part for client in clients], dtype=np.int64)


PlainReport = dict[str, Any]
"""The fields of an ``UpdateReport``, with tuples for its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """A computed piece: of each device its report, or the name and message of an error.

    The reports of foreseen devices are in ``blocks``, without the devices; ``replies`` has None for
    each of them, in the order of the blocks. Their vectors were summed in their slots. ``seconds``
    is what the piece took.
    """

    states: StateColumns
    checkpointed: list[str]
    blocks: list[CohortReports]
    replies: list[PlainReport | tuple[str, str] | None]
    sums: dict[int, dict[str, NDArray[np.float32]]]
    """The sums beside the model's, by the reply's place; none of most plans."""
    seconds: float


STEP_FIELDS = tuple(one.name for one in fields(Step))
_values_of_step = attrgetter(*STEP_FIELDS)


def plain_report(report: UpdateReport) -> PlainReport:
    """Return a report in a form that takes a tenth of the time to pickle."""
    return {**dict(report), "steps": [_values_of_step(step) for step in report.steps]}


def report_of(plain: PlainReport) -> UpdateReport:
    """Return the report that was made plain."""
    steps = tuple(Step(**dict(zip(STEP_FIELDS, values, strict=True))) for values in plain["steps"])
    return UpdateReport(**{**plain, "steps": steps})


class SharedVectors:
    """The model's image [bytes], its frozen part and ``num_slots`` float32 vectors [P], as views.

    ``begun`` [workers] has the number of the device that each worker is at.

    The memory is a file without a name, which goes with the last process that maps it. With
    ``memfd_create`` no limit of /dev/shm applies (a container has 64 MB), as it does to
    ``multiprocessing.shared_memory`` and torch's shared tensors. Where no descriptor can be passed
    to a new process, as on Windows, it is a temporary file with a name. Nothing is locked: the
    messages between the processes settle which of them may write.
    """

    def __init__(
        self, layout: ModelLayout, num_slots: int, num_workers: int, descriptor: int
    ) -> None:
        """Map the file of this descriptor, which is empty if it is new."""
        image_bytes, slot_bytes = _aligned(layout.num_bytes), _aligned(4 * layout.num_parameters)
        vectors_bytes = image_bytes + num_slots * slot_bytes
        begun_at = vectors_bytes + _aligned(layout.num_frozen_bytes)
        num_bytes = begun_at + 8 * num_workers
        if os.fstat(descriptor).st_size < num_bytes:
            os.ftruncate(descriptor, num_bytes)
        self._map = mmap.mmap(descriptor, num_bytes)
        self.image = memoryview(self._map)[: layout.num_bytes]
        self.slots: list[Tensor] = [
            torch.frombuffer(
                self._map,
                dtype=torch.float32,
                count=layout.num_parameters,
                offset=image_bytes + at * slot_bytes,
            )
            for at in range(num_slots)
        ]
        self.begun: Ints = np.frombuffer(self._map, np.int64, num_workers, begun_at)
        self._frozen_at, self._num_frozen_bytes = vectors_bytes, layout.num_frozen_bytes
        self._descriptor = descriptor

    def frozen(self, *, is_private: bool) -> Tensor:
        """Return the frozen part; what is written to a private one stays in this process."""
        memory = self._map
        if is_private:
            memory = mmap.mmap(self._descriptor, len(self._map), access=mmap.ACCESS_COPY)
        return torch.frombuffer(
            memory, dtype=torch.uint8, count=self._num_frozen_bytes, offset=self._frozen_at
        )


def unnamed_file() -> int:
    """Open a new file without a name; return its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor: int = os.memfd_create("headwater")
        return descriptor
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT_BYTES


def work(connection: PipeEnd, descriptor: int, start: WorkerSettings) -> None:
    """Carry out orders until the simulator closes the pipe.

    Raises:
        EOFError: the pipe was closed.
    """
    torch.set_num_threads(start.settings.threads or 1)
    keep_freed_memory()
    devices = Devices(start.settings)
    image = devices.trainer.image
    shared = SharedVectors(image.layout, start.num_slots, start.num_workers, descriptor)
    if start.frozen is not None:
        devices.trainer.loaded_model.frozen_source = shared.frozen(is_private=False), start.frozen
        image.adopt_frozen(shared.frozen(is_private=True), start.frozen)
    one_by_one = OneByOne(devices, note_begun=partial(shared.begun.__setitem__, start.number))
    # Devices with parameters of their own are computed alone, and their vectors copied.
    slots = [] if image.layout.num_local else shared.slots
    accumulators = [Accumulator(image, slot) for slot in slots]
    freeze_loaded_objects()
    with rare_collections():
        for order in _orders(connection):
            connection.send(_carried_out(order, devices, one_by_one, shared, accumulators))


def _orders(connection: PipeEnd) -> Iterator[TrainOrder]:
    """Yield the simulator's orders, which a thread receives as they come.

    Without the thread, both processes would wait for ever if the simulator sent an order while this
    process sent a result, and neither fitted into the pipe (about 200 KB).

    Raises:
        EOFError: the pipe was closed.
    """
    received: SimpleQueue[TrainOrder | Exception] = SimpleQueue()

    def receive() -> None:
        try:
            while True:
                received.put(connection.recv())
        except Exception as error:
            received.put(error)

    threading.Thread(target=receive, daemon=True).start()
    while not isinstance(order := received.get(), Exception):
        yield order
    raise order


def _carried_out(
    order: TrainOrder,
    devices: Devices,
    one_by_one: OneByOne,
    shared: SharedVectors,
    accumulators: Sequence[Accumulator],
) -> TrainResult:
    start = time.perf_counter()
    checkpointed, parts = devices.trainer.checkpointed, parts_of(order.clients)
    devices.positions.store(parts, order.states)
    for name in order.checkpointed:
        checkpointed.add(name)
    replies: list[PlainReport | tuple[str, str] | None] = []
    blocks: list[CohortReports] = []
    sums: dict[int, dict[str, NDArray[np.float32]]] = {}
    for reply in one_by_one.replies(
        order.clients,
        shared.image,
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
            slot = order.slots[len(replies)]
            shared.slots[slot].copy_(reply.values_P)
            if reply.sums:
                sums[len(replies)] = {key: one.numpy() for key, one in reply.sums.items()}
            replies.append(plain_report(reply.report))
        else:
            replies.append((type(reply.error).__name__, reply.error.message))
    return TrainResult(
        states=devices.positions.states(parts),
        checkpointed=[client.name for client in order.clients if client.name in checkpointed],
        blocks=blocks,
        replies=replies,
        sums=sums,
        seconds=time.perf_counter() - start,
    )


def main() -> None:
    """Work for the process that started this one, on the descriptors that it names."""
    # Imported here: Windows has no such class, and starts its workers by ``run_spawned``.
    from multiprocessing.connection import Connection

    _run(Connection(int(sys.argv[1])), int(sys.argv[2]))


def run_spawned(connection: PipeEnd, path: Path) -> None:
    """Work for the process that spawned this one, in the memory of this file."""
    _run(connection, os.open(path, os.O_RDWR))


def _run(connection: PipeEnd, descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the simulator ends this process
    os.dup2(2, 1)  # what a task prints must not mix with the simulator's output
    try:
        start: WorkerSettings = connection.recv()
        with lasting_output():
            start_log(verbose=start.is_verbose)
            work(connection, descriptor, start)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logging.getLogger(__name__).debug("the simulator has ended")
    finally:
        connection.close()
