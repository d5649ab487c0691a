"""Computes devices one after another in several processes, with the same bits as in one process.

Each worker process has one model and computes whole devices by their own code
(``simulation.compute.worker``). Parameters and vectors are in shared memory; plans and reports go
through pipes, in pieces of many devices: a message for each device took longer than the device of a
small model.

Replies are passed on in the order of the devices, whichever worker finished first, so a run has the
same bits and the same log for any number of workers. A vector is summed in a slot of shared memory
and waits there for its turn. The next devices, as many as there are slots, are computed or wait for
their turn. They start in their order, so that the server adds updates while the workers compute; a
device that is a piece by itself starts first. A piece is a share of what remains, so the pieces
become smaller and the workers finish together (Polychronopoulos and Kuck 1987, "Guided
self-scheduling"), but not so small that its messages take longer than its devices. A worker prefers
the devices that it had in earlier rounds, whose examples it has open.

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
from dataclasses import dataclass, field, replace
from itertools import accumulate
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from headwater.common.errors import WorkerDied, error_of
from headwater.common.flower.sent_model import SentModel
from headwater.common.messages import Update
from headwater.common.settings.schema import Settings
from headwater.common.system.portability import PipeEnd, num_usable_cores
from headwater.server.fleet import Dropout, UpdateBlock
from headwater.simulation.compute.report_columns import CohortReports
from headwater.simulation.compute.worker import (
    SharedVectors,
    TrainOrder,
    TrainResult,
    WorkerSettings,
    parts_of,
    report_of,
    run_spawned,
    unnamed_file,
)
from headwater.simulation.fleet.devices import ClientPlan, Devices

RUN_WORKER = "from headwater.simulation.compute.worker import main; main()"
# Pieces that wait at a worker, in addition to the one that it carries out, so that it is not idle.
AHEAD = 1
# A piece takes about so long or longer, by the last round's pace: each piece costs 2 ms of its own.
LEAST_SECONDS = 0.008
# Updates that are passed on together; the workers receive new pieces in between.
MAX_RUN = 32
# Slots for vectors: at most so many, and so many bytes, but at least two for each worker.
MAX_SLOTS, SLOTS_BYTES = 256, 64 << 20


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


# A device of a round with its number in it, from 0.
_Numbered = tuple[int, ClientPlan]


class _Foreseen(NamedTuple):
    """The report of a device whose work was foreseen: a row of a block's reports."""

    reports: CohortReports
    row: int

    def is_like(self, other: _Foreseen) -> bool:
        """Whether the reports have the same metrics, and can be joined."""
        return self.reports is other.reports or (
            self.reports.sums.metrics.keys() == other.reports.sums.metrics.keys()
        )


def _reports_of(run: Sequence[_Foreseen]) -> CohortReports:
    """Return the reports of several devices as one batch, in their order."""
    blocks = list({id(one.reports): one.reports for one in run}.values())
    starts = dict(zip(map(id, blocks), accumulate(map(len, blocks[:-1]), initial=0), strict=True))
    joined = CohortReports.joined(blocks) if len(blocks) > 1 else blocks[0]
    return joined.some(np.array([starts[id(one.reports)] + one.row for one in run]))


@dataclass(kw_only=True, slots=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes] | SpawnedProcess
    connection: PipeEnd
    orders: list[list[_Numbered]] = field(default_factory=list)
    """The pieces that it computes next."""


