"""The grid of ``--engine grpc``: a gRPC grid of simulated devices under a virtual clock.

Messages travel as real frames, but time is the devices' virtual time. So every reply is awaited and
none is late here (the server compares the reported seconds with the deadline), and no time is
measured for adding an update. A device that is unavailable by the fleet's file stays connected, but
no message is sent to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Message

from headwater.client.flower.state_file import StateFile
from headwater.common.errors import HeadwaterError, StateError
from headwater.common.flower.grid import HeadwaterGrid, ensure_message_id
from headwater.common.flower.sent_model import FindDifference
from headwater.common.messages import DescribeRequest
from headwater.common.settings.schema import Settings
from headwater.server.flower.grpc_grid import GrpcGrid
from headwater.server.transport.device_records import DeviceRecords
from headwater.server.transport.session import node_id_of
from headwater.simulation.engines.client_processes import ClientProcesses
from headwater.simulation.engines.message_grid import ConnectedDevices
from headwater.simulation.engines.shared_round import SharedRound
from headwater.simulation.fleet.devices import FIRST_NODE_ID, FLEET_STATE
from headwater.simulation.fleet.faults import TRAIN
from headwater.simulation.fleet.fleet_spec import fleet_spec
from headwater.simulation.fleet.identities import identities_of

POLL_SECONDS = 0.002
CHECK_SECONDS = 0.1  # between two checks that all processes are alive


class SimulatedGrpcGrid(HeadwaterGrid):
    """N simulated devices of a gRPC grid; the first ``get_node_ids`` starts them."""

    has_virtual_clock = True

    def __init__(
        self,
        inner: GrpcGrid,
        settings: Settings,
        clients: ClientProcesses,
        shared_round: SharedRound,
        *,
        device_records: DeviceRecords,
        start: Callable[[], None],
    ) -> None:
        super().__init__()
        self._inner = inner
        self._num_devices = settings.simulation.clients
        self._name_of = identities_of(settings).name
        self._part_of = {node_id_of(self._name_of(part)): part for part in range(self._num_devices)}
        self._node_of = {part: node for node, part in self._part_of.items()}
        self._devices = ConnectedDevices(
            fleet_spec(settings), min_clients=settings.num_clients_needed
        )
        self._available: set[int] = set()
        self._waiting: dict[str, Message] = {}
        self._clients = clients
        self._shared_round = shared_round
        self._device_records = device_records
        self._start = start
        self._has_started = False
        self._next_check = 0.0

    # Nodes.

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are available for the round after the last one.

        Waits until the round may begin and, the first time, until every device is connected.

        Raises:
            HeadwaterError: see ``ConnectedDevices.look`` and ``ClientProcesses.check``.
        """
        if not self._has_started:
            self._start()
            self._has_started = True
            while len(list(self._inner.get_node_ids())) < self._num_devices:
                self._wait()
        while not self._inner.may_begin():
            self._wait()
        connected = {*self._devices.look()}
        for part in self._part_of.values():
            if part not in connected:  # it describes itself anew when it is back
                self._shared_round.note_described(part, 0)
        parts = connected - self._clients.dismissed
        self._available = {self._node_of[part] for part in parts}
        return self._available

    def _wait(self) -> None:
        """Wait a moment, and check that the processes are alive."""
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
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

    def offer_differences(self, difference_from: FindDifference | None) -> None:
        self._inner.offer_differences(difference_from)

    def expect_vector(self, message_type: str, num_bytes: int) -> None:
        self._inner.expect_vector(message_type, num_bytes)

    def num_bytes(self) -> tuple[int, int]:
        return self._inner.num_bytes()

    # Messages.

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages; ``replies_to`` sends them."""
        pushed = {ensure_message_id(message): message for message in messages}
        self._waiting |= pushed
        return list(pushed)

    def replies_to(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Send the stored messages of available devices, and yield the replies as they arrive.

        Returns when all these devices have replied. A message to an unavailable device stays
        stored until the device is available again.

        Raises:
            ConnectionLost: a device's process has ended.
        """
        message_ids = [message_id for message_id in message_ids if self._is_reachable(message_id)]
        sent = [self._waiting.pop(id_) for id_ in message_ids if id_ in self._waiting]
        awaited = set(message_ids)
        for number in {int(m.metadata.group_id) for m in sent if _is_plan(m)}:
            self._devices.begin_round(number)
            self._shared_round.number = number
        self._inner.push_messages(sent)
        while awaited:
            before = len(awaited)
            for reply in self._inner.pull_messages(list(awaited)):
                awaited.discard(reply.metadata.reply_to_message_id)
                yield reply
            if len(awaited) == before:
                self._wait()

    def _is_reachable(self, message_id: str) -> bool:
        message = self._waiting.get(message_id)
        return message is None or message.metadata.dst_node_id in self._available

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages and yield the replies; ``timeout`` is in seconds of the virtual clock."""
        message_ids = self.push_messages(messages)
        nodes = [self._waiting[id_].metadata.dst_node_id for id_ in message_ids]
        self._device_records.set_awaited(self._name_of(self._part_of[id_]) for id_ in nodes)
        try:
            for reply in self.pull_messages(message_ids):
                self._device_records.note_answer(
                    self._name_of(self._part_of[reply.metadata.src_node_id])
                )
                yield reply
        finally:
            self._device_records.set_awaited([])
            self._inner.end_exchange(message_ids)

    # The devices' state in a checkpoint, in the same form as the in-process grid's.

    def simulated_state(self) -> dict[str, Any]:
        """Return the state that each device has saved on disk, and the last round.

        Raises:
            StateError: a device's file cannot be read.
        """
        states = {part: self._state_file(part).read() for part in range(self._num_devices)}
        saved = {str(FIRST_NODE_ID + part): state for part, state in states.items() if state}
        rounds = {part: self._shared_round.described(part) for part in range(self._num_devices)}
        described = {part: number for part, number in rounds.items() if number}
        return saved | {FLEET_STATE: self._devices.state(described)}

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        """Write what ``simulated_state`` returned to the files that the devices will read.

        Raises:
            StateError: a file cannot be written, or the devices run already.
        """
        if self._has_started:
            raise StateError("the devices' state cannot be restored while they run")
        for key, device_state in state.items():
            if key == FLEET_STATE:
                for part, number in self._devices.restore(device_state).items():
                    self._shared_round.note_described(part, number)
                self._shared_round.number = device_state["last_round"]
            else:
                self._state_file(int(key) - FIRST_NODE_ID).write(device_state)

    def _state_file(self, part: int) -> StateFile:
        return StateFile(self._clients.state_folder / f"{part}-{self.run.run_id}.json")


def _is_plan(message: Message) -> bool:
    return message.metadata.message_type == TRAIN
