"""Messages on Flower's own grid, which is polled for replies and does not count bytes.

``common.flower.grid`` has our own grids, which yield replies as they arrive.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from headwater.common.flower import records

REPLY_POLL_SECONDS = 0.2


class PolledGrid:
    """Flower's own grid, and the bytes of the messages and replies that went over it."""

    def __init__(self, grid: Grid) -> None:
        self.bytes_up = self.bytes_down = 0
        self._grid = grid
        self._arrived: deque[Message] = deque()
        """Replies to dispatched messages that were pulled together."""

    def exchange(
        self, messages: list[Message], timeout: float | None
    ) -> Iterator[tuple[int, Message]]:
        """Send messages; yield replies as they arrive, each with its message's node.

        The SuperLink's own error replies name the SuperLink's node as their source, so the client
        is found by the id of the message. A message that could not be pushed has no id, and no
        reply to it is awaited.
        """
        awaited = {message_id for message_id in self.dispatch(messages) if message_id}
        node_of = {
            message.metadata.message_id: message.metadata.dst_node_id for message in messages
        }
        end = None if timeout is None else time.monotonic() + timeout
        while awaited and (end is None or time.monotonic() < end):
            replies = list(self._grid.pull_messages(awaited))
            for reply in replies:
                message_id = reply.metadata.reply_to_message_id
                awaited.discard(message_id)
                self._count(reply)
                yield node_of[message_id], reply
            if not replies:
                time.sleep(REPLY_POLL_SECONDS)

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
