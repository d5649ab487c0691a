"""A Flower Grid without sockets: messages run one after another in this process.

Replies are computed as they are asked for, so a thousand clients need the memory of one. Each node
keeps a Context of its own, as under Flower. Any ClientApp may be on it and any strategy of Flower's
before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from headwater.client.flower.request import SIMULATED
from headwater.common.errors import SettingsError
from headwater.common.flower import records
from headwater.common.flower.grid import OwnGrid, numbered
from headwater.common.settings.schema import Settings
from headwater.common.transport.limits import framed_bytes
from headwater.server.flower.registration import DESCRIBE
from headwater.simulation.engines.lying import as_told
from headwater.simulation.engines.presence import Presence
from headwater.simulation.engines.vanishing import LastAsked, refusal_of
from headwater.simulation.engines.wire import through_wire
from headwater.simulation.fleet.faults import STAGES
from headwater.simulation.fleet.nodes import FIRST_NODE_ID, GRID
from headwater.simulation.fleet.profiles import with_fleet
from headwater.simulation.fleet.random_events import at_round


class InProcessGrid(OwnGrid):
    """N nodes that run one ClientApp in this process."""

    def __init__(self, app: ClientApp, settings: Settings) -> None:
        """Make the nodes of a run.

        Raises:
            SettingsError: a round would wait for more clients than there are, or the fleet's file
                is wrong.
        """
        super().__init__()
        settings = with_fleet(settings)
        needed, clients = settings.cohort.min_clients, settings.simulation.clients
        if needed > clients:
            raise SettingsError(
                f"a round needs {needed} clients and the simulator has {clients}",
                remedy="lower --min-clients, or raise --clients",
            )
        self._app = app
        self._settings = settings
        self._run_config = settings.to_run_config()
        self._num_nodes = settings.simulation.clients
        self._contexts: dict[int, Context] = {}
        self._waiting: dict[str, Message] = {}
        self._bytes_up = 0
        self._bytes_down = 0
        self._presence = Presence(settings)
        self._present: Collection[int] = range(clients)
        self._asked: defaultdict[int, LastAsked] = defaultdict(LastAsked)

    def num_bytes(self) -> tuple[int, int]:
        """Return what would have gone over the wire."""
        return self._bytes_up, self._bytes_down

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are there for the round behind the last one.

        Raises:
            SettingsError: it was asked MOST_LOOKS times for the same round.
        """
        here = self._presence.look()
        self._present = frozenset(here)
        return [FIRST_NODE_ID + part for part in here]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = {numbered(message): message for message in messages}
        self._waiting |= pushed
        return list(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies to messages that were pushed.

        A device that is asked what it is, and is away, answers when it is back.
        """
        for message_id in list(message_ids):
            if self._is_reached_by(self._waiting[message_id]):
                yield self._deliver(self._waiting.pop(message_id))

    def _is_reached_by(self, message: Message) -> bool:
        is_question = message.metadata.message_type == DESCRIBE
        part = message.metadata.dst_node_id - FIRST_NODE_ID
        return not is_question or part in self._present

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Run the messages in the order in which they are; the timeout is the virtual clock's."""
        for message in messages:
            numbered(message)
            yield self._deliver(message)

    def _deliver(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        context = self._context(node_id)
        is_training = message.metadata.message_type.startswith("train")
        if is_training:
            self._presence.plans_sent(_round_of(message))
            self._asked[node_id] = self._asked[node_id].again(self._presence.last_round)
        self._bytes_down += _num_bytes(message.content)
        if self._settings.simulation.wire:
            message.content = through_wire(message.content)
        if self._has_vanished(node_id, message.metadata.message_type):
            return refusal_of(node_id - FIRST_NODE_ID, message)
        number = self._presence.last_round if is_training else self._presence.last_round + 1
        with at_round(number):
            reply = self._app(message, context)
        if is_training:
            part, run_id = node_id - FIRST_NODE_ID, self.run.run_id
            reply = as_told(message, reply, self._settings, part, run_id=run_id, number=number)
        if reply.has_content():
            self._bytes_up += _num_bytes(reply.content)
            if self._settings.simulation.wire:
                reply.content = through_wire(reply.content)
        return reply

    def _has_vanished(self, node_id: int, message_type: str) -> bool:
        """Tell whether a device answers no more in the round that it was asked to train in."""
        if message_type not in STAGES:
            return False
        part = node_id - FIRST_NODE_ID
        return self._asked[node_id].has_vanished(self._settings, part, message_type)

    def _context(self, node_id: int) -> Context:
        if node_id not in self._contexts:
            part = node_id - FIRST_NODE_ID
            self._contexts[node_id] = Context(
                run_id=self.run.run_id,
                node_id=node_id,
                node_config={
                    "partition-id": part,
                    "num-partitions": self._num_nodes,
                    SIMULATED: True,
                },
                state=RecordDict(),
                run_config=self._run_config,
            )
        return self._contexts[node_id]

    def simulated_state(self) -> dict[str, Any]:
        """Return what each node keeps in its context, for the checkpoint, and the last round."""
        state: dict[str, Any] = {
            str(node_id): {name: records.kept(context, name) for name in context.state}
            for node_id, context in self._contexts.items()
        }
        return state | {GRID: {"last_round": self._presence.last_round}}

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        """Take up what ``simulated_state`` gave."""
        for key, kept_there in state.items():
            if key == GRID:
                self._presence.plans_sent(kept_there["last_round"])
                continue
            context = self._context(int(key))
            for name, kept in kept_there.items():
                records.keep(context, name, kept)


def _round_of(message: Message) -> int:
    """Return the round of a plan: our server sends it as the group, Flower's strategies within."""
    if message.metadata.group_id.isdecimal():
        return int(message.metadata.group_id)
    told = [record.get("server-round") for record in message.content.config_records.values()]
    return next((number for number in told if isinstance(number, int)), 1)


def _num_bytes(content: RecordDict) -> int:
    """Return what a message would take on the wire; of another's app, what its arrays take."""
    if records.HEAD in content:
        return framed_bytes(len(records.head_json(content)), len(records.vector(content) or b""))
    return sum(
        len(array.data) for record in content.array_records.values() for array in record.values()
    )