class RoundPieces:
    """The devices of a round that no worker has yet, in pieces of about equal work."""

    def __init__(
        self, clients: Sequence[ClientPlan], num_workers: int, *, least_work: float = 0.0
    ) -> None:
        """``least_work`` are the examples of a piece that is worth its messages."""
        self._least_work = least_work
        self._own: list[list[_Numbered]] = [[] for _ in range(num_workers)]
        for at, client in enumerate(clients):
            self._own[client.part % num_workers].append((at, client))
        self._work = sum(client.plan.quota for client in clients)

    @property
    def are_last(self) -> bool:
        """Whether only about one more piece for each worker is left."""
        num_workers = len(self._own)
        return sum(map(len, self._own)) <= num_workers or (
            self._work <= num_workers * self._least_work
        )

    def take(self, worker: int, *, end: int, most: int) -> list[_Numbered]:
        """Return a worker's next piece: at most ``most`` devices, numbered below ``end``, in order.

        They are its own devices; if too few are left, others too. A device that would be a piece by
        itself is taken before others.
        """
        share = self._work / (2 * len(self._own))
        piece, work = list[_Numbered](), 0
        for own in [self._own[worker], *sorted(self._own, key=len, reverse=True)]:
            if piece and work >= self._least_work:
                break
            free = [one for one in own if one[0] < end]
            free.sort(key=lambda one: -quota if (quota := one[1].plan.quota) >= share else 0)
            num_before = len(piece)
            for one in free:
                if len(piece) == most or (piece and work >= max(share, self._least_work)):
                    break
                piece.append(one)
                work += one[1].plan.quota
            taken = {at for at, _ in piece[num_before:]}
            own[:] = [one for one in own if one[0] not in taken]
        self._work -= work
        return sorted(piece, key=itemgetter(0))


@dataclass(kw_only=True, slots=True)
class _Pace:
    """What the workers computed in a round: the plans' examples, and the seconds they took."""

    work: int = 0
    seconds: float = 0.0

    @property
    def least_work(self) -> float:
        """Return the examples of LEAST_SECONDS; 0 before anything was computed."""
        return LEAST_SECONDS * self.work / self.seconds if self.seconds else 0.0


