"""The Flower Grid over our own stream: messages become instructions, uploads become replies."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator

from flwr.app import Message

from headwater.common.errors import HeadwaterError
from headwater.common.flower import records
from headwater.common.flower.grid import SILENT_SECONDS, OwnGrid, numbered
from headwater.common.messages import DescribeRequest, Plan
from headwater.server.transport.servicer import Servicer
from headwater.server.transport.session import Arrival, DeviceInstruction

# What comes with a message of these types is the model, which is sent once for all of them.
WITH_MODEL = ("train", "evaluate")
# Of the last turn in the running mean of them: a page fault or a busy moment soon fades.
TURN_WEIGHT = 0.2


class GrpcGrid(OwnGrid):
    """The devices that are connected to an intake."""

    awaits_more = True

    def __init__(
        self,
        intake: Servicer,
        *,
        silent_seconds: float = SILENT_SECONDS,
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take what serves the devices; ``may_begin`` is asked before each round."""
        super().__init__()
        self._may_begin = may_begin
        self.silent_seconds = silent_seconds
        self._intake = intake
        self._sent: dict[str, Message] = {}
        self._update_bytes = 0
        self._beside_bytes: dict[str, int] = {}
        self._turn_seconds: float | None = None

    def num_bytes(self) -> tuple[int, int]:
        return self._intake.bytes_up, self._intake.bytes_down

    def may_begin(self) -> bool:
        return self._may_begin()

    def turn_seconds(self) -> float:
        return self._turn_seconds or 0.0

    def get_node_ids(self) -> Iterable[int]:
        return self._intake.connected()

    def expect(self, request: DescribeRequest) -> None:
        self._intake.expect_layout(request.layout_digest)
        self._update_bytes = 4 * request.num_parameters

    def expect_beside(self, message_type: str, num_bytes: int) -> None:
        self._beside_bytes[message_type] = num_bytes

    def name_of(self, node_id: int) -> str | None:
        return self._intake.name_of(node_id)

    def refuse(self, node_id: int, error: HeadwaterError) -> None:
        self._intake.refuse(node_id, error)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = {numbered(message): message for message in messages}
        self._sent |= pushed
        self._intake.ask([self._ask(message_id, message) for message_id, message in pushed.items()])
        return list(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies that are here, without waiting."""
        wanted = set(message_ids)
        while wanted:
            try:
                arrival = self._intake.arrivals.get_nowait()
            except queue.Empty:
                return
            wanted.discard(arrival.message_id)
            yield from self._replies(arrival)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        end = None if timeout is None else time.monotonic() + timeout
        awaited = {id_: self._asked_device(id_) for id_ in self.push_messages(messages)}
        attendance = self._intake.attendance
        attendance.awaits(awaited.values())
        try:
            while awaited:
                left = None if end is None else max(end - time.monotonic(), 0.0)
                try:
                    arrival = self._intake.arrivals.get(timeout=left)
                except queue.Empty:
                    break
                if arrival.message_id in awaited:
                    attendance.answered(awaited.pop(arrival.message_id))
                is_update = arrival.staging is not None and arrival.staging.num_bytes > 0
                begun = time.monotonic()
                yield from self._replies(arrival)
                # The rounds have come back for the next: they are done with this one.
                if is_update:
                    self._learn_turn(time.monotonic() - begun)
        finally:
            attendance.awaits([])
            self._intake.withdraw(list(awaited))
            for message_id in awaited:
                self._sent.pop(message_id, None)

    def _asked_device(self, message_id: str) -> str:
        node_id = self._sent[message_id].metadata.dst_node_id
        return self._intake.name_of(node_id) or f"node {node_id}"

    def _learn_turn(self, seconds: float) -> None:
        before = seconds if self._turn_seconds is None else self._turn_seconds
        self._turn_seconds = before + TURN_WEIGHT * (seconds - before)

    def _replies(self, arrival: Arrival) -> Iterator[Message]:
        """Yield the reply that an arrival is; none if nobody waits for it any more."""
        message = self._sent.pop(arrival.message_id, None)
        try:
            if message is not None:
                yield _reply(message, arrival)
        finally:
            if arrival.staging is not None:
                arrival.staging.release()

    def _reply_bytes(self, message: Message) -> int:
        """Return how long the vector of a reply must be; that of a masked plan comes later."""
        kind = message.metadata.message_type
        if kind != "train":
            return self._beside_bytes.get(kind, 0)
        return 0 if records.read(message.content, Plan).is_masked else self._update_bytes

    def _ask(self, message_id: str, message: Message) -> DeviceInstruction:
        """Turn a message into an instruction; only an update comes back with a vector."""
        vector, kind = records.vector(message.content), message.metadata.message_type
        is_model = vector is not None and kind in WITH_MODEL
        return DeviceInstruction(
            node_id=message.metadata.dst_node_id,
            message_id=message_id,
            message_type=kind,
            head_json=records.head_json(message.content),
            image=memoryview(vector or b"") if is_model else None,
            reply_bytes=self._reply_bytes(message),
            beside=b"" if is_model else bytes(vector or b""),
        )


def _reply(message: Message, arrival: Arrival) -> Message:
    if arrival.error is not None:
        return Message(records.refusal(arrival.error), reply_to=message)
    array = None
    if arrival.staging is not None and arrival.staging.num_bytes:
        array = records.flat_array(arrival.staging.view(), dtype="float32")
    return Message(records.content_with_head(arrival.head_json, array), reply_to=message)
