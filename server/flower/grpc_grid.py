"""The Flower Grid over our gRPC stream: messages become instructions, uploads become replies."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from flwr.app import Message

from headwater.common.errors import HeadwaterError
from headwater.common.flower import records
from headwater.common.flower.grid import (
    OTHER_HEAD_BYTES,
    HeadwaterGrid,
    MessageKind,
    ensure_message_id,
)
from headwater.common.flower.sent_model import FindDifference
from headwater.common.messages import DescribeRequest, FrozenPart, Plan
from headwater.server.flower.answers import Patience
from headwater.server.transport.servicer import Servicer
from headwater.server.transport.session import Arrival, DeviceInstruction

FROZEN = "query.frozen"
# Between two looks at who has connected during a round.
LOOK_SECONDS = 0.5
# Weight of the latest update in the moving average: a single page fault soon fades.
TURN_WEIGHT = 0.2


def _update_bytes(message: Message, num_parameters: int) -> tuple[int, int]:
    """Return the bytes of an update's vector, which if masked is sent in a later reply."""
    plan = records.read(message.content, Plan)
    return plan.update_bytes(num_parameters), plan.head_bytes


KINDS = {
    "train": MessageKind(has_model=True, reply_bytes=_update_bytes),
    "evaluate": MessageKind(has_model=True),
}
OTHER = MessageKind()


