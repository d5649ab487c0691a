"""One device after another, in several processes at once: the same bits as in one.

Each worker has one model and computes whole devices by their own code (``headwater.simulation.compute.modes.worker``).
Parameters and vectors lie in shared memory; what goes through the pipes is a plan, and a report.

Answers are handed on in the order in which the devices were called, whoever was done first: so a
run is the same to the bit and to the line of its log, for any number of workers. A slot of shared
memory holds a vector until its turn comes. As many devices as there are slots are at work or wait
for their turn, and of these the longest are begun first. A worker takes rather those that it has
had before, as it has their examples open.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from headwater.common.errors import WorkerDied, error_of
from headwater.common.messages import Update
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.server.fleet import Dropout
from headwater.simulation.compute.shared_memory import Shared, new_file
from headwater.simulation.compute.worker import Answer, Order, Start
from headwater.simulation.fleet.devices import Called, Devices

log = logging.getLogger(__name__)

# Devices that a worker has before it, beside the one that it is at: it never waits for the next.
AHEAD = 1
# Vectors that are kept until their turn comes: so many, but no more than fit in so many bytes, and
# two for each worker at least.
MOST_SLOTS, SLOTS_BYTES = 64, 64 << 20


def num_workers(settings: Settings, *, num_invited: int) -> int:
    """Return how many processes a run computes in: as set, or the usable cores.

    Never more than there are devices in a round.
    """
    chosen = settings.simulation.workers
    asked = len(os.sched_getaffinity(0)) if chosen == "auto" else chosen
    return min(asked, num_invited)


@dataclass(kw_only=True, slots=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    asked: list[_Asked] = field(default_factory=list)
    """What it is at and has before it, in its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The device that was called as number ``at`` of a round; its vector goes into a slot."""

    at: int
    called: Called
    slot: int


class Workers:
    """Trains the called devices in worker processes; they end with ``close``, or with this one."""

    def __init__(self, devices: Devices, number: int) -> None:
        """Start the processes; they load torch and the task while this one goes on."""
        self._devices = devices
        layout = devices.resident.image.layout
        fitting = min(SLOTS_BYTES // (4 * layout.num_parameters), MOST_SLOTS)
        num_slots = max(fitting, (1 + AHEAD) * number)
        descriptor = new_file(layout, num_slots)
        self._shared = Shared(descriptor, layout, num_slots)
        self._free = list(range(num_slots))
        # The task was tried on real examples here, where there are any problems to be told.
        settings = devices.settings.model_copy(update={"check_task": False})
        start = Start(
            settings=settings,
            num_slots=num_slots,
            is_verbose=logging.getLogger().isEnabledFor(logging.INFO),
        )
        self._workers: list[_Worker] = []
        try:
            for at in range(number):
                self._workers.append(_started(at, descriptor, start))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def train(
        self,
        called: Sequence[Called],
        image: ModelImage,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | Dropout]:
        """Yield each device's answer in its turn; its vector is valid until the next is asked for.

        Raises:
            WorkerDied: a process ended before its time.
        """
        self._finish_what_was_left()
        self._shared.image[:] = image.buffer()
        waiting = [
            list(enumerate(called))[start : start + len(self._free)]
            for start in range(0, len(called), len(self._free))
        ]
        waiting.reverse()
        there: dict[int, tuple[_Asked, Answer]] = {}
        for at in range(len(called)):
            while at not in there:
                self._hand_out(waiting, run_id)
                there |= self._receive()
            asked, answer = there.pop(at)
            yield self._taken(asked, answer)
            self._free.append(asked.slot)

    def _finish_what_was_left(self) -> None:
        """Await what was asked for in a round that was given up, so that all slots are free."""
        while any(worker.asked for worker in self._workers):
            self._receive()
        self._free = list(range(len(self._shared.slots)))

    def _hand_out(self, waiting: list[list[tuple[int, Called]]], run_id: int) -> None:
        """Ask workers for what waits, block after block, as long as there are slots."""
        for depth in range(1 + AHEAD):
            for worker in self._workers:
                if len(worker.asked) > depth:
                    continue
                while waiting and not waiting[-1]:
                    waiting.pop()
                if not waiting or not self._free:
                    return
                self._ask(worker, *self._chosen(worker, waiting[-1]), run_id)

    def _chosen(self, worker: _Worker, block: list[tuple[int, Called]]) -> tuple[int, Called]:
        """Take out of a block what a worker does next: its own, the longest first."""

        def urgency(entry: tuple[int, Called]) -> tuple[bool, int, int]:
            at, one = entry
            is_own = one.part % len(self._workers) == worker.number
            return is_own, one.plan.quota, -at

        chosen = max(block, key=urgency)
        block.remove(chosen)
        return chosen

    def _ask(self, worker: _Worker, at: int, called: Called, run_id: int) -> None:
        asked = _Asked(at=at, called=called, slot=self._free.pop())
        worker.asked.append(asked)
        order = Order(
            slot=asked.slot,
            run_id=run_id,
            part=called.part,
            plan=called.plan,
            walk=self._devices.walks[called.part],
            is_checkpointed=called.name in self._devices.resident.checkpointed,
        )
        try:
            worker.connection.send_bytes(order.model_dump_json().encode())
        except OSError as error:
            raise _died(worker, len(self._workers)) from error

    def _receive(self) -> dict[int, tuple[_Asked, Answer]]:
        """Wait for answers and return those that are there, by their devices' turns."""
        busy = {worker.connection: worker for worker in self._workers if worker.asked}
        found: dict[int, tuple[_Asked, Answer]] = {}
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            try:
                said = connection.recv_bytes()
            except (EOFError, OSError) as error:
                raise _died(worker, len(self._workers)) from error
            asked = worker.asked.pop(0)
            found[asked.at] = asked, Answer.model_validate_json(said)
        return found

    def _taken(self, asked: _Asked, answer: Answer) -> Update | Dropout:
        """Take note of what a device came to."""
        name = asked.called.name
        self._devices.walks[asked.called.part] = answer.walk
        if answer.is_checkpointed:
            self._devices.resident.checkpointed.add(name)
        if answer.report is not None:
            return Update(values_P=self._shared.slots[asked.slot], report=answer.report)
        assert answer.error is not None  # one of the two is there
        return Dropout(name=name, error=error_of(*answer.error))

    def close(self) -> None:
        """End the processes: at once, as they hold nothing that is missed."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.connection.close()
        self._workers = []


def _started(number: int, descriptor: int, start: Start) -> _Worker:
    ours, theirs = Pipe()
    with theirs:
        passed = (theirs.fileno(), descriptor)
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater.simulation.compute.worker", *map(str, passed)],
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
        )
    worker = _Worker(number=number, process=process, connection=ours)
    ours.send_bytes(start.model_dump_json().encode())
    return worker


def _died(worker: _Worker, number: int) -> WorkerDied:
    """Say how a worker ended, and at what."""
    status = worker.process.wait()
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    at = worker.asked[0] if worker.asked else None
    where = "" if at is None else f" at device {at.called.name}, round {at.called.plan.round}"
    return WorkerDied(f"worker process {worker.number + 1} of {number} was ended {how}{where}")