class WorkerPool:
    """Trains devices in worker processes, which end with ``close`` or with this process."""

    def __init__(self, devices: Devices, number: int) -> None:
        """Start the processes; they load torch and the task while this one goes on."""
        self._devices = devices
        self._pace = _Pace()
        layout = devices.trainer.image.layout
        fitting = min(SLOTS_BYTES // (4 * layout.num_parameters), MAX_SLOTS)
        self._num_slots = max(fitting, (1 + AHEAD) * number)
        self._path = None if hasattr(os, "fork") else _named_file()
        descriptor = unnamed_file() if self._path is None else os.open(self._path, os.O_RDWR)
        self._shared = SharedVectors(layout, self._num_slots, number, descriptor)
        source = devices.trainer.loaded_model.frozen_source
        if source is not None:
            self._shared.frozen(is_private=False).copy_(source[0])
        start = WorkerSettings(
            # The task was checked in this process, which reports its problems.
            settings=devices.settings.model_copy(update={"check_task": False}),
            number=0,
            num_workers=number,
            num_slots=self._num_slots,
            frozen=None if source is None else source[1],
            is_verbose=logging.getLogger().isEnabledFor(logging.INFO),
        )
        self._workers: list[_Worker] = []
        try:
            for at in range(number):
                self._workers.append(_started(descriptor, self._path, replace(start, number=at)))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def train(
        self,
        clients: Sequence[ClientPlan],
        image: SentModel,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | UpdateBlock | Dropout]:
        """Yield the devices' replies in turn; the vectors are valid until the next is requested.

        Raises:
            WorkerDied: a process ended.
        """
        while any(worker.orders for worker in self._workers):
            self._receive()  # results of a round that was aborted
        self._shared.image[:] = image.buffer()
        pieces = RoundPieces(clients, len(self._workers), least_work=self._pace.least_work)
        self._pace = _Pace()
        replies: dict[int, Update | _Foreseen | Dropout] = {}
        at = 0
        while at < len(clients):
            self._hand_out(pieces, at, run_id, timeout_seconds)
            for piece, result in self._receive(is_patient=at not in replies):
                replies |= self._replies(piece, result)
            reply = replies.pop(at, None)
            if not isinstance(reply, _Foreseen):
                if reply is not None:
                    yield reply
                    at += 1
                continue
            run = [reply]
            while isinstance(following := replies.get(at + len(run)), _Foreseen):
                if len(run) == MAX_RUN or not reply.is_like(following):
                    break
                del replies[at + len(run)]
                run.append(following)
            slots = [self._shared.slots[(at + n) % self._num_slots] for n in range(len(run))]
            yield UpdateBlock(vectors=slots, reports=_reports_of(run))
            at += len(run)

    def _hand_out(
        self, pieces: RoundPieces, current: int, run_id: int, timeout_seconds: float | None
    ) -> None:
        """Give the workers orders, as long as the devices' slots are free.

        The slots of the devices before number ``current`` are free.
        """
        end, most = current + self._num_slots, self._num_slots // ((1 + AHEAD) * len(self._workers))
        for depth in range(1 + AHEAD):
            if depth and pieces.are_last:  # for the worker that is free first
                return
            for worker in self._workers:
                if len(worker.orders) <= depth:
                    piece = pieces.take(worker.number, end=end, most=most)
                    if not piece:
                        return
                    self._order(worker, piece, run_id, timeout_seconds)

    def _order(
        self,
        worker: _Worker,
        piece: list[_Numbered],
        run_id: int,
        timeout_seconds: float | None,
    ) -> None:
        worker.orders.append(piece)
        clients, checkpointed = [one for _, one in piece], self._devices.trainer.checkpointed
        order = TrainOrder(
            clients=clients,
            slots=[at % self._num_slots for at, _ in piece],
            run_id=run_id,
            timeout_seconds=timeout_seconds,
            states=self._devices.positions.states(parts_of(clients)),
            checkpointed=[client.name for client in clients if client.name in checkpointed],
        )
        try:
            worker.connection.send(order)
        except OSError as error:
            raise self._died(worker) from error

    def _receive(self, *, is_patient: bool = True) -> list[tuple[list[_Numbered], TrainResult]]:
        """Return the pieces that were computed, with their results; wait for one if patient."""
        busy = {worker.connection: worker for worker in self._workers if worker.orders}
        results: list[tuple[list[_Numbered], TrainResult]] = []
        timeout_seconds = None if is_patient else 0
        for connection in wait(cast(list[Connection], list(busy)), timeout_seconds):
            worker = busy[cast(PipeEnd, connection)]
            try:
                result = worker.connection.recv()
            except (EOFError, OSError) as error:
                raise self._died(worker) from error
            results.append((worker.orders.pop(0), result))
        return results

    def _replies(
        self, piece: list[_Numbered], result: TrainResult
    ) -> dict[int, Update | _Foreseen | Dropout]:
        """Store the new positions of a piece's devices; return their replies by their numbers."""
        self._pace.work += sum(client.plan.quota for _, client in piece)
        self._pace.seconds += result.seconds
        self._devices.positions.store(parts_of([one for _, one in piece]), result.states)
        for name in result.checkpointed:
            self._devices.trainer.checkpointed.add(name)
        replies: dict[int, Update | _Foreseen | Dropout] = {}
        foreseen = [one for one, reply in zip(piece, result.replies, strict=True) if reply is None]
        start = 0
        for block in result.blocks:
            some = foreseen[start : start + len(block)]
            start += len(block)
            reports = block.of_clients([client for _, client in some])
            replies |= {at: _Foreseen(reports, row) for row, (at, _) in enumerate(some)}
        for number, ((at, client), plain) in enumerate(zip(piece, result.replies, strict=True)):
            if plain is None:
                continue
            if isinstance(plain, tuple):
                replies[at] = Dropout(name=client.name, error=error_of(*plain))
            else:
                slot = self._shared.slots[at % self._num_slots]
                sums = {k: torch.from_numpy(v) for k, v in result.sums.get(number, {}).items()}
                replies[at] = Update(values_P=slot, report=report_of(plain), sums=sums)
        return replies

    def _died(self, worker: _Worker) -> WorkerDied:
        """Return the error that says how a worker ended, and at which device."""
        status = worker.process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        where = ""
        if worker.orders:
            begun = int(self._shared.begun[worker.number])
            clients = [client for _, client in worker.orders[0]]
            client = next((one for one in clients if one.part == begun), clients[0])
            where = f" at device {client.name}, round {client.plan.round}"
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


def _started(descriptor: int, path: Path | None, start: WorkerSettings) -> _Worker:
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
    worker = _Worker(number=start.number, process=process, connection=ours)
    ours.send(start)
    return worker
