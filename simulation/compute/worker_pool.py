"""Computes devices in several processes, with the same bits as in one process.

The processes are those of this machine (``simulation.compute.local_workers``) or of a Ray cluster
(``simulation.cluster.ray_workers``); each has one model and computes devices by their own code
(``simulation.compute.worker``). Plans and reports go to them in pieces of many devices: a message
for each device took longer than the device of a small model.

Replies are passed on in the order of the devices, whichever worker finished first, so a run has the
same bits and the same log for any number of workers. A vector is summed in a slot and waits there
for its turn. The next devices, as many as there are slots, are computed or wait for
their turn. They start in their order, so that the server adds updates while the workers compute; a
device that is a piece by itself starts first. A piece is a share of what remains, so the pieces
become smaller and the workers finish together (Polychronopoulos and Kuck 1987, "Guided
self-scheduling"), but not so small that its messages take longer than its devices. A worker prefers
the devices that it had in earlier rounds, whose examples it has open.

Blocks of devices that go through the model together (``simulation.compute.batched``) are cut as in
one process, and are a piece each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headwater.common.errors import WorkerDied, error_of
from headwater.common.flower.sent_model import SentModel
from headwater.common.messages import Update
from headwater.server.fleet import Dropout, UpdateBlock
from headwater.simulation.compute.orders import (
    Order,
    Result,
    SumOrder,
    SumResult,
    TrainOrder,
    TrainResult,
    parts_of,
    report_of,
)
from headwater.simulation.compute.report_columns import CohortReports
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.vectorised.round_columns import RoundColumns

# Pieces that wait at a worker, in addition to the one that it carries out, so that it is not idle.
AHEAD = 1
# A piece takes about so long or longer, by the last round's pace: each piece costs 2 ms of its own.
LEAST_SECONDS = 0.008
# Updates that are passed on together; the workers receive new pieces in between.
MAX_RUN = 32
# Slots for vectors: at most so many, and so many bytes, but at least two for each worker.
MAX_SLOTS, SLOTS_BYTES = 256, 64 << 20
# Blocks that are computed or wait for their turn, for each worker.
BLOCKS_OF_EACH = 4


class Workers(Protocol):
    """Processes that carry out orders; each has its orders one after another."""

    @property
    def slots(self) -> Sequence[Tensor]:
        """The vectors [P] of devices, which orders name by their numbers."""
        ...

    def begin(self, image: SentModel) -> Sequence[int]:
        """Take the model of the orders that follow; return the workers that there are.

        Raises:
            WorkerDied: there is none, and none comes.
        """
        ...

    def send(self, worker: int, order: Order) -> None:
        """Give a worker an order.

        Raises:
            WorkerDied: the worker has ended.
        """
        ...

    def receive(self, *, is_patient: bool) -> Sequence[tuple[int, Result | WorkerDied]]:
        """Return results, of each worker in its orders' turn; wait for one if patient.

        An error is that of a worker that was lost with its machine, once for all its orders.

        Raises:
            WorkerDied: a worker has ended on a machine that works.
        """
        ...

    def close(self) -> None:
        """End them."""
        ...

    @property
    def num_nodes(self) -> int | None:
        """The machines of a cluster that have some; None: they are on this machine."""
        ...


def num_slots(devices: Devices, number: int) -> int:
    """Return how many vectors of devices are held for this many workers."""
    fitting = min(SLOTS_BYTES // (4 * devices.trainer.image.layout.num_parameters), MAX_SLOTS)
    return max(fitting, (1 + AHEAD) * number)


# A device of a round with its number in it, from 0; what a worker is given: devices, or a block.
_Numbered = tuple[int, ClientPlan]
_Piece = list[_Numbered] | int


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
        for own in [self._own[worker % len(self._own)], *sorted(self._own, key=len, reverse=True)]:
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
    """Trains devices in worker processes, which end with ``close``."""

    def __init__(self, devices: Devices, workers: Workers) -> None:
        self._devices, self._workers = devices, workers
        self._pace = _Pace()
        self._alive: list[int] = []
        """The round's workers, in their order."""
        self._given: dict[int, deque[_Piece]] = {}
        """The pieces that each computes, or computes next."""

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
        self._begin(image)
        pieces = RoundPieces(clients, len(self._alive), least_work=self._pace.least_work)
        self._pace = _Pace()
        replies: dict[int, Update | _Foreseen | Dropout] = {}
        at = 0
        while at < len(clients):
            if not self._alive:
                self._begin(image)
            self._hand_out(pieces, at, run_id, timeout_seconds)
            for piece, result in self._receive(is_patient=at not in replies):
                assert isinstance(piece, list)
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
            slots = [self._slot(at + number) for number in range(len(run))]
            yield UpdateBlock(vectors=slots, reports=_reports_of(run))
            at += len(run)

    def sums(
        self,
        blocks: Sequence[RoundColumns],
        image: SentModel,
        *,
        run_id: int,
        first: int,
        with_norms: bool,
    ) -> Iterator[SumResult | WorkerDied]:
        """Yield the sums of blocks in turn; an error is that of a worker that was lost.

        See ``SumOrder``.

        Raises:
            WorkerDied: a process ended.
        """
        orders = [
            SumOrder.of(one, run_id=run_id, first=first, with_norms=with_norms) for one in blocks
        ]
        self._begin(image)
        num_turns = len(self._alive)
        results: dict[int, SumResult | WorkerDied] = {}
        waiting = list(range(len(orders)))
        for at in range(len(orders)):
            while at not in results:
                if not self._alive:
                    self._begin(image)
                end = at + BLOCKS_OF_EACH * len(self._alive)
                self._hand_out_blocks(orders, waiting, end=end, num_turns=num_turns)
                for block, result in self._receive(is_patient=True):
                    assert isinstance(block, int)
                    assert not isinstance(result, TrainResult)
                    results[block] = result
            yield results.pop(at)

    def _begin(self, image: SentModel) -> None:
        while any(self._given.values()):
            self._receive(is_patient=True)  # results of a round that was aborted
        self._alive = list(self._workers.begin(image))
        self._given = {worker: deque() for worker in self._alive}

    def _hand_out(
        self, pieces: RoundPieces, current: int, run_id: int, timeout_seconds: float | None
    ) -> None:
        """Give the workers orders, as long as the devices' slots are free.

        The slots of the devices before number ``current`` are free.
        """
        num_slots = len(self._workers.slots)
        end, most = current + num_slots, num_slots // ((1 + AHEAD) * len(self._alive))
        for depth in range(1 + AHEAD):
            if depth and pieces.are_last:  # for the worker that is free first
                return
            for turn, worker in enumerate(self._alive):
                if len(self._given[worker]) <= depth:
                    piece = pieces.take(turn, end=end, most=max(most, 1))
                    if not piece:
                        return
                    self._given[worker].append(piece)
                    self._workers.send(worker, self._order(piece, run_id, timeout_seconds))

    def _order(
        self, piece: Sequence[_Numbered], run_id: int, timeout_seconds: float | None
    ) -> TrainOrder:
        clients, checkpointed = [one for _, one in piece], self._devices.trainer.checkpointed
        return TrainOrder(
            clients=clients,
            slots=[at % len(self._workers.slots) for at, _ in piece],
            run_id=run_id,
            timeout_seconds=timeout_seconds,
            states=self._devices.positions.states(parts_of(clients)),
            checkpointed=[client.name for client in clients if client.name in checkpointed],
        )

    def _hand_out_blocks(
        self, orders: Sequence[SumOrder], waiting: list[int], *, end: int, num_turns: int
    ) -> None:
        """Give each worker the blocks of its turn, which it had in earlier rounds; or others."""
        for depth in range(1 + AHEAD):
            for turn, worker in enumerate(self._alive):
                if len(self._given[worker]) > depth:
                    continue
                near = [at for at in waiting if at < end]
                own = [at for at in near if at % num_turns == turn]
                if not near or (depth and not own):
                    continue
                block = (own or near)[0]
                waiting.remove(block)
                self._given[worker].append(block)
                self._workers.send(worker, orders[block])

    def _receive(self, *, is_patient: bool) -> list[tuple[_Piece, Result | WorkerDied]]:
        """Return the pieces that were computed, with their results; wait for one if patient."""
        results: list[tuple[_Piece, Result | WorkerDied]] = []
        for worker, result in self._workers.receive(is_patient=is_patient):
            if isinstance(result, WorkerDied):
                self._alive.remove(worker)
                results += [(piece, result) for piece in self._given.pop(worker)]
            else:
                results.append((self._given[worker].popleft(), result))
        return results

    def _replies(
        self, piece: list[_Numbered], result: Result | WorkerDied
    ) -> dict[int, Update | _Foreseen | Dropout]:
        """Store the new positions of a piece's devices; return their replies by their numbers."""
        if isinstance(result, WorkerDied):
            return {at: Dropout(name=client.name, error=result) for at, client in piece}
        assert isinstance(result, TrainResult)
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
                sums = {k: torch.from_numpy(v) for k, v in result.sums.get(number, {}).items()}
                values_P = self._slot(at) if client.plan.asks_model else self._slot(at)[:0]
                replies[at] = Update(values_P=values_P, report=report_of(plain), sums=sums)
        return replies

    @property
    def num_nodes(self) -> int | None:
        """See ``Workers``."""
        return self._workers.num_nodes

    def _slot(self, at: int) -> Tensor:
        """Return the vector of device number ``at`` of the round."""
        return self._workers.slots[at % len(self._workers.slots)]

    def close(self) -> None:
        """End the workers: they hold nothing that is needed."""
        self._workers.close()
