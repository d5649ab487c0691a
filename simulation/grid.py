"""A Flower Grid without sockets: messages run one after another in this process.

Replies are computed as they are asked for, so a thousand clients need the memory of one. Each node
keeps a Context of its own, as under Flower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.app import IN_PROCESS
from common import records
from common.errors import SettingsError
from common.own_grid import OwnGrid, numbered
from common.settings import Settings
from common.wire import framed_bytes

FIRST_NODE_ID = 1000


class InProcessGrid(OwnGrid):
    """N nodes that run one ClientApp in this process."""

    def __init__(self, app: ClientApp, settings: Settings) -> None:
        """Make the nodes of a run.

        Raises:
            SettingsError: a round would wait for more clients than there are.
        """
        super().__init__()
        needed, clients = settings.cohort.min_clients, settings.simulation.clients
        if needed > clients:
            raise SettingsError(
                f"a round needs {needed} clients and the simulator has {clients}",
                remedy="lower --min-clients, or raise --clients",
            )
        self._app = app
        self._run_config = settings.to_run_config()
        self._num_nodes = settings.simulation.clients
        self._contexts: dict[int, Context] = {}
        self._waiting: dict[str, Message] = {}
        self._bytes_up = 0
        self._bytes_down = 0

    def num_bytes(self) -> tuple[int, int]:
        """Return what would have gone over the wire."""
        return self._bytes_up, self._bytes_down

    def get_node_ids(self) -> Iterable[int]:
        return range(FIRST_NODE_ID, FIRST_NODE_ID + self._num_nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = {numbered(message): message for message in messages}
        self._waiting |= pushed
        return list(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for message_id in list(message_ids):
            yield self._deliver(self._waiting.pop(message_id))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Run the messages in the order in which they are; the timeout is the virtual clock's."""
        for message in messages:
            numbered(message)
            yield self._deliver(message)

    def _deliver(self, message: Message) -> Message:
        context = self._context(message.metadata.dst_node_id)
        self._bytes_down += framed_bytes(
            len(records.head_json(message.content)), len(records.vector(message.content) or b"")
        )
        reply = self._app(message, context)
        if reply.has_content():
            self._bytes_up += framed_bytes(
                len(records.head_json(reply.content)), len(records.vector(reply.content) or b"")
            )
        return reply

    def _context(self, node_id: int) -> Context:
        if node_id not in self._contexts:
            part = node_id - FIRST_NODE_ID
            self._contexts[node_id] = Context(
                run_id=self.run.run_id,
                node_id=node_id,
                node_config={
                    "partition-id": part,
                    "num-partitions": self._num_nodes,
                    IN_PROCESS: True,
                },
                state=RecordDict(),
                run_config=self._run_config,
            )
        return self._contexts[node_id]

    def simulated_state(self) -> dict[str, Any]:
        """Return what each node keeps in its context, for the checkpoint."""
        return {
            str(node_id): {name: records.kept(context, name) for name in context.state}
            for node_id, context in self._contexts.items()
        }

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        """Take up what ``simulated_state`` gave."""
        for node_id, states in state.items():
            context = self._context(int(node_id))
            for name, kept in states.items():
                records.keep(context, name, kept)
