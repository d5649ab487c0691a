"""Workers on this machine: processes that share memory with the simulator, each behind a pipe.

A worker may be killed at any time, and ends when the simulator closes its pipe or ends.

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
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import cast

from torch import Tensor

from headwater.common.errors import WorkerDied
from headwater.common.flower.sent_model import SentModel
from headwater.common.system.console import start_log
from headwater.common.system.heap import freeze_loaded_objects, rare_collections
from headwater.common.system.lasting_output import lasting_output
from headwater.common.system.portability import PipeEnd
from headwater.simulation.compute.orders import Order, Result, TrainOrder, WorkerSettings
from headwater.simulation.compute.shared_vectors import SharedVectors, unnamed_file
from headwater.simulation.compute.worker import Worker
from headwater.simulation.compute.worker_pool import WorkerPool, num_slots
from headwater.simulation.fleet.devices import Devices

RUN_WORKER = "from headwater.simulation.compute.local_workers import main; main()"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalStart:
    """The first message to a worker: which one it is, and the memory's layout."""

    settings: WorkerSettings
    number: int
    num_workers: int
    num_slots: int


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


def local_pool(devices: Devices, number: int) -> WorkerPool:
    """Start so many processes on this machine, which end with this one too."""
    return WorkerPool(devices, LocalWorkers(devices, number, num_slots=num_slots(devices, number)))


@dataclass(kw_only=True, slots=True)
class _Process:
    number: int
    process: subprocess.Popen[bytes] | SpawnedProcess
    connection: PipeEnd
    orders: deque[Order] = field(default_factory=deque)
    """Those that it carries out next."""


class LocalWorkers:
    """See ``simulation.compute.worker_pool.Workers``; they end with ``close`` or this process."""

    def __init__(self, devices: Devices, number: int, *, num_slots: int) -> None:
        """Start the processes; they load torch and the task while this one goes on."""
        layout = devices.trainer.image.layout
        self._path = None if hasattr(os, "fork") else _named_file()
        descriptor = unnamed_file() if self._path is None else os.open(self._path, os.O_RDWR)
        self._shared = SharedVectors(layout, num_slots, number, descriptor)
        source = devices.trainer.loaded_model.frozen_source
        if source is not None:
            self._shared.frozen(is_private=False).copy_(source[0])
        settings = WorkerSettings(
            # The task was checked in this process, which reports its problems.
            settings=devices.settings.model_copy(update={"check_task": False}),
            frozen=None if source is None else source[1],
            is_verbose=logging.getLogger().isEnabledFor(logging.INFO),
        )
        start = partial(LocalStart, settings=settings, num_workers=number, num_slots=num_slots)
        self._workers: list[_Process] = []
        try:
            for at in range(number):
                self._workers.append(_started(descriptor, self._path, start(number=at)))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    num_nodes = None

    @property
    def slots(self) -> Sequence[Tensor]:
        return self._shared.slots

    def begin(self, image: SentModel) -> Sequence[int]:
        self._shared.image[:] = image.buffer()
        return range(len(self._workers))

    def send(self, worker: int, order: Order) -> None:
        chosen = self._workers[worker]
        chosen.orders.append(order)
        try:
            chosen.connection.send(order)
        except OSError as error:
            raise self._died(chosen) from error

    def receive(self, *, is_patient: bool) -> Sequence[tuple[int, Result]]:
        busy = {worker.connection: worker for worker in self._workers if worker.orders}
        results: list[tuple[int, Result]] = []
        timeout_seconds = None if is_patient else 0
        for connection in wait(cast(list[Connection], list(busy)), timeout_seconds):
            worker = busy[cast(PipeEnd, connection)]
            try:
                result = worker.connection.recv()
            except (EOFError, OSError) as error:
                raise self._died(worker) from error
            worker.orders.popleft()
            results.append((worker.number, result))
        return results

    def _died(self, worker: _Process) -> WorkerDied:
        """Return the error that says how a worker ended, and at which device."""
        status = worker.process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        where, order = "", worker.orders[0] if worker.orders else None
        if isinstance(order, TrainOrder):
            begun = int(self._shared.begun[worker.number])
            client = next((one for one in order.clients if one.part == begun), order.clients[0])
            where = f" at device {client.name}, round {client.plan.round}"
        elif order is not None:
            where = f" at {len(order.names)} devices, round {order.plan.round}"
        number = len(self._workers)
        return WorkerDied(f"worker process {worker.number + 1} of {number} was ended {how}{where}")

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


def _started(descriptor: int, path: Path | None, start: LocalStart) -> _Process:
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
    worker = _Process(number=start.number, process=process, connection=ours)
    ours.send(start)
    return worker


# In the worker.


def work(connection: PipeEnd, descriptor: int, start: LocalStart) -> None:
    """Carry out orders until the simulator closes the pipe.

    Raises:
        EOFError: the pipe was closed.
    """

    def note_begun(part: int) -> None:
        shared.begun[start.number] = part

    worker = Worker(start.settings, note_begun=note_begun)
    shared = SharedVectors(worker.image.layout, start.num_slots, start.num_workers, descriptor)
    if start.settings.frozen is not None:
        worker.adopt_frozen(shared.frozen(is_private=False), shared.frozen(is_private=True))
    worker.use(shared.slots)
    freeze_loaded_objects()
    with rare_collections():
        for order in _orders(connection):
            connection.send(worker.carry_out(order, shared.image))


def _orders(connection: PipeEnd) -> Iterator[Order]:
    """Yield the simulator's orders, which a thread receives as they come.

    Without the thread, both processes would wait for ever if the simulator sent an order while this
    process sent a result, and neither fitted into the pipe (about 200 KB).

    Raises:
        EOFError: the pipe was closed.
    """
    received: SimpleQueue[Order | Exception] = SimpleQueue()

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


def main() -> None:
    """Work for the process that started this one, on the descriptors that it names."""
    # Imported here: Windows has no such class, and starts its workers by ``run_spawned``.
    from multiprocessing.connection import Connection

    _run(Connection(int(sys.argv[1])), int(sys.argv[2]))


def run_spawned(connection: PipeEnd, path: Path) -> None:
    """Work for the process that spawned this one, in the memory of this file."""
    _run(connection, os.open(path, os.O_RDWR))


def _run(connection: PipeEnd, descriptor: int) -> None:
    for name in ("SIGINT", "SIGHUP"):  # the simulator gets them, too, and ends this process
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.dup2(2, 1)  # what a task prints must not mix with the simulator's output
    try:
        start: LocalStart = connection.recv()
        with lasting_output():
            start_log(verbose=start.settings.is_verbose)
            work(connection, descriptor, start)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logging.getLogger(__name__).debug("the simulator has ended")
    finally:
        connection.close()
