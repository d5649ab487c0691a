"""The roll of a fleet: each newcomer is asked what it is, and nobody waits long for the answer.

A device that is slow to describe itself, a Pi that imports torch and tries its task, joins a later
round; one that stays silent is refused. A device that was left out of a round is told why and asked
anew: its answer takes the place of the old one whenever it comes, and nobody waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from headwater.common.errors import (
    ConnectionLost,
    CorruptUpdate,
    HeadwaterError,
    IdentityRefused,
    LateUpdate,
)
from headwater.common.flower import records
from headwater.common.flower.grid import SILENT_SECONDS, OwnGrid
from headwater.common.messages import DescribeRequest, DeviceReport

log = logging.getLogger(__name__)

DESCRIBE = "query.describe"
# Those who were asked so recently are waited for, though enough are here: a fleet starts together.
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingDescription:
    """A device that has not answered yet; one that is known already is asked again."""

    node_id: int
    at: float
    is_again: bool = False


class Registration:
    """Who is there, as each described itself."""

    def __init__(self, grid: Grid) -> None:
        self.reports: dict[int, DeviceReport] = {}
        self.refused: dict[int, HeadwaterError] = {}
        self._grid = grid
        self._own = grid if isinstance(grid, OwnGrid) else None
        self._asked: dict[str, PendingDescription] = {}

    @property
    def is_settled(self) -> bool:
        """Whether everybody has answered, or has been slow to."""
        # Flower's own engines start a process for each device, all at once: they are waited for.
        patience = SILENT_SECONDS if self._own is None else PATIENCE_SECONDS
        recently = time.monotonic() - patience
        return all(asked.is_again or asked.at < recently for asked in self._asked.values())

    def call(self, request: DescribeRequest) -> None:
        """Ask newcomers, take the answers that are here, and forget who is gone."""
        present = set(self._grid.get_node_ids())
        if self._own is None and not self.reports.keys() <= present:
            self.refused.clear()  # a restarted SuperNode is a new one: its name is free again
        self.reports = {n: r for n, r in self.reports.items() if n in present}
        self.refused = {n: e for n, e in self.refused.items() if n in present}
        asked = {newcomer.node_id for newcomer in self._asked.values()}
        new = sorted(present - self.reports.keys() - self.refused.keys() - asked)
        self._ask(dict.fromkeys(new, request))
        if self._asked:
            for reply in self._grid.pull_messages(list(self._asked)):
                self.take(reply)
        self._refuse_silent()

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        """Ask devices that are known, by name; those that have not answered yet are not asked."""
        asked = {one.node_id for one in self._asked.values()}
        nodes = {report.name: node for node, report in self.reports.items() if node not in asked}
        found = {nodes[name]: request for name, request in requests.items() if name in nodes}
        self._ask(found, is_again=True)

    def forget_questions(self, nodes: Collection[int]) -> None:
        """Forget that known devices were asked again: they have answered what came behind it."""
        self._asked = {
            message_id: asked
            for message_id, asked in self._asked.items()
            if not (asked.is_again and asked.node_id in nodes)
        }

    def _ask(self, requests: Mapping[int, DescribeRequest], *, is_again: bool = False) -> None:
        if not requests:
            return
        messages = [
            Message(records.content_of(request), node, DESCRIBE, group_id="describe")
            for node, request in requests.items()
        ]
        now = time.monotonic()
        pushed = set(self._grid.push_messages(messages))
        for message in messages:  # what could not be pushed is asked again
            if message.metadata.message_id in pushed:
                asked = PendingDescription(
                    node_id=message.metadata.dst_node_id, at=now, is_again=is_again
                )
                self._asked[message.metadata.message_id] = asked

    def take(self, reply: Message) -> bool:
        """Take a reply if it is to a question of the roll; False if it is not."""
        asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if asked is None:
            return False
        try:
            report = records.read(records.answered(reply), DeviceReport)
            self._check_name(asked.node_id, report.name)
        except ConnectionLost as error:
            log.warning("a device went before it was known: %s", error)
        except HeadwaterError as error:
            if asked.is_again and not isinstance(error, CorruptUpdate | IdentityRefused):
                log.warning("a device stays as it was: %s: %s", error.code, error)
            else:
                self._refuse(asked.node_id, error)
        else:
            is_new = asked.node_id not in self.reports
            self.reports[asked.node_id] = report
            if is_new:
                log.info("%s joined: %d examples", report.name, report.num_examples)
            else:
                log.info("%s, which was left out, described itself anew", report.name)
        return True

    def _check_name(self, node_id: int, name: str) -> None:
        """Hold the name that a device gives itself against what is known.

        Raises:
            IdentityRefused: it speaks under another's name, or has changed its own.
        """
        check_name(name, None if self._own is None else self._own.name_of(node_id))
        known = self.reports.get(node_id)
        check_name(name, None if known is None else known.name)
        if any(name == other.name for node, other in self.reports.items() if node != node_id):
            raise IdentityRefused(f"there are two devices of the name {name}")

    def _refuse_silent(self) -> None:
        limit = SILENT_SECONDS if self._own is None else self._own.silent_seconds
        before = time.monotonic() - limit
        for message_id, asked in list(self._asked.items()):
            if asked.at < before:
                del self._asked[message_id]
                if asked.is_again:
                    continue  # it may be asked once more
                late = LateUpdate(f"nothing heard of the device for {limit:g} s")
                self._refuse(asked.node_id, late)

    def _refuse(self, node_id: int, error: HeadwaterError) -> None:
        self.reports.pop(node_id, None)
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
