"""Messages on Flower's own grid, which is polled for replies and does not count bytes.

``common.flower.grid`` has our own grids, which yield replies as they arrive.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from headwater.common.flower import records
from headwater.server.flower.answers import Patience

REPLY_POLL_SECONDS = 0.2


class PolledGrid:
    """Flower's own grid, and the bytes of the messages and replies that went over it."""

    def __init__(self, grid: Grid) -> None:
        self.bytes_up = self.bytes_down = 0
        self._grid = grid
        self._arrived: deque[Message] = deque()
        """Replies to dispatched messages that were pulled together."""

    def exchange(
        self, messages: list[Message], patience: Patience
    ) -> Iterator[tuple[int, Message | None]]:
        """Send messages; yield replies as they arrive, each with its message's node.

        None in place of a reply: the node has left. The SuperLink's own error replies name the
        SuperLink's node as their source, so the client is found by the id of the message. A message
        that could not be pushed has no id, and no reply to it is awaited.
        """
        pushed = {message_id for message_id in self.dispatch(messages) if message_id}
        awaited = {
            message.metadata.message_id: message.metadata.dst_node_id
            for message in messages
            if message.metadata.message_id in pushed
        }
        while awaited and patience.left_seconds > 0:
            left = self.left_among(awaited.values())
            replies = list(self._grid.pull_messages(awaited))
            for reply in replies:
                self._count(reply)
                patience.note_answer()
                yield awaited.pop(reply.metadata.reply_to_message_id), reply
            for message_id in [id_ for id_, node in awaited.items() if node in left]:
                yield awaited.pop(message_id), None
            if not replies and awaited:
                time.sleep(REPLY_POLL_SECONDS)

    def left_among(self, nodes: Iterable[int]) -> set[int]:
        """Return the nodes that are connected no more; from 1.43 on no error reply says so.

        Ask before the replies are pulled: a node may leave after its reply.
        """
        return set(nodes) - set(self._grid.get_node_ids())

    def dispatch(self, messages: list[Message]) -> list[str]:
        """Send messages without awaiting replies; return their ids."""
        self.bytes_down += sum(_num_bytes(message.content) for message in messages)
        return list(self._grid.push_messages(messages))

    def next_reply(self, message_ids: Collection[str]) -> Message | None:
        """Return the next reply to a dispatched message; None if none arrives in a short while."""
        if not self._arrived:
            self._arrived.extend(self._grid.pull_messages(message_ids))
        if not self._arrived:
            time.sleep(REPLY_POLL_SECONDS)
            return None
        reply = self._arrived.popleft()
        self._count(reply)
        return reply

    def _count(self, reply: Message) -> None:
        self.bytes_up += _num_bytes(reply.content) if reply.has_content() else 0


def _num_bytes(content: RecordDict) -> int:
    return len(records.head_json(content)) + len(records.vector(content) or b"")
