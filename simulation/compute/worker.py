"""A process that computes devices for the simulator, one after another, by the device's own code.

It has a model of its own and loads each round's parameters from shared memory. An order names a
device, its plan and its position; the result has the report, the new position, and the vector in a
slot of shared memory. Nothing else about a device depends on the process that computes it. The
process may be killed at any time, and ends when the simulator closes its pipe or ends.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwater.client.training.sampler import SamplerState
from headwater.common.messages import Update, UpdateReport
from headwater.common.model.frozen_part import Fingerprint
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.common.system.console import start_log
from headwater.common.system.heap import keep_freed_memory
from headwater.common.system.portability import PipeEnd
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.fleet.devices import ClientPlan, Devices

ALIGNMENT_BYTES = 64  # a cache line


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """The first message to a worker."""

    settings: Settings
    num_slots: int
    is_verbose: bool
    frozen: Fingerprint | None = None
    """Of the frozen part in shared memory; None if the worker's own is the server's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOrder:
    """A device to compute; its vector goes into ``slot``."""

    client: ClientPlan
    slot: int
    run_id: int
    position: SamplerState
    is_checkpointed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """A computed device: its report, or the name and message of an error."""

    position: SamplerState
    is_checkpointed: bool
    report: UpdateReport | None = None
    error: tuple[str, str] | None = None


class SharedVectors:
    """The model's image [bytes], its frozen part and ``num_slots`` float32 vectors [P], as views.

    The memory is a file without a name, which goes with the last process that maps it. With
    ``memfd_create`` no limit of /dev/shm applies (a container has 64 MB), as it does to
    ``multiprocessing.shared_memory`` and torch's shared tensors. Where no descriptor can be passed
    to a new process, as on Windows, it is a temporary file with a name. Nothing is locked: the
    messages between the processes settle which of them may write.
    """

    def __init__(self, layout: ModelLayout, num_slots: int, descriptor: int) -> None:
        """Map the file of this descriptor, which is empty if it is new."""
        image_bytes, slot_bytes = _aligned(layout.num_bytes), _aligned(4 * layout.num_parameters)
        vectors_bytes = image_bytes + num_slots * slot_bytes
        num_bytes = vectors_bytes + layout.num_frozen_bytes
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
    trainer, one_by_one = devices.trainer, OneByOne(devices)
    shared = SharedVectors(trainer.image.layout, start.num_slots, descriptor)
    if start.frozen is not None:
        trainer.loaded_model.frozen_source = shared.frozen(is_private=False), start.frozen
        trainer.image.adopt_frozen(shared.frozen(is_private=True), start.frozen)
    while True:
        order: TrainOrder = connection.recv()
        client = order.client
        devices.positions[client.part] = order.position
        if order.is_checkpointed:
            trainer.checkpointed.add(client.name)
        reply = one_by_one.reply(client, shared.image, run_id=order.run_id)
        report = error = None
        if isinstance(reply, Update):
            shared.slots[order.slot].copy_(reply.values_P)
            report = reply.report
        else:
            error = type(reply.error).__name__, reply.error.message
        result = TrainResult(
            position=devices.positions[client.part],
            is_checkpointed=client.name in trainer.checkpointed,
            report=report,
            error=error,
        )
        connection.send(result)


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
        start_log(verbose=start.is_verbose)
        work(connection, descriptor, start)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logging.getLogger(__name__).debug("the simulator has ended")
    finally:
        connection.close()
