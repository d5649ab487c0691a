"""Computes devices one after another in several processes, with the same bits as in one process.

Each worker process has one model and computes whole devices by their own code
(``simulation.compute.worker``). Parameters and vectors are in shared memory; plans and reports go
through pipes.

Replies are passed on in the order of the devices, whichever worker finished first, so a run has the
same bits and the same log for any number of workers. A vector waits for its turn in a slot of
shared memory. The next devices, as many as there are slots, are computed or wait for their turn; of
these the longest start first. A worker prefers the devices that it had in earlier rounds, whose
examples it has open.

``concurrent.futures.ProcessPoolExecutor`` does not fit: it does not say which device a dead worker
was at, its workers outlive a killed simulator, and it cannot prefer a worker for a device.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from headwater.common.errors import WorkerDied, error_of
from headwater.common.messages import Update
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.common.system.portability import PipeEnd, num_usable_cores
from headwater.server.fleet import Dropout
from headwater.simulation.compute.worker import (
    SharedVectors,
    TrainOrder,
    TrainResult,
    WorkerSettings,
    run_spawned,
    unnamed_file,
)
from headwater.simulation.fleet.devices import ClientPlan, Devices

RUN_WORKER = "from headwater.simulation.compute.worker import main; main()"
# Orders that wait at a worker, in addition to the one that it carries out: it is never idle.
AHEAD = 1
# Slots for vectors: at most so many, and so many bytes, but at least two for each worker.
MAX_SLOTS, SLOTS_BYTES = 64, 64 << 20


def num_workers(settings: Settings, *, num_invited: int) -> int:
    """Return the number of processes: the setting, or the usable cores; at most ``num_invited``."""
    chosen = settings.simulation.workers
    number = num_usable_cores() if chosen == "auto" else chosen
    return min(number, num_invited)


class SpawnedProcess:
    """A worker of a system without fork, with the methods of ``subprocess.Popen`` used here."""

    def __init__(self, connection: PipeEnd, path: Path) -> None:
        """Start it; like any program that spawns, a script needs ``if __name__ == "__main__"``."""
        self._process = get_context("spawn").Process(
            target=run_spawned, args=(connection, path), daemon=True
        )
        self._process.start()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self) -> int:
        """Wait for its end and return its status."""
        self._process.join()
        status = self._process.exitcode
        assert status is not None  # it has ended
        return status


@dataclass(kw_only=True, slots=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes] | SpawnedProcess
    connection: PipeEnd
    orders: list[tuple[int, ClientPlan]] = field(default_factory=list)
    """The devices that it computes next, each with its number in the round."""


class WorkerPool:
    """Trains devices in worker processes, which end with ``close`` or with this process."""

    def __init__(self, devices: Devices, number: int) -> None:
        """Start the processes; they load torch and the task while this one goes on."""
        self._devices = devices
        layout = devices.trainer.image.layout
        fitting = min(SLOTS_BYTES // (4 * layout.num_parameters), MAX_SLOTS)
        self._num_slots = max(fitting, (1 + AHEAD) * number)
        self._path = None if hasattr(os, "fork") else _named_file()
        descriptor = unnamed_file() if self._path is None else os.open(self._path, os.O_RDWR)
        self._shared = SharedVectors(layout, self._num_slots, descriptor)
        source = devices.trainer.loaded_model.frozen_source
        if source is not None:
            self._shared.frozen(is_private=False).copy_(source[0])
        start = WorkerSettings(
            # The task was checked in this process, which reports its problems.
            settings=devices.settings.model_copy(update={"check_task": False}),
            num_slots=self._num_slots,
            frozen=None if source is None else source[1],
            is_verbose=logging.getLogger().isEnabledFor(logging.INFO),
        )
        self._workers: list[_Worker] = []
        try:
            for at in range(number):
                self._workers.append(_started(at, descriptor, self._path, start))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def train(
        self,
        clients: Sequence[ClientPlan],
        image: ModelImage,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | Dropout]:
        """Yield each device's reply in turn; its vector is valid until the next is requested.

        Raises:
            WorkerDied: a process ended.
        """
        while any(worker.orders for worker in self._workers):
            self._receive()  # results of a round that was aborted
        self._shared.image[:] = image.buffer()
        waiting = list(enumerate(clients))
        results: dict[int, TrainResult] = {}
        for at, client in enumerate(clients):
            while at not in results:
                self._hand_out(waiting, at, run_id)
                results |= self._receive()
            yield self._reply(at, client, results.pop(at))

    def _hand_out(self, waiting: list[tuple[int, ClientPlan]], current: int, run_id: int) -> None:
        """Give the workers orders out of ``waiting``, as long as the devices' slots are free.

        The slots of the devices before number ``current`` are free.
        """
        for depth in range(1 + AHEAD):
            for worker in self._workers:
                if len(worker.orders) <= depth:
                    end = current + self._num_slots
                    next_ones = [one for one in waiting[: self._num_slots] if one[0] < end]
                    if not next_ones:
                        return
                    at, client = max(next_ones, key=lambda one: self._urgency(worker, *one))
                    waiting.remove((at, client))
                    self._order(worker, at, client, run_id)

    def _urgency(self, worker: _Worker, at: int, client: ClientPlan) -> tuple[bool, int, int]:
        is_own = client.part % len(self._workers) == worker.number
        return is_own, client.plan.quota, -at

    def _order(self, worker: _Worker, at: int, client: ClientPlan, run_id: int) -> None:
        worker.orders.append((at, client))
        order = TrainOrder(
            client=client,
            slot=at % self._num_slots,
            run_id=run_id,
            position=self._devices.positions[client.part],
            is_checkpointed=client.name in self._devices.trainer.checkpointed,
        )
        try:
            worker.connection.send(order)
        except OSError as error:
            raise _died(worker, len(self._workers)) from error

    def _receive(self) -> dict[int, TrainResult]:
        """Wait for results; return those that arrived, by their devices' numbers."""
        busy = {worker.connection: worker for worker in self._workers if worker.orders}
        results: dict[int, TrainResult] = {}
        for connection in wait(cast(list[Connection], list(busy))):
            worker = busy[cast(PipeEnd, connection)]
            try:
                result = worker.connection.recv()
            except (EOFError, OSError) as error:
                raise _died(worker, len(self._workers)) from error
            at, _ = worker.orders.pop(0)
            results[at] = result
        return results

    def _reply(self, at: int, client: ClientPlan, result: TrainResult) -> Update | Dropout:
        """Store a device's new position and return its update."""
        self._devices.positions[client.part] = result.position
        if result.is_checkpointed:
            self._devices.trainer.checkpointed.add(client.name)
        if result.report is not None:
            slot = self._shared.slots[at % self._num_slots]
            return Update(values_P=slot, report=result.report)
        assert result.error is not None  # one of the two is set
        return Dropout(name=client.name, error=error_of(*result.error))

    def close(self) -> None:
        """Kill the processes: they hold nothing that is needed."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.connection.close()
        self._workers = []
        if self._path is not None:
            with contextlib.suppress(OSError):  # Windows removes no file that is mapped
                self._path.unlink(missing_ok=True)


def _named_file() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="headwater-")
    os.close(descriptor)
    return Path(name)


def _started(number: int, descriptor: int, path: Path | None, start: WorkerSettings) -> _Worker:
    ours, theirs = Pipe()
    process: subprocess.Popen[bytes] | SpawnedProcess
    with theirs:
        if path is None:
            passed = (theirs.fileno(), descriptor)
            process = subprocess.Popen(
                [sys.executable, "-c", RUN_WORKER, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
            )
        else:
            process = SpawnedProcess(theirs, path)
    worker = _Worker(number=number, process=process, connection=ours)
    ours.send(start)
    return worker


def _died(worker: _Worker, number: int) -> WorkerDied:
    """Return the error that says how a worker ended, and at which device."""
    status = worker.process.wait()
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    where = ""
    if worker.orders:
        _, client = worker.orders[0]
        where = f" at device {client.name}, round {client.plan.round}"
    return WorkerDied(f"worker process {worker.number + 1} of {number} was ended {how}{where}")
