"""The fleet of clients as messages on a Flower Grid: ``server.fleet.Fleet`` for every engine.

The grid is the simulator's, our gRPC grid or Flower's own. On our grids an update is added to the
sum straight from the memory in which it arrived; on Flower's grid it is added reply by reply.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from headwater.common.errors import (
    ConnectionLost,
    LateUpdate,
)
from headwater.common.flower import records
from headwater.common.flower.grid import HeadwaterGrid
from headwater.common.flower.sent_model import SentModel
from headwater.common.messages import (
    DescribeRequest,
    DeviceReport,
    EvaluateReport,
    Plan,
    ReadyReport,
    Update,
    WireMessage,
)
from headwater.common.model.parameters import ModelImage
from headwater.server.aggregation.round_seconds import LinkSeconds
from headwater.server.fleet import BranchSum, Counts, Dropout, Reply, Traffic, everyone
from headwater.server.flower.answers import (
    Answer,
    Patience,
    check_in_time,
    read_answer,
    with_seconds,
)
from headwater.server.flower.intermediaries import Intermediaries, SentPlans
from headwater.server.flower.polled_grid import PolledGrid
from headwater.server.flower.registration import Registration
from headwater.server.planning.cohort import ConnectedClients

if TYPE_CHECKING:
    from headwater.common.phases import Phase

log = logging.getLogger(__name__)

JOIN_POLL_SECONDS = 0.05
FIRST_NOTICE_SECONDS, WAITING_NOTICE_SECONDS = 10.0, 60.0
REFUSALS_SECONDS = 1.0  # devices that are refused within this time share a line of the log


class GridFleet:
    """The clients of a Grid, by name."""

    can_repeat_rounds = False

    def __init__(self, grid: Grid, *, intermediaries: Intermediaries | None = None) -> None:
        """``intermediaries`` are the nodes that answer for others; None: there are none."""
        self._grid = grid
        self._own = grid if isinstance(grid, HeadwaterGrid) else None
        self._polled = PolledGrid(grid)
        """Sends and receives in place of ``_own`` on Flower's own grid."""
        self._enough: int | None = None
        """The answers after which the next exchange is not awaited to its limit."""
        self._registration = Registration(grid, intermediaries=intermediaries)
        self._intermediaries = self._registration.intermediaries
        if self._own is not None:
            self._own.learn(self._intermediaries.kinds)
        self._reports: dict[str, DeviceReport] = {}
        self._request: DescribeRequest | None = None
        """The request for a description that newcomers are sent."""

    @property
    def has_virtual_clock(self) -> bool:
        return getattr(self._grid, "has_virtual_clock", False)

    def share_frozen(self, image: ModelImage) -> None:
        self._registration.image = image
        if self._own is not None:
            self._own.share_frozen(image)

    def describe(
        self, request: DescribeRequest, *, min_clients: int, counts: Counts = everyone
    ) -> ConnectedClients:
        self._request = request
        self._intermediaries.begin_round()
        if self._own is not None:
            self._own.expect(request)
            self._own.while_waiting = partial(self._registration.ask_newcomers, request)
        next_notice = time.monotonic() + FIRST_NOTICE_SECONDS
        next_refusals = time.monotonic() + REFUSALS_SECONDS
        refusals = self._registration.refusals
        while True:
            self._registration.update(request)
            reports, refused = self._registration.clients(), self._registration.refused
            may_begin = self._own is None or self._own.may_begin()
            if may_begin and self._registration.may_begin(min_clients=min_clients, counts=counts):
                refusals.log()
                return self._connected(reports)
            is_complete = not getattr(self._grid, "awaits_more", True)
            is_hopeless = is_complete or (self._own is None and not reports)
            if refused and is_hopeless and not self._registration.awaits_newcomers:
                raise refusals.take_error() or next(iter(refused.values()))
            if time.monotonic() >= next_refusals:
                refusals.log()
                next_refusals = time.monotonic() + REFUSALS_SECONDS
            if may_begin and time.monotonic() >= next_notice:
                log.warning(
                    "%s", self._registration.awaited(min_clients=min_clients, counts=counts)
                )
                next_notice = time.monotonic() + WAITING_NOTICE_SECONDS
            time.sleep(JOIN_POLL_SECONDS)

    def _connected(self, now: dict[str, DeviceReport]) -> ConnectedClients:
        before, self._reports = self._reports, now
        return ConnectedClients(
            reports=now,
            described=[name for name, report in now.items() if before.get(name) is not report],
            disconnected=[name for name in before if name not in now],
        )

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        self._registration.ask_again(requests)

    def turn_seconds(self) -> float:
        return 0.0 if self._own is None else self._own.turn_seconds()

    def train(
        self,
        plans: Mapping[str, Plan],
        image: SentModel,
        *,
        num_needed: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Update | ReadyReport | BranchSum | Dropout]:
        start_seconds = time.monotonic()
        sent = self._divided(plans)

        def read(name: str, content: RecordDict) -> Any:
            if name not in sent.direct:
                return sent.read_sum(name, content, image.layout)
            if plans[name].keeps_update:
                ready = records.read(content, ReadyReport)
                if ready.seconds is not None:  # of a real device the grid checks the deadline
                    check_in_time(ready.name, ready.seconds, timeout_seconds)
                return with_seconds(ready, start_seconds)
            update = records.read_update(
                content, plans[name], num_values=image.layout.num_parameters
            )
            check_in_time(update.name, update.report.seconds, timeout_seconds)
            return update

        self._expect_replies(sent.replies_needed(num_needed))
        heads = sent.heads(
            trains=True,
            layout=image.layout,
            num_needed=num_needed,
            timeout_seconds=timeout_seconds,
        )
        answers = self._send_model("train", sent, heads, image, timeout_seconds, read)
        return sent.of_clients(answers)

    def _divided(self, plans: Mapping[str, Plan]) -> SentPlans:
        return self._intermediaries.divide(plans, self._registration.nodes())

    def converse(
        self,
        phase: Phase,
        requests: Mapping[str, WireMessage],
        *,
        vector: bytes | None = None,
        reply_bytes: int = 0,
        num_needed: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Reply | Dropout]:
        def read(_: str, content: RecordDict) -> Reply:
            message = records.read(content, phase.reply)
            return Reply(name=message.name, message=message, vector=records.vector(content))

        message_type = f"query.{phase.action}"
        if self._own is not None:
            self._own.expect_vector(message_type, reply_bytes)
        self._expect_replies(num_needed, is_brief=True)
        array = None if vector is None else records.flat_array(vector, dtype="float32")
        contents = {name: records.content_of(request, array) for name, request in requests.items()}
        return self._send(message_type, contents, phase.action, timeout_seconds, read)

    def evaluate(
        self, plans: Mapping[str, Plan], image: SentModel, *, timeout_seconds: float | None
    ) -> Iterator[EvaluateReport | Dropout]:
        sent = self._divided(plans)

        def read(name: str, content: RecordDict) -> Any:
            if name not in sent.direct:
                return sent.read_tests(name, content)
            return records.read(content, EvaluateReport)

        self._expect_replies(0)
        heads = sent.heads(
            trains=False,
            layout=image.layout,
            num_needed=0,
            timeout_seconds=timeout_seconds,
        )
        answers = self._send_model("evaluate", sent, heads, image, timeout_seconds, read)
        return sent.of_clients(answers)

    def _expect_replies(self, num_needed: int, *, is_brief: bool = False) -> None:
        self._enough = num_needed if is_brief else None
        if self._own is not None:
            self._own.expect_replies(num_needed, is_brief=is_brief)

    def _send_model(
        self,
        message_type: str,
        sent: SentPlans,
        others: Mapping[str, WireMessage],
        image: SentModel,
        timeout_seconds: float | None,
        read: Callable[[str, RecordDict], Answer],
    ) -> Iterator[Answer | Dropout]:
        """Send each plan, and the other nodes their heads, with the model."""
        if self._own is not None:
            self._own.offer_differences(image.difference_from)
        memory = image.buffer().toreadonly()
        array = records.flat_array(memory if self._own else bytes(memory), dtype="uint8")
        heads: Mapping[str, WireMessage] = {**sent.direct, **others}
        contents = {name: records.content_of(head, array) for name, head in heads.items()}
        types = dict.fromkeys(others, sent.kind(message_type))
        round_number = next((plan.round for plan in sent.direct.values()), 0)
        return self._send(message_type, contents, str(round_number), timeout_seconds, read, types)

    def _send(
        self,
        message_type: str,
        contents: Mapping[str, RecordDict],
        group_id: str,
        timeout_seconds: float | None,
        read: Callable[[str, RecordDict], Answer],
        types: Mapping[str, str] | None = None,
    ) -> Iterator[Answer | Dropout]:
        """Send each client its message; yield each answer, and a Dropout per client without one.

        ``types`` are the messages' types where they are not ``message_type``.
        """
        if self._own is None and self.has_virtual_clock:
            # The devices' seconds are checked; an answer that is late here waited for its worker.
            timeout_seconds = self._enough = None
        nodes = self._registration.nodes()
        for left in [name for name in contents if name not in nodes]:
            yield Dropout(name=left, error=ConnectionLost(f"{left} left during the round"))
        awaited = {nodes[name]: name for name in contents if name in nodes}
        answered: set[int] = set()
        messages = [
            Message(
                content,
                nodes[name],
                message_type if types is None else types.get(name, message_type),
                group_id=group_id,
                ttl=timeout_seconds,
            )
            for name, content in contents.items()
            if name in nodes
        ]
        for node, reply in self._exchange(messages, timeout_seconds):
            if reply is None:
                left = awaited.pop(node)
                yield Dropout(name=left, error=ConnectionLost(f"{left} left during the round"))
                continue
            if self._registration.take_reply(reply):
                continue  # a slow newcomer's description: it joins the next round
            name = awaited.pop(node, None)
            if name is None:
                continue
            answered.add(node)
            yield read_answer(name, reply, read, self._registration)
        self._registration.forget_repeats(answered)
        for name in awaited.values():
            limit = "" if timeout_seconds is None else f" within {timeout_seconds} s"
            yield Dropout(name=name, error=LateUpdate(f"{name} did not answer{limit}"))

    def _exchange(
        self, messages: list[Message], timeout: float | None
    ) -> Iterable[tuple[int, Message | None]]:
        """Send messages; yield each reply with the node to which its message was sent.

        None in place of a reply: the node has left.
        """
        if self._own is None:
            return self._polled.exchange(messages, Patience(timeout, enough=self._enough))
        replies = self._own.send_and_receive(messages, timeout=timeout)
        return ((reply.metadata.src_node_id, reply) for reply in replies)

    def traffic(self) -> Traffic:
        if self._own is None:
            return Traffic(bytes_up=self._polled.bytes_up, bytes_down=self._polled.bytes_down)
        bytes_up, bytes_down = self._own.num_bytes()
        links = {
            name: LinkSeconds(down=down, up=up)
            for name, (down, up) in self._own.link_seconds().items()
        }
        return Traffic(bytes_up=bytes_up, bytes_down=bytes_down, links=links)

    def simulated_state(self) -> dict[str, Any]:
        state = getattr(self._grid, "simulated_state", None)
        return state() if state is not None else {}

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        restore = getattr(self._grid, "restore_simulated", None)
        if restore is not None:
            restore(state)
