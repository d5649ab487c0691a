"""The plans of asynchronous rounds that are out: sent to clients, and not answered yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping

from flwr.app import Array, Message, RecordDict

from headwater.common.errors import ConnectionLost, HeadwaterError
from headwater.common.flower import records
from headwater.common.flower.grid import HeadwaterGrid
from headwater.common.messages import DescribeRequest, Plan, ReadyReport, Update
from headwater.common.model.parameters import ModelImage
from headwater.common.system.bounded_memory import BoundedMemory
from headwater.server.fleet import Dropout
from headwater.server.flower.answers import read_answer, with_seconds
from headwater.server.flower.polled_grid import REPLY_POLL_SECONDS, PolledGrid
from headwater.server.flower.registration import Registration

MODELS_RAM_BYTES = 1 << 30

Reader = Callable[[str, RecordDict], Update | ReadyReport]


class DispatchedPlans:
    """The plans that are out on a grid, ours or Flower's own."""

    def __init__(self, grid: HeadwaterGrid | PolledGrid, registration: Registration) -> None:
        self._grid = grid
        self._registration = registration
        self._clients: dict[str, str] = {}
        """The clients that work on dispatched plans, by the plan's message."""
        self._readers: dict[str, Reader] = {}
        """What reads the answer to each plan, by the plan's message."""
        self._given_up: deque[Dropout] = deque()
        self._model: tuple[int, Array] | None = None
        """The copy of the model that was dispatched last, and the number of its step."""
        self._held_back: Collection[str] = ()
        """The clients whose answers wait."""
        self._copies = BoundedMemory(MODELS_RAM_BYTES)

    def dispatch(self, plans: Mapping[str, Plan], image: ModelImage, *, round_number: int) -> None:
        """See ``DispatchingFleet``; the model is copied, as steps change it while it is sent.

        Raises:
            StateError: the disk has no room for a file with the model (see ``_copy_of``).
        """
        array, nodes = self._copy_of(image, round_number), self._registration.nodes()
        for left in [name for name in plans if name not in nodes]:
            error = ConnectionLost(f"{left} left before its plan was sent")
            self._given_up.append(Dropout(name=left, error=error))
        messages = [
            Message(
                records.content_of(plan, array),
                nodes[name],
                "train",
                group_id=str(round_number),
            )
            for name, plan in plans.items()
            if name in nodes
        ]
        if isinstance(self._grid, HeadwaterGrid):
            self._grid.offer_differences(None)
        self._grid.dispatch(messages)
        names = {node: name for name, node in nodes.items()}
        ids = [message.metadata.message_id for message in messages]
        self._clients |= {
            id_: names[message.metadata.dst_node_id]
            for id_, message in zip(ids, messages, strict=True)
        }
        self._note_busy()
        num_values, start_seconds = image.layout.num_parameters, time.monotonic()

        def read(name: str, content: RecordDict) -> Update | ReadyReport:
            if plans[name].keeps_update:
                return with_seconds(records.read(content, ReadyReport), start_seconds)
            return records.read_update(content, plans[name], num_values=num_values)

        self._readers |= dict.fromkeys(ids, read)

    def _copy_of(self, image: ModelImage, round_number: int) -> Array:
        """Return a copy of a step's model.

        It is copied once for a step, however many clients join while its buffer fills, and the copy
        is dropped when no plan of the step is out. Old copies that together take more RAM than
        ``MODELS_RAM_BYTES`` are in files.
        """
        if self._model is None or self._model[0] != round_number:
            self._model = None
            is_own = isinstance(self._grid, HeadwaterGrid)
            copy = self._copies.copy(image.buffer()).data if is_own else bytes(image.buffer())
            self._model = (round_number, records.flat_array(copy, dtype="uint8"))
        return self._model[1]

    def next_answer(
        self, *, described: Collection[str], request: DescribeRequest | None
    ) -> Update | ReadyReport | Dropout | None:
        """See ``DispatchingFleet``.

        A client that is not ``described`` has joined since; newcomers on Flower's own grid are sent
        ``request``.
        """
        while self._awaits_some() or self._given_up:
            if self._given_up:
                return self._given_up.popleft()
            reply = self._next_reply(request)
            if reply is None or self._registration.take_reply(reply):
                if any(name not in described for name in self._registration.clients()):
                    return None
                continue
            message_id = reply.metadata.reply_to_message_id
            name = self._clients.pop(message_id, None)
            self._note_busy()
            if name is not None:
                reader = self._readers.pop(message_id)
                answer = read_answer(name, reply, reader, self._registration)
                if isinstance(answer, Dropout):
                    self.drop([name])
                return answer
        return None

    def hold_back(self, names: Collection[str]) -> None:
        """See ``DispatchingFleet``."""
        assert isinstance(self._grid, HeadwaterGrid)
        nodes = self._registration.nodes()
        self._held_back = names
        self._grid.hold_back({nodes[name] for name in names if name in nodes})

    def drop(self, names: Collection[str]) -> None:
        """See ``DispatchingFleet``."""
        ids = [id_ for id_, name in self._clients.items() if name in names]
        if ids and isinstance(self._grid, HeadwaterGrid):
            self._grid.end_exchange(ids)
        self._forget(ids)

    def _forget(self, ids: Collection[str]) -> None:
        for id_ in ids:
            del self._clients[id_], self._readers[id_]
        self._note_busy()

    def _awaits_some(self) -> bool:
        return any(name not in self._held_back for name in self._clients.values())

    def _next_reply(self, request: DescribeRequest | None) -> Message | None:
        """Return the next reply; None if there is none after a short wait."""
        if isinstance(self._grid, HeadwaterGrid):
            return self._grid.next_reply(timeout=REPLY_POLL_SECONDS)
        nodes = self._registration.nodes()
        left = self._grid.left_among(nodes[n] for n in self._clients.values() if n in nodes)
        reply = self._grid.next_reply(self._clients)
        if reply is None:
            names = [name for name in self._clients.values() if nodes.get(name) in left]
            self.give_up({n: ConnectionLost(f"{n} left before it answered") for n in names})
            if request is not None:
                self._registration.update(request)
        return reply

    def give_up(self, errors: Mapping[str, HeadwaterError]) -> None:
        """See ``DispatchingFleet``."""
        ids = [id_ for id_, name in self._clients.items() if name in errors]
        if isinstance(self._grid, HeadwaterGrid):
            if self._grid.has_virtual_clock:
                return  # a device that is away learns nothing of it, and its answer is refused
            self._grid.end_exchange(ids)
        for name in dict.fromkeys(self._clients[id_] for id_ in ids):
            self._given_up.append(Dropout(name=name, error=errors[name]))
        self._forget(ids)

    def _note_busy(self) -> None:
        nodes = self._registration.nodes()
        self._registration.busy = {nodes[name] for name in self._clients.values() if name in nodes}
