"""The gRPC grid before simulated devices: real frames under a virtual clock.

Time is the devices' virtual one, so no answer is waited for in vain and none is too late here
(``headwater.server.app`` holds the told seconds against the deadline), and nobody's turn takes time. Those
whom the fleet's file has away are connected all the same, and are asked nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Message

from headwater.client.flower.state_file import StateFile
from headwater.common.errors import HeadwaterError, StateError
from headwater.common.flower.grid import OwnGrid, numbered
from headwater.common.messages import DescribeRequest
from headwater.common.settings.schema import Settings
from headwater.server.flower.grpc_grid import GrpcGrid
from headwater.server.transport.device_records import DeviceRecords
from headwater.server.transport.session import node_id_of
from headwater.simulation.engines.client_processes import ClientProcesses
from headwater.simulation.engines.presence import Presence
from headwater.simulation.engines.shared_round import SharedRound
from headwater.simulation.fleet.faults import TRAIN
from headwater.simulation.fleet.nodes import FIRST_NODE_ID, GRID

POLL_SECONDS = 0.002
LOOK_SECONDS = 0.1  # whether all processes are there still


class SimulatedGrpcGrid(OwnGrid):
    """N simulated devices behind a gRPC grid; they are started when they are first looked for."""

    def __init__(
        self,
        inner: GrpcGrid,
        settings: Settings,
        clients: ClientProcesses,
        world: SharedRound,
        *,
        attendance: DeviceRecords,
        start: Callable[[], None],
    ) -> None:
        super().__init__()
        self._inner = inner
        self._num_devices = settings.simulation.clients
        self._part_of = {node_id_of(str(part)): part for part in range(self._num_devices)}
        self._node_of = {part: node for node, part in self._part_of.items()}
        self._presence = Presence(settings)
        self._present: set[int] = set()
        self._waiting: dict[str, Message] = {}
        self._clients = clients
        self._world = world
        self._attendance = attendance
        self._start = start
        self._has_started = False
        self._next_look = 0.0

    # Who is there.

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are there for the round behind the last one.

        Waits until the round may begin and, the first time, until every device is connected.

        Raises:
            HeadwaterError: see ``Presence.look`` and ``ClientProcesses.check``.
        """
        if not self._has_started:
            self._start()
            self._has_started = True
            while len(list(self._inner.get_node_ids())) < self._num_devices:
                self._rest()
        while not self._inner.may_begin():
            self._rest()
        here = [part for part in self._presence.look() if part not in self._clients.dismissed]
        self._present = {self._node_of[part] for part in here}
        return self._present

    def _rest(self) -> None:
        """Wait a moment, and see to it that the processes are still there."""
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._clients.check()

    def may_begin(self) -> bool:
        return self._inner.may_begin()

    def name_of(self, node_id: int) -> str | None:
        return self._inner.name_of(node_id)

    def refuse(self, node_id: int, error: HeadwaterError) -> None:
        self._clients.dismiss(self._part_of[node_id])
        self._inner.refuse(node_id, error)

    def expect(self, request: DescribeRequest) -> None:
        self._inner.expect(request)

    def expect_beside(self, message_type: str, num_bytes: int) -> None:
        self._inner.expect_beside(message_type, num_bytes)

    def num_bytes(self) -> tuple[int, int]:
        return self._inner.num_bytes()

    # Messages.

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep messages until their replies are asked for."""
        pushed = {numbered(message): message for message in messages}
        self._waiting |= pushed
        return list(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Send what waits for devices that are there, and yield the replies as they come.

        A device that is asked anew what it is answers before the next round, as what it is then;
        one that is away, when it is back. All others have answered when this ends.

        Raises:
            ConnectionLost: a device's process has ended.
        """
        asked = [message_id for message_id in message_ids if self._is_there(message_id)]
        sent = [
            self._waiting.pop(message_id) for message_id in asked if message_id in self._waiting
        ]
        awaited = set(asked)
        for number in {int(m.metadata.group_id) for m in sent if _is_plan(m)}:
            self._presence.plans_sent(number)
            self._world.number = number
        self._inner.push_messages(sent)
        while awaited:
            before = len(awaited)
            for reply in self._inner.pull_messages(list(awaited)):
                awaited.discard(reply.metadata.reply_to_message_id)
                yield reply
            if len(awaited) == before:
                self._rest()

    def _is_there(self, message_id: str) -> bool:
        message = self._waiting.get(message_id)
        return message is None or message.metadata.dst_node_id in self._present

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages and yield the replies as they come; the timeout is the virtual clock's."""
        message_ids = self.push_messages(messages)
        asked = [self._waiting[id_].metadata.dst_node_id for id_ in message_ids]
        self._attendance.awaits(str(self._part_of[node_id]) for node_id in asked)
        try:
            for reply in self.pull_messages(message_ids):
                self._attendance.answered(str(self._part_of[reply.metadata.src_node_id]))
                yield reply
        finally:
            self._attendance.awaits([])

    # What a checkpoint keeps of the devices: as the in-process grid keeps it.

    def simulated_state(self) -> dict[str, Any]:
        """Return what each device has kept on disk, and the last round.

        Raises:
            StateError: a device's file cannot be read.
        """
        kept = {part: self._state_file(part).read() for part in range(self._num_devices)}
        state = {str(FIRST_NODE_ID + part): found for part, found in kept.items() if found}
        return state | {GRID: {"last_round": self._presence.last_round}}

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        """Lay down what ``simulated_state`` gave, where the devices will find it.

        Raises:
            StateError: it cannot be written; or the devices have begun already.
        """
        if self._has_started:
            raise StateError("the devices cannot be put back while they run")
        for key, kept in state.items():
            if key == GRID:
                self._presence.plans_sent(kept["last_round"])
                self._world.number = kept["last_round"]
            else:
                self._state_file(int(key) - FIRST_NODE_ID).write(kept)

    def _state_file(self, part: int) -> StateFile:
        return StateFile(self._clients.state_folder / f"{part}-{self.run.run_id}.json")


def _is_plan(message: Message) -> bool:
    return message.metadata.message_type == TRAIN
