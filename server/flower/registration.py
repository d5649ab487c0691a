"""Registration of clients: each new node is asked to describe itself, without blocking a round.

A device that lacks the frozen part of the model is sent it then, and joins when it has it.

A node may answer for devices of its own, and lists them (``server.flower.intermediaries``).

A device that is slow to answer, for example a Raspberry Pi that imports torch and tests its task,
joins a later round. A known device can be asked again, for example after it was left out of a
round: its answer replaces the old one whenever it arrives.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from flwr.app import Message
from flwr.serverapp import Grid
from rich.filesize import decimal

from headwater.common.errors import (
    ConnectionLost,
    CorruptUpdate,
    FrozenPartMissing,
    HeadwaterError,
    IdentityRefused,
    LateUpdate,
    TooLittleTime,
)
from headwater.common.flower import records
from headwater.common.flower.grid import HeadwaterGrid
from headwater.common.messages import DescribeRequest, DeviceReport, FrozenPart, FrozenReport
from headwater.common.model.parameters import ModelImage
from headwater.common.wording import counted, duration_text
from headwater.server.fleet import Counts, everyone
from headwater.server.flower.intermediaries import Intermediaries
from headwater.server.refused_devices import RefusedDevices

log = logging.getLogger(__name__)

DESCRIBE, FROZEN = "query.describe", "query.frozen"
# A device that does not describe itself within this time is late.
SILENT_SECONDS = 300.0
# So is one that receives the frozen part more slowly than this.
LEAST_BYTES_PER_SECOND = 32 << 10
# One that has received it so often within this time is sent it no more: it is up to gigabytes.
MAX_FROZEN, FROZEN_SECONDS = 3, 600.0
# The first round waits so long for newcomers, even if enough clients have joined.
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingDescription:
    """A request for a description that has not been answered yet."""

    node_id: int
    at: float
    is_repeat: bool = False
    """Whether the node is known already and was asked again."""
    report: DeviceReport | None = None
    """The description of a node that is sent the frozen part of the model."""
    more_seconds: float = 0.0
    """The time for the frozen part, beyond that for a description."""
    is_late: bool = False
    """Whether the log says that the answer is late."""


class Registration:
    """The nodes of a grid and their descriptions."""

    def __init__(
        self,
        grid: Grid,
        *,
        clock: Callable[[], float] = time.monotonic,
        intermediaries: Intermediaries | None = None,
    ) -> None:
        """``intermediaries`` are the nodes that answer for others; None: there are none."""
        self.reports: dict[int, DeviceReport] = {}
        self.refused: dict[int, HeadwaterError] = {}
        self.refusals = RefusedDevices()
        self.image: ModelImage | None = None
        """The model whose frozen part is sent to the devices that lack it."""
        self.busy: set[int] = set()
        """Nodes that work on plans of asynchronous rounds: no further message interrupts them."""
        self.intermediaries = intermediaries or Intermediaries()
        self._grid = grid
        self._own = grid if isinstance(grid, HeadwaterGrid) else None
        self._pending: dict[str, PendingDescription] = {}
        self._frozen_at: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=MAX_FROZEN)
        )
        """When each device had received the frozen part, the last few times."""
        self._present: set[int] = set()
        self._clock = clock
        self._has_begun = False
        self._enough_since: float | None = None

    def may_begin(self, *, min_clients: int, counts: Counts = everyone) -> bool:
        """Return whether a round may begin with the clients that have described themselves.

        The first round waits a little for newcomers that have not answered yet, because the
        devices of a fleet start at about the same time; the wait ends even if more newcomers come.
        No later round waits for a newcomer. ``counts``: see ``Fleet.describe``.
        """
        if self.intermediaries.awaited() or self._num_clients(counts) < min_clients:
            return False
        if not self._has_begun:
            now = self._clock()
            since = self._enough_since = now if self._enough_since is None else self._enough_since
            # Flower's own engines start all devices' processes at once, so they get more time.
            patience = SILENT_SECONDS if self._own is None else PATIENCE_SECONDS
            self._has_begun = now - since >= patience or all(
                one.is_repeat or one.at < now - patience for one in self._pending.values()
            )
        return self._has_begun

    def awaited(self, *, min_clients: int, counts: Counts = everyone) -> str:
        """Say what a round waits for that may not begin."""
        number = self._num_clients(counts)
        if number < min_clients:
            num_without = len(self.clients()) - number
            more = f", without {num_without} that this round is not for" if num_without else ""
            return f"waiting: {number} of {counted(min_clients, 'client')} connected{more}"
        if names := self.intermediaries.awaited():
            return f"waiting for the list of devices of {', '.join(names)}"
        number = sum(not one.is_repeat for one in self._pending.values())
        return f"waiting for {counted(number, 'newcomer')} to answer"

    def _num_clients(self, counts: Counts) -> int:
        return sum(map(counts, self.clients().values()))

    def clients(self) -> dict[str, DeviceReport]:
        """Return the descriptions of all clients by name: the nodes' own, and the aggregators'.

        A listed device that has the name of a node, aggregators included, is none of them.
        """
        own = {one.name: one for one in self.reports.values() if not one.is_aggregator}
        if len(own) == len(self.reports):
            return own
        return {**self.intermediaries.clients(one.name for one in self.reports.values()), **own}

    def nodes(self) -> dict[str, int]:
        """Return the node of each client, and of each aggregator, by name."""
        return {report.name: node for node, report in self.reports.items()}

    @property
    def awaits_newcomers(self) -> bool:
        """Whether some newcomer that is connected has not answered yet."""
        waiting = (one for one in self._pending.values() if not one.is_repeat)
        return any(one.node_id in self._present for one in waiting)

    def ask_newcomers(self, request: DescribeRequest) -> None:
        """Ask nodes that are new, in the middle of a round: their answers are taken as they arrive.

        So a device that connects during a round is in the next one. Nothing waits for it.
        """
        self._ask_new(set(self._grid.get_node_ids()), request)

    def _ask_new(self, present: set[int], request: DescribeRequest) -> None:
        asked = {one.node_id for one in self._pending.values()}
        new = sorted(present - self.reports.keys() - self.refused.keys() - asked)
        self._ask(dict.fromkeys(new, request))

    def update(self, request: DescribeRequest) -> None:
        """Ask new nodes, take the answers that have arrived, and forget nodes that have left."""
        connected = set(self._grid.get_node_ids())
        present = self._present = connected | self.busy
        if self._own is None and not self.reports.keys() <= present:
            self.refused.clear()  # a restarted SuperNode is a new node: its name is free again
        self.reports = {n: r for n, r in self.reports.items() if n in present}
        self.refused = {n: e for n, e in self.refused.items() if n in present}
        self._ask_new(present, request)
        if awaited := [*self._pending, *self.intermediaries.pending]:
            for reply in self._grid.pull_messages(awaited):
                self.take_reply(reply)
        self._forget_left(connected)
        self._note_silent()
        # After the replies: a round waits for the list of an aggregator that has just joined.
        self.intermediaries.follow({n: r.name for n, r in self.reports.items() if r.is_aggregator})
        self.intermediaries.ask(request)

    def _forget_left(self, connected: set[int]) -> None:
        """Forget the requests to nodes of Flower's own grid that have left and will not answer."""
        for message_id, one in list(self._pending.items()):
            if self._own is None and one.node_id not in connected:
                del self._pending[message_id]
                if not one.is_repeat:
                    log.warning("a device left before it described itself")

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        """Ask known devices again, by name; skips devices that have not answered yet."""
        self.intermediaries.describe_again(requests)
        asked = {one.node_id for one in self._pending.values()}
        nodes = {report.name: node for node, report in self.reports.items() if node not in asked}
        self._ask(
            {nodes[name]: request for name, request in requests.items() if name in nodes},
            is_repeat=True,
        )

    def forget_repeats(self, nodes: Collection[int]) -> None:
        """Forget repeated requests to nodes that have answered a later message."""
        self._pending = {
            message_id: one
            for message_id, one in self._pending.items()
            if not (one.is_repeat and one.node_id in nodes)
        }

    def note_error(self, name: str, error: HeadwaterError) -> None:
        """Forget a client that must describe itself again after this error in place of an answer.

        A client that returns over our stream describes itself again. On Flower's own engines a node
        stays the same, and a restarted SuperNode is a new one. A client that lost the frozen part
        is sent it again when it has described itself; one that needs more time tells its speed, and
        is in no round before: a plan would overtake its answer.
        """
        has_left = isinstance(error, ConnectionLost) and self._own is not None
        if has_left or isinstance(error, FrozenPartMissing | TooLittleTime):
            self.reports.pop(self.nodes().get(name, 0), None)

    def _ask(self, requests: Mapping[int, DescribeRequest], *, is_repeat: bool = False) -> None:
        if not requests:
            return
        messages = [
            Message(records.content_of(request), node, DESCRIBE, group_id="describe")
            for node, request in requests.items()
        ]
        now = self._clock()
        pushed = {message_id for message_id in self._grid.push_messages(messages) if message_id}
        for message in messages:  # a message that could not be pushed is sent again later
            if message.metadata.message_id in pushed:
                self._pending[message.metadata.message_id] = PendingDescription(
                    node_id=message.metadata.dst_node_id, at=now, is_repeat=is_repeat
                )

    def take_reply(self, reply: Message) -> bool:
        """Take a description, or an aggregator's list; return False for any other reply."""
        pending = self._pending.pop(reply.metadata.reply_to_message_id, None)
        if pending is None:
            return self.intermediaries.take(reply)
        try:
            report = self._report_of(reply, pending)
        except ConnectionLost as error:
            log.warning("a device left before it described itself: %s", error)
        except HeadwaterError as error:
            if pending.is_repeat and not isinstance(error, CorruptUpdate | IdentityRefused):
                log.warning("a device keeps its old description: %s: %s", error.code, error)
            else:
                self._refuse(pending.node_id, error)
        else:
            if report.lacks_frozen and self._loses_frozen(report.name):
                lost = f"{MAX_FROZEN} times in the last {duration_text(FROZEN_SECONDS)}"
                self._refuse(
                    pending.node_id,
                    FrozenPartMissing(
                        f"{report.name} has received the frozen part of the model {lost}, and lost "
                        "it each time"
                    ),
                )
                return True
            if report.lacks_frozen:
                self._send_frozen(report, pending)
                return True
            is_new = pending.node_id not in self.reports
            self.reports[pending.node_id] = report
            if is_new:
                if report.is_aggregator:
                    log.info("%s joined: aggregator", report.name)
                    return True
                number = report.num_examples
                told = "requires masks" if number is None else counted(number, "example")
                told += ", computes in bfloat16" if report.precision == "bfloat16" else ""
                log.info("%s joined: %s", report.name, told)
            else:
                log.info("%s has a new description", report.name)
        return True

    def _report_of(self, reply: Message, pending: PendingDescription) -> DeviceReport:
        """Return the description in a reply, or the one before a frozen part that has arrived.

        Raises:
            HeadwaterError: the reply is an error, malformed, or under another name; or it is of an
                aggregator, and the run has none.
        """
        content = records.reply_content(reply)
        if pending.report is None:
            report = records.read(content, DeviceReport)
            self._check_name(pending.node_id, report.name)
            if report.is_aggregator:
                self.intermediaries.admit(report.name)
            return report
        done = records.read(content, FrozenReport)
        check_name(done.name, pending.report.name)
        if self.image is None or done.digest != self.image.frozen_digest:
            raise CorruptUpdate(f"{done.name} has another frozen part of the model")
        self._frozen_at[done.name].append(self._clock())
        return pending.report.model_copy(update={"lacks_frozen": False})

    def _loses_frozen(self, name: str) -> bool:
        """Return whether a device has received the frozen part again and again: it is gigabytes."""
        received = self._frozen_at.get(name)
        if received is None or len(received) < MAX_FROZEN:
            return False
        return received[0] > self._clock() - FROZEN_SECONDS

    def _send_frozen(self, report: DeviceReport, pending: PendingDescription) -> None:
        """Send a device the frozen part of the model; its answer completes its description.

        A device that is known already takes part in no round until it has answered.
        """
        assert self.image is not None  # the request for a description has its digest
        memory = self.image.frozen_U8.numpy().data.toreadonly()
        digest, num_bytes = self.image.frozen_digest, len(memory)
        log.info("%s is sent the frozen part of the model, %s", report.name, decimal(num_bytes))
        array = records.flat_array(memory if self._own else bytes(memory), dtype="uint8")
        content = records.content_of(FrozenPart(digest=digest), array)
        message = Message(content, pending.node_id, FROZEN, group_id="describe")
        self.reports.pop(pending.node_id, None)
        pushed = list(self._grid.push_messages([message]))  # which gives the message its id
        if message.metadata.message_id and message.metadata.message_id in pushed:
            self._pending[message.metadata.message_id] = PendingDescription(
                node_id=pending.node_id,
                at=self._clock(),
                report=report,
                more_seconds=num_bytes / LEAST_BYTES_PER_SECOND,
            )

    def _check_name(self, node_id: int, name: str) -> None:
        """Check the name in a device's description.

        Raises:
            IdentityRefused: the node has another name, or the name belongs to another node.
        """
        check_name(name, None if self._own is None else self._own.name_of(node_id))
        known = self.reports.get(node_id)
        check_name(name, None if known is None else known.name)
        if any(name == other.name for node, other in self.reports.items() if node != node_id):
            raise IdentityRefused(f"two devices have the name {name}")

    def _note_silent(self) -> None:
        """Warn of newcomers that take long, once, and refuse them on Flower's own engines.

        On our stream a device is alive while it is connected, and its check of a large model may
        take any time; Flower does not say whether a node still works on a message.
        """
        now = self._clock()
        for message_id, one in list(self._pending.items()):
            limit = SILENT_SECONDS + one.more_seconds
            if one.is_late or one.at + limit >= now:
                continue
            del self._pending[message_id]
            if one.is_repeat:
                continue  # it keeps its old description and may be asked again
            what = "described itself" if one.report is None else "taken the frozen part"
            if self._own is None:
                error = f"the device has not {what} within {limit:g} s"
                self._refuse(one.node_id, LateUpdate(error, remedy="look into the log of the node"))
                continue
            self._pending[message_id] = replace(one, is_late=True)
            name = self._own.name_of(one.node_id) or "a device"
            log.warning("%s has not %s within %g s; it joins when it has", name, what, limit)

    def _refuse(self, node_id: int, error: HeadwaterError) -> None:
        self.reports.pop(node_id, None)
        name = None if self._own is None else self._own.name_of(node_id)
        self.refusals.add(name, error)
        self.refused[node_id] = error
        if self._own is not None:
            self._own.refuse(node_id, error)


def check_name(name: str, expected: str | None) -> None:
    """Check the name in a device's message; ``expected`` is None while its name is unknown.

    Raises:
        IdentityRefused: it is not the expected name.
    """
    if expected is not None and name != expected:
        raise IdentityRefused(f"{expected} sent a message under the name of {name}")
