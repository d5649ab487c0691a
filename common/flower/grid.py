"""The Flower Grid that our transports share, and the one place for Flower's private parts.

A grid of ours hands arrays over as views and yields replies one by one, so that the server holds
one update at a time. Flower builds a ``Message`` only inside a run that it knows: the process-wide
``TaskIdentity`` must be set, and every message needs an id.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from uuid import uuid4

# Before flwr is imported: no look-up leaves the machine, and nothing is installed at run time.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from headwater.common.errors import HeadwaterError
from headwater.common.messages import DescribeRequest

SERVER_NODE_ID = 1
# A device that was asked to describe itself and is silent so long is refused.
SILENT_SECONDS = 300.0


class OwnGrid(Grid):
    """What the in-process grid and the gRPC grid have in common."""

    awaits_more = False
    """Whether further nodes may come by themselves."""
    silent_seconds = SILENT_SECONDS

    def __init__(self) -> None:
        self._run: Run | None = None

    def set_run(self, run: Run) -> None:
        """Enter a run; messages can be built from here on."""
        self._run = run
        enter_run(run.run_id)

    def enter_run(self, run_id: int) -> None:
        """Enter the run of this id."""
        self.set_run(Run.create_empty(run_id))

    @property
    def run(self) -> Run:
        """The run, once it is entered."""
        if self._run is None:
            raise RuntimeError("the grid has no run: call enter_run first")
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message; Flower itself builds them directly by now."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    @abstractmethod
    def num_bytes(self) -> tuple[int, int]:
        """Return the bytes that went up and down so far."""

    def may_begin(self) -> bool:
        """Whether the next round may begin, as far as the server's operator is concerned.

        What it raises ends the run behind its last round.
        """
        return True

    def turn_seconds(self) -> float:
        """Return how long the rounds take over one update; 0 where that is not measured."""
        return 0.0

    def expect(self, request: DescribeRequest) -> None:
        """Learn what devices must agree on, before any is let in."""

    def expect_beside(self, message_type: str, num_bytes: int) -> None:
        """Learn how many bytes come beside each reply to messages of a type."""

    def name_of(self, node_id: int) -> str | None:
        """Return the name that a node proved or claimed when it connected, if it did."""
        return None

    def refuse(self, node_id: int, error: HeadwaterError) -> None:
        """Turn a node away for good."""

    @abstractmethod
    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages and yield the replies one by one, as they come.

        The arrays of a reply are valid until the next reply is asked for.
        """


def enter_run(run_id: int) -> None:
    """Tell Flower which run this process is in; messages can be built from here on."""
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SERVER_NODE_ID


def numbered(message: Message) -> str:
    """Give a message an id, as Flower's SuperLink would, unless it has one, and return it."""
    message_id = message.metadata.message_id or str(uuid4())
    message.metadata.__dict__["_message_id"] = message_id
    return message_id