class GrpcGrid(HeadwaterGrid):
    """The devices that are connected to a servicer."""

    awaits_more = True

    def __init__(self, servicer: Servicer, *, may_begin: Callable[[], bool] = lambda: True) -> None:
        """Make a grid of the servicer's devices; ``may_begin`` is called before each round."""
        super().__init__()
        self._may_begin = may_begin
        self._servicer = servicer
        self._sent: dict[str, Message] = {}
        self._num_parameters = 0
        self._difference_from: FindDifference | None = None
        self._kinds: dict[str, MessageKind] = {**KINDS}
        self._reply_bytes: dict[str, int] = {}
        self._num_needed = 0
        self._is_brief = False
        self._turn_seconds: float | None = None
        self._dispatched: set[str] = set()
        """The messages whose replies ``next_reply`` returns."""
        self._early: deque[Arrival] = deque()
        """Replies to dispatched messages that arrived while others were awaited."""
        self._held_back: Collection[int] = ()
        """The nodes whose replies to dispatched messages wait."""
        self._last: Iterator[Message] = iter(())
        """Releases the memory of the reply that ``next_reply`` returned last."""

    def num_bytes(self) -> tuple[int, int]:
        return self._servicer.bytes_up, self._servicer.bytes_down

    def link_seconds(self) -> Mapping[str, tuple[float, float]]:
        return self._servicer.link_seconds()

    def may_begin(self) -> bool:
        self.check_term()
        return self._may_begin()

    def turn_seconds(self) -> float:
        return self._turn_seconds or 0.0

    def get_node_ids(self) -> Iterable[int]:
        return self._servicer.connected()

    def learn(self, kinds: Mapping[str, MessageKind]) -> None:
        self._kinds |= kinds

    def expect(self, request: DescribeRequest) -> None:
        self._servicer.require_layout(request.layout_digest, request.layout)
        self._num_parameters = request.num_parameters

    def offer_differences(self, difference_from: FindDifference | None) -> None:
        self._difference_from = difference_from

    def expect_vector(self, message_type: str, num_bytes: int) -> None:
        self._reply_bytes[message_type] = num_bytes

    def expect_replies(self, num_needed: int, *, is_brief: bool = False) -> None:
        self._num_needed, self._is_brief = num_needed, is_brief

    def name_of(self, node_id: int) -> str | None:
        return self._servicer.name_of(node_id)

    def refuse(self, node_id: int, error: HeadwaterError) -> None:
        self._servicer.refuse(node_id, error)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._push(messages, num_needed=None)

    def _push(
        self, messages: Iterable[Message], *, num_needed: int | None, may_follow: bool = False
    ) -> list[str]:
        pushed = {ensure_message_id(message): message for message in messages}
        self._sent |= pushed
        self._servicer.send_instructions(
            [
                self._instruction(message_id, message, may_follow=may_follow)
                for message_id, message in pushed.items()
            ],
            num_needed=num_needed,
        )
        return list(pushed)

    def replies_to(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies that have arrived, without waiting."""
        wanted = set(message_ids)
        while wanted:
            try:
                arrival = self._servicer.arrivals.get_nowait()
            except queue.Empty:
                return
            wanted.discard(arrival.message_id)
            if arrival.message_id in self._dispatched:
                self._early.append(arrival)
            else:
                yield from self._replies(arrival)

    def dispatch(self, messages: Iterable[Message]) -> list[str]:
        pushed = self._push(messages, num_needed=None, may_follow=True)
        self._dispatched.update(pushed)
        self._note_awaited()
        return pushed

    def hold_back(self, nodes: Collection[int]) -> None:
        self._held_back = nodes

    def next_reply(self, *, timeout: float) -> Message | None:
        for _ in self._last:
            pass
        arrival = next((one for one in self._early if one.node_id not in self._held_back), None)
        if arrival is not None:
            self._early.remove(arrival)
        else:
            try:
                arrival = self._servicer.arrivals.get(timeout=timeout)
            except queue.Empty:
                self.check_term()
                self.while_waiting()
                return None
            if arrival.node_id in self._held_back and arrival.message_id in self._dispatched:
                self._early.append(arrival)
                return None
        if arrival.message_id in self._dispatched:
            self._servicer.device_records.note_answer(self._recipient(arrival.message_id))
            self._dispatched.discard(arrival.message_id)
        self._last = self._replies(arrival)
        return next(self._last, None)

    def _note_awaited(self) -> None:
        self._servicer.device_records.set_awaited(map(self._recipient, self._dispatched))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        patience = Patience(timeout, enough=self._num_needed if self._is_brief else None)
        pushed = self._push(messages, num_needed=self._num_needed)
        awaited = {id_: self._recipient(id_) for id_ in pushed}
        device_records = self._servicer.device_records
        device_records.set_awaited(awaited.values())
        next_look = time.monotonic()
        try:
            while awaited:
                if time.monotonic() >= next_look:
                    self.check_term()
                    self.while_waiting()
                    next_look = time.monotonic() + LOOK_SECONDS
                left = patience.left_seconds
                try:
                    arrival = self._servicer.arrivals.get(timeout=min(left, LOOK_SECONDS))
                except queue.Empty:
                    if left <= LOOK_SECONDS:
                        break
                    continue
                if arrival.message_id in self._dispatched:
                    self._early.append(arrival)
                    continue
                if arrival.message_id in awaited:
                    device_records.note_answer(awaited.pop(arrival.message_id))
                    patience.note_answer()
                is_update = arrival.staging is not None and arrival.staging.num_bytes > 0
                is_update &= self._kind_of(arrival.message_id).is_length_exact
                begun = time.monotonic()
                yield from self._replies(arrival)
                # The generator resumes when the round has checked and added this update.
                if is_update:
                    self._measure_turn(time.monotonic() - begun)
        finally:
            self.end_exchange(awaited)
            self._note_awaited()

    def end_exchange(self, message_ids: Iterable[str]) -> None:
        """Await no replies to these messages any more: one that arrives later is dropped."""
        self._dispatched.difference_update(message_ids := list(message_ids))
        unanswered = [id_ for id_ in message_ids if self._sent.pop(id_, None) is not None]
        self._servicer.end_exchange(unanswered)

    def _recipient(self, message_id: str) -> str:
        node_id = self._sent[message_id].metadata.dst_node_id
        return self._servicer.name_of(node_id) or f"node {node_id}"

    def _kind_of(self, message_id: str) -> MessageKind:
        message = self._sent.get(message_id)
        return self._kinds.get("" if message is None else message.metadata.message_type, OTHER)

    def _measure_turn(self, seconds: float) -> None:
        before = seconds if self._turn_seconds is None else self._turn_seconds
        self._turn_seconds = before + TURN_WEIGHT * (seconds - before)

    def _replies(self, arrival: Arrival) -> Iterator[Message]:
        """Yield an arrival as a reply; nothing if its message is awaited no longer."""
        message = self._sent.pop(arrival.message_id, None)
        try:
            if message is not None:
                yield _reply(message, arrival)
        finally:
            if arrival.staging is not None:
                arrival.staging.release()

    def _expected_bytes(self, message: Message) -> tuple[int, int]:
        """Return the bytes of the reply's vector, or the most of them, and the most of its head."""
        name = message.metadata.message_type
        reply_bytes = self._kinds.get(name, OTHER).reply_bytes
        if reply_bytes is None:
            return self._reply_bytes.get(name, 0), OTHER_HEAD_BYTES
        return reply_bytes(message, self._num_parameters)

    def _instruction(
        self, message_id: str, message: Message, *, may_follow: bool
    ) -> DeviceInstruction:
        vector, name = records.vector(message.content), message.metadata.message_type
        kind = self._kinds.get(name, OTHER)
        is_model = vector is not None and kind.has_model
        head_json = records.head_json(message.content)
        reply_bytes, head_bytes = self._expected_bytes(message)
        is_frozen = vector is not None and name == FROZEN
        return DeviceInstruction(
            node_id=message.metadata.dst_node_id,
            message_id=message_id,
            message_type=name,
            head_json=head_json,
            image=memoryview(vector or b"") if is_model else None,
            difference_from=self._difference_from if is_model else None,
            reply_bytes=reply_bytes,
            head_bytes=head_bytes,
            is_length_exact=kind.is_length_exact,
            frozen=memoryview(vector or b"") if is_frozen else None,
            frozen_id=records.parse(head_json, FrozenPart).digest if is_frozen else "",
            vector=b"" if is_model or is_frozen else bytes(vector or b""),
            follows=may_follow and records.read(message.content, Plan).after_round is not None,
        )


def _reply(message: Message, arrival: Arrival) -> Message:
    if arrival.error is not None:
        error = records.to_flower_error(arrival.error, is_same_process=True)  # as it was sent
        return Message(error, reply_to=message)
    array = None
    if arrival.staging is not None and arrival.staging.num_bytes:
        array = records.flat_array(arrival.staging.view(), dtype="float32")
    return Message(records.content_with_head(arrival.head_json, array), reply_to=message)
