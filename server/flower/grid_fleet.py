"""The fleet of clients as messages on a Flower Grid: ``server.fleet.Fleet`` for every engine.

The grid is the simulator's, our gRPC grid or Flower's own. On our grids an update is added to the
sum straight from the memory in which it arrived; on Flower's grid it is added reply by reply.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from flwr.app import Array, Message, RecordDict
from flwr.serverapp import Grid

from headwater.common.branch_messages import BranchHead, BranchPlans
from headwater.common.compression.model_difference import SentModel
from headwater.common.errors import (
    AggregatorRefused,
    ConnectionLost,
    FrozenPartMissing,
    HeadwaterError,
    LateUpdate,
)
from headwater.common.flower import records
from headwater.common.flower.grid import HeadwaterGrid
from headwater.common.messages import (
    DescribeRequest,
    DeviceReport,
    EvaluateReport,
    Plan,
    ReadyReport,
    Update,
)
from headwater.common.model.parameters import ModelImage
from headwater.common.secagg.protocol import Phase, Request
from headwater.common.system.bounded_memory import BoundedMemory
from headwater.server.aggregation.round_seconds import LinkSeconds
from headwater.server.fleet import BranchOrder, BranchSum, Dropout, Reply, Traffic
from headwater.server.flower.branches import DividedPlans
from headwater.server.flower.registration import RefusalOfBranch, Registration, check_name
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.tree.branch_wire import (
    BranchOrders,
    BranchReports,
    branch_plans,
    read_evaluation,
    read_sum,
    replies_needed,
)

log = logging.getLogger(__name__)

Answer = TypeVar(
    "Answer", bound=Update | ReadyReport | BranchSum | EvaluateReport | BranchReports | Reply
)

JOIN_POLL_SECONDS = 0.05
FIRST_NOTICE_SECONDS, WAITING_NOTICE_SECONDS = 10.0, 60.0
REPLY_POLL_SECONDS = 0.2
MODELS_RAM_BYTES = 1 << 30
REFUSALS_SECONDS = 1.0  # devices that are refused within this time share a line of the log


def no_branches(name: str) -> AggregatorRefused:
    """Refuse any aggregator."""
    return AggregatorRefused(f"{name}: this server has no aggregators")


class GridFleet:
    """The clients of a Grid, by name."""

    def __init__(
        self,
        grid: Grid,
        *,
        branch_order: BranchOrders | None = None,
        refusal_of_branch: RefusalOfBranch = no_branches,
    ) -> None:
        """``branch_order`` makes the orders of aggregators that are not refused."""
        self._grid = grid
        self._own = grid if isinstance(grid, HeadwaterGrid) else None
        self._registration = Registration(grid, refusal_of_branch=refusal_of_branch)
        self._branch_order = branch_order
        self._reports: dict[str, DeviceReport] = {}
        self._flower_bytes_up = self._flower_bytes_down = 0
        self._request: DescribeRequest | None = None
        """The request for a description that newcomers are sent."""
        self._dispatched: dict[str, str] = {}
        """The clients that work on dispatched plans, by the plan's message."""
        self._readers: dict[str, Callable[[str, RecordDict], Update | ReadyReport]] = {}
        """Reads the answer to the last plan that each client was dispatched."""
        self._arrived: deque[Message] = deque()
        """Replies from Flower's own grid that were pulled together."""
        self._given_up: deque[Dropout] = deque()
        self._model: tuple[int, Array] | None = None
        """The copy of the model that was dispatched last, and the number of its step."""
        self._copies = BoundedMemory(MODELS_RAM_BYTES)

    @property
    def has_virtual_clock(self) -> bool:
        return self._own is not None and self._own.has_virtual_clock

    def share_frozen(self, image: ModelImage) -> None:
        self._registration.image = image
        if self._own is not None:
            self._own.share_frozen(image)

    def describe(self, request: DescribeRequest, *, min_clients: int) -> ConnectedClients:
        self._request = request
        self._registration.branches.begin_round()
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
            if may_begin and self._registration.may_begin(min_clients=min_clients):
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
                log.warning("%s", self._registration.awaited(min_clients=min_clients))
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

        def read(name: str, content: RecordDict) -> Update | ReadyReport | BranchSum:
            if name in sent.branches:
                return read_sum(*_parts(content), sent.branches[name], image.layout)
            if plans[name].is_masked:
                ready = records.read(content, ReadyReport)
                if ready.seconds is not None:  # of a real device the grid checks the deadline
                    _check_in_time(ready.name, ready.seconds, timeout_seconds)
                return _timed(ready, start_seconds)
            update = records.read_update(
                content, plans[name], num_values=image.layout.num_parameters
            )
            _check_in_time(update.name, update.report.seconds, timeout_seconds)
            return update

        self._expect_replies(replies_needed(sent.sizes, num_needed))
        contents = {
            name: branch_plans(
                own,
                self._order(own),
                num_tensors=len(image.layout.spans),
                num_needed=max(num_needed - (len(plans) - len(own)), 0),
                timeout_seconds=timeout_seconds,
            )
            for name, own in sent.branches.items()
        }
        answers = self._send_model("train", sent.direct, contents, image, timeout_seconds, read)
        return sent.of_devices(answers)

    def _divided(self, plans: Mapping[str, Plan]) -> DividedPlans:
        return self._registration.branches.divide(plans, self._nodes())

    def _order(self, plans: Mapping[str, Plan]) -> BranchOrder:
        assert self._branch_order is not None  # without it no aggregator is admitted
        return self._branch_order(plans)

    def dispatch(self, plans: Mapping[str, Plan], image: ModelImage, *, round_number: int) -> None:
        """See ``DispatchingFleet``; the model is copied, as steps change it while it is sent.

        It is copied once for a step, however many clients join while its buffer fills, and the copy
        is dropped when no plan of the step is out. Old copies that together take more RAM than
        ``MODELS_RAM_BYTES`` are in files.

        Raises:
            StateError: the disk has no room for such a file.
        """
        if self._model is None or self._model[0] != round_number:
            self._model = None
            copy = self._copies.copy(image.buffer()).data if self._own else bytes(image.buffer())
            self._model = (round_number, records.flat_array(copy, dtype="uint8"))
        array, nodes = self._model[1], self._nodes()
        for left in [name for name in plans if name not in nodes]:
            error = ConnectionLost(f"{left} left before its plan was sent")
            self._given_up.append(Dropout(name=left, error=error))
        messages = [
            Message(
                records.content_of(plan, array),
                nodes[name],
                "train",
                group_id=str(round_number),
            )
            for name, plan in plans.items()
            if name in nodes
        ]
        if self._own is None:
            self._grid.push_messages(messages)
            self._flower_bytes_down += sum(_num_bytes(message.content) for message in messages)
        else:
            self._own.offer_differences(None)
            self._own.dispatch(messages)
        names = {node: name for name, node in nodes.items()}
        self._dispatched |= {
            message.metadata.message_id: names[message.metadata.dst_node_id] for message in messages
        }
        self._note_busy()
        num_values, start_seconds = image.layout.num_parameters, time.monotonic()

        def read(name: str, content: RecordDict) -> Update | ReadyReport:
            if plans[name].is_masked:
                return _timed(records.read(content, ReadyReport), start_seconds)
            return records.read_update(content, plans[name], num_values=num_values)

        self._readers |= dict.fromkeys(plans, read)

    def next_answer(self) -> Update | ReadyReport | Dropout | None:
        while self._dispatched or self._given_up:
            if self._given_up:
                return self._given_up.popleft()
            reply = self._next_reply()
            if reply is None or self._registration.take_reply(reply):
                if self._has_newcomers():
                    return None
                continue
            name = self._dispatched.pop(reply.metadata.reply_to_message_id, None)
            self._note_busy()
            if name is not None:
                return self._answer(name, reply, self._readers[name])
        return None

    def _next_reply(self) -> Message | None:
        """Return the next reply; None if there is none after a short wait."""
        if self._own is not None:
            return self._own.next_reply(timeout=REPLY_POLL_SECONDS)
        if not self._arrived:
            self._arrived.extend(self._grid.pull_messages(self._dispatched))
        if not self._arrived:
            time.sleep(REPLY_POLL_SECONDS)
            if self._request is not None:
                self._registration.update(self._request)
            return None
        reply = self._arrived.popleft()
        self._flower_bytes_up += _num_bytes(reply.content) if reply.has_content() else 0
        return reply

    def give_up(self, errors: Mapping[str, HeadwaterError]) -> None:
        if self.has_virtual_clock:
            return  # a device that is away learns nothing of it, and its answer is refused
        ids = [id_ for id_, name in self._dispatched.items() if name in errors]
        if self._own is not None:
            self._own.end_exchange(ids)
        for message_id in ids:
            name = self._dispatched.pop(message_id)
            self._given_up.append(Dropout(name=name, error=errors[name]))
        self._note_busy()

    def _has_newcomers(self) -> bool:
        """Whether a client has joined since the last call of ``describe``."""
        return any(name not in self._reports for name in self._registration.clients())

    def _note_busy(self) -> None:
        nodes = self._nodes()
        self._registration.busy = {
            nodes[name] for name in self._dispatched.values() if name in nodes
        }

    def virtual_now(self) -> float | None:
        return None if self._own is None else self._own.virtual_now()

    def _nodes(self) -> dict[str, int]:
        return {report.name: node for node, report in self._registration.reports.items()}

    def converse(
        self,
        phase: Phase,
        requests: Mapping[str, Request],
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
        self._expect_replies(num_needed)
        array = None if vector is None else records.flat_array(vector, dtype="float32")
        contents = {name: records.content_of(request, array) for name, request in requests.items()}
        return self._send(message_type, contents, phase.action, timeout_seconds, read)

    def evaluate(
        self, plans: Mapping[str, Plan], image: SentModel, *, timeout_seconds: float | None
    ) -> Iterator[EvaluateReport | Dropout]:
        sent = self._divided(plans)

        def read(name: str, content: RecordDict) -> EvaluateReport | BranchReports:
            if name in sent.branches:
                return read_evaluation(*_parts(content), sent.branches[name])
            return records.read(content, EvaluateReport)

        self._expect_replies(0)
        contents = {
            name: branch_plans(
                own,
                None,
                num_tensors=len(image.layout.spans),
                num_needed=0,
                timeout_seconds=timeout_seconds,
            )
            for name, own in sent.branches.items()
        }
        answers = self._send_model("evaluate", sent.direct, contents, image, timeout_seconds, read)
        for answer in sent.of_devices(answers):
            if isinstance(answer, BranchReports):
                yield from answer.answers
            else:
                yield answer

    def _expect_replies(self, num_needed: int) -> None:
        if self._own is not None:
            self._own.expect_replies(num_needed)

    def _send_model(
        self,
        message_type: str,
        plans: Mapping[str, Plan],
        branches: Mapping[str, BranchPlans],
        image: SentModel,
        timeout_seconds: float | None,
        read: Callable[[str, RecordDict], Answer],
    ) -> Iterator[Answer | Dropout]:
        """Send each plan, and each aggregator its plans, with the model."""
        if self._own is not None:
            self._own.offer_differences(image.difference_from)
        memory = image.buffer().toreadonly()
        array = records.flat_array(memory if self._own else bytes(memory), dtype="uint8")
        heads: Mapping[str, Plan | BranchPlans] = {**plans, **branches}
        contents = {name: records.content_of(head, array) for name, head in heads.items()}
        types = dict.fromkeys(branches, f"{message_type}.branch")
        round_number = next((plan.round for plan in plans.values()), 0)
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
        nodes = self._nodes()
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
            if self._registration.take_reply(reply):
                continue  # a slow newcomer's description: it joins the next round
            name = awaited.pop(node, None)
            if name is None:
                continue
            answered.add(node)
            yield self._answer(name, reply, read)
        self._registration.forget_repeats(answered)
        for name in awaited.values():
            limit = "" if timeout_seconds is None else f" within {timeout_seconds} s"
            yield Dropout(name=name, error=LateUpdate(f"{name} did not answer{limit}"))

    def _answer(
        self, name: str, reply: Message, read: Callable[[str, RecordDict], Answer]
    ) -> Answer | Dropout:
        """Return the answer in a client's reply, or why there is none."""
        try:
            answer = read(name, records.reply_content(reply))
            check_name(answer.name, name)
        except HeadwaterError as error:
            # Who returns by our stream describes itself anew; on Flower's own engines a node
            # stays the same, and a restarted SuperNode is a new one. A client without the frozen
            # part is sent it again when it has described itself anew.
            has_left = isinstance(error, ConnectionLost) and self._own is not None
            if has_left or isinstance(error, FrozenPartMissing):
                node = self._nodes().get(name)
                self._registration.reports.pop(node or 0, None)
            return Dropout(name=name, error=error)
        return answer

    def _exchange(
        self, messages: list[Message], timeout: float | None
    ) -> Iterable[tuple[int, Message]]:
        """Send messages; yield each reply with the node to which its message was sent."""
        if self._own is None:
            return self._exchange_by_polling(messages, timeout)
        replies = self._own.send_and_receive(messages, timeout=timeout)
        return ((reply.metadata.src_node_id, reply) for reply in replies)

    def _exchange_by_polling(
        self, messages: list[Message], timeout: float | None
    ) -> Iterator[tuple[int, Message]]:
        """Pull replies from Flower's own grid as they arrive, rather than all at once.

        The SuperLink's own error replies name the SuperLink's node as their source, so the client
        is found by the id of the message. A message that could not be pushed has no id, and no
        reply to it is awaited.
        """
        self._flower_bytes_down += sum(_num_bytes(message.content) for message in messages)
        awaited = {message_id for message_id in self._grid.push_messages(messages) if message_id}
        node_of = {
            message.metadata.message_id: message.metadata.dst_node_id for message in messages
        }
        end = None if timeout is None else time.monotonic() + timeout
        while awaited and (end is None or time.monotonic() < end):
            replies = list(self._grid.pull_messages(awaited))
            for reply in replies:
                message_id = reply.metadata.reply_to_message_id
                awaited.discard(message_id)
                if reply.has_content():
                    self._flower_bytes_up += _num_bytes(reply.content)
                yield node_of[message_id], reply
            if not replies:
                time.sleep(REPLY_POLL_SECONDS)

    def traffic(self) -> Traffic:
        if self._own is None:
            return Traffic(bytes_up=self._flower_bytes_up, bytes_down=self._flower_bytes_down)
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


def _timed(ready: ReadyReport, start_seconds: float) -> ReadyReport:
    """Return a report with the seconds since its plan was sent; a simulated one has its own."""
    if ready.seconds is not None:
        return ready
    return ready.model_copy(update={"seconds": time.monotonic() - start_seconds})


def _check_in_time(name: str, seconds: float, timeout_seconds: float | None) -> None:
    """Check a virtual clock's seconds against the deadline; the grid checks real seconds.

    Raises:
        LateUpdate: they exceed it.
    """
    if timeout_seconds is not None and seconds > timeout_seconds:
        raise LateUpdate(f"{name} took {seconds:.1f} s, the deadline is {timeout_seconds:.1f} s")


def _parts(content: RecordDict) -> tuple[BranchHead, memoryview | bytes]:
    """Return the head and the vector of an aggregator's answer."""
    return records.read(content, BranchHead), records.vector(content) or b""


def _num_bytes(content: RecordDict) -> int:
    return len(records.head_json(content)) + len(records.vector(content) or b"")
