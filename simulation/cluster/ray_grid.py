"""Flower's grid as a simulation on Ray uses it: to be stopped, one message at a time to a device.

A worker of Flower's takes a device's state, runs the app, and stores the state at its end. A round
may go on before its last answer: of two messages that one device then answered at the same time,
the one that ended last would undo what the other had stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from headwater.common.errors import WorkerDied
from headwater.common.flower.grid import CLIENT_APP_FAILED, Run

POLL_SECONDS = 0.05
MAX_SHOWN = 300  # characters of either end of Ray's message about a failed worker


class Stopped(Exception):
    """Ends the ServerApp after Ctrl-C or an error of the engine."""


class RayGrid(Grid):
    """Flower's grid; raises ``Stopped`` once a stop is requested.

    A message waits until its device has answered the one before; the rounds push and pull.
    """

    awaits_more = False
    has_virtual_clock = True

    def __init__(self, grid: Grid, stop_requested: threading.Event) -> None:
        self._grid = grid
        self._stop_requested = stop_requested
        self._unanswered: dict[str, int] = {}
        """The node of each message that it has not answered, by the message's id."""
        self._kept: dict[str, Message] = {}
        """Replies that came while another message waited, by the id of what they answer."""

    def _checked(self) -> Grid:
        if self._stop_requested.is_set():
            raise Stopped
        return self._grid

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return self._checked().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = list(messages)
        self._await_answers({message.metadata.dst_node_id for message in pushed})
        ids = list(self._checked().push_messages(pushed))
        nodes = {one.metadata.message_id: one.metadata.dst_node_id for one in pushed}
        self._unanswered |= {id_: node for id_, node in nodes.items() if id_ in ids}
        return ids

    def _await_answers(self, nodes: set[int]) -> None:
        """Wait until these nodes have answered all that they were sent; keep the replies."""
        while open_ids := [id_ for id_, node in self._unanswered.items() if node in nodes]:
            for reply in self._pull(open_ids):
                self._kept[reply.metadata.reply_to_message_id] = reply
            if any(id_ in self._unanswered for id_ in open_ids):
                time.sleep(POLL_SECONDS)

    def _pull(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for reply in _check_workers(self._checked().pull_messages(message_ids)):
            self._unanswered.pop(reply.metadata.reply_to_message_id, None)
            yield reply

    def pull_messages(  # type: ignore[override] # the first parameter has two names
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        wanted = list((message_ids if reply_to_message_ids is None else reply_to_message_ids) or ())
        kept = [self._kept.pop(id_) for id_ in wanted if id_ in self._kept]
        answered = {reply.metadata.reply_to_message_id for reply in kept}
        return [*kept, *self._pull([id_ for id_ in wanted if id_ not in answered])]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return _check_workers(self._checked().send_and_receive(messages, timeout=timeout))


def _check_workers(replies: Iterable[Message]) -> Iterator[Message]:
    """Yield the replies of apps, including their errors.

    Flower continues to send messages to a worker that has died, and returns each immediately as an
    error; a run that continued would lose most of its devices.

    Raises:
        WorkerDied: a reply is Flower's own error, for a worker that could not run the app.
    """
    for reply in replies:
        if reply.has_error() and reply.error.code == CLIENT_APP_FAILED:
            raise WorkerDied(
                f"a worker of Ray failed: {_shorten(reply.error.reason or '')}",
                remedy="every machine of the cluster needs the same Headwater, Python and "
                "packages, and memory for a worker per core; the completed rounds are saved",
            )
        yield reply


def _shorten(text: str) -> str:
    """Return a text on one line; of a long one both ends, which name the failure and its cause."""
    line = " ".join(text.split())
    return line if len(line) <= 2 * MAX_SHOWN else f"{line[:MAX_SHOWN]} ... {line[-MAX_SHOWN:]}"
