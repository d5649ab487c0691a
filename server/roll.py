"""The roll of a fleet: each newcomer is asked what it is, and nobody waits long for the answer.

A device that is slow to describe itself, a Pi that imports torch and tries its task, joins a later
round; one that stays silent is refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from common import records
from common.errors import ConnectionLost, HeadwaterError, IdentityRefused, LateUpdate
from common.own_grid import SILENT_SECONDS, OwnGrid
from common.update import DescribeRequest, DeviceReport

log = logging.getLogger(__name__)

DESCRIBE = "query.describe"
# Those who were asked so recently are waited for, though enough are here: a fleet starts together.
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A newcomer that has not answered yet."""

    node_id: int
    at: float


class Roll:
    """Who is there, as each described itself."""

    def __init__(self, grid: Grid) -> None:
        self.reports: dict[int, DeviceReport] = {}
        self.refused: dict[int, HeadwaterError] = {}
        self._grid = grid
        self._own = grid if isinstance(grid, OwnGrid) else None
        self._asked: dict[str, Asked] = {}

    @property
    def is_settled(self) -> bool:
        """Whether everybody has answered, or has been slow to."""
        # Flower's own engines start a process for each device, all at once: they are waited for.
        patience = SILENT_SECONDS if self._own is None else PATIENCE_SECONDS
        recently = time.monotonic() - patience
        return all(asked.at < recently for asked in self._asked.values())

    def call(self, request: DescribeRequest) -> None:
        """Ask newcomers, take the answers that are here, and forget who is gone."""
        present = set(self._grid.get_node_ids())
        if self._own is None and not self.reports.keys() <= present:
            self.refused.clear()  # a restarted SuperNode is a new one: its name is free again
        self.reports = {n: r for n, r in self.reports.items() if n in present}
        self.refused = {n: e for n, e in self.refused.items() if n in present}
        asked = {newcomer.node_id for newcomer in self._asked.values()}
        new = sorted(present - self.reports.keys() - self.refused.keys() - asked)
        if new:
            self._ask(new, request)
        if self._asked:
            for reply in self._grid.pull_messages(list(self._asked)):
                self.take(reply)
        self._refuse_silent()

    def _ask(self, nodes: Iterable[int], request: DescribeRequest) -> None:
        messages = [
            Message(records.content_of(request), node, DESCRIBE, group_id="describe")
            for node in nodes
        ]
        now = time.monotonic()
        pushed = set(self._grid.push_messages(messages))
        for message in messages:  # what could not be pushed is asked again
            if message.metadata.message_id in pushed:
                asked = Asked(node_id=message.metadata.dst_node_id, at=now)
                self._asked[message.metadata.message_id] = asked

    def take(self, reply: Message) -> bool:
        """Take a reply if it is a newcomer's; False if it is not."""
        asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if asked is None:
            return False
        try:
            report = records.read(records.answered(reply), DeviceReport)
            known = None if self._own is None else self._own.name_of(asked.node_id)
            check_name(report.name, known)
            if any(report.name == other.name for other in self.reports.values()):
                raise IdentityRefused(f"there are two devices of the name {report.name}")
            self.reports[asked.node_id] = report
            log.info("%s joined: %d examples", report.name, report.num_examples)
        except ConnectionLost as error:
            log.warning("a device went before it was known: %s", error)
        except HeadwaterError as error:
            self._refuse(asked.node_id, error)
        return True

    def _refuse_silent(self) -> None:
        limit = SILENT_SECONDS if self._own is None else self._own.silent_seconds
        before = time.monotonic() - limit
        for message_id, asked in list(self._asked.items()):
            if asked.at < before:
                del self._asked[message_id]
                late = LateUpdate(f"nothing heard of the device for {limit:g} s")
                self._refuse(asked.node_id, late)

    def _refuse(self, node_id: int, error: HeadwaterError) -> None:
        log.warning("a device was refused: %s: %s", error.code, error)
        self.refused[node_id] = error
        if self._own is not None:
            self._own.refuse(node_id, error)


def check_name(told: str, known: str | None) -> None:
    """Hold the name that a device gives itself against the one it is known by.

    Raises:
        IdentityRefused: it speaks under another's name.
    """
    if known is not None and told != known:
        raise IdentityRefused(f"{known} sent a message under the name of {told}")
