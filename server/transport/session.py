"""A device's session on the server: its stream, its current instruction and its upload.

Also the two values that pass between the transport and the rounds: ``DeviceInstruction`` goes out,
``Arrival`` comes in.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from headwater.common.errors import HeadwaterError
from headwater.common.flower.sent_model import FindDifference
from headwater.common.transport.limits import MAX_REPLY_HEAD_BYTES
from headwater.common.transport.wire_pb2 import Reply, ServerFrame
from headwater.server.transport.device_records import DeviceRecord, Stage
from headwater.server.transport.peer_certificates import PeerCertificate
from headwater.server.transport.rate_limit import FrameLimit
from headwater.server.transport.staging import StagedUpload

Work = Coroutine[Any, Any, None]
Stream = Any  # grpc.aio.ServicerContext, which ships without types

# Cancelled instructions whose replies may still arrive: a device works on one at a time.
MAX_CANCELLED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInstruction:
    """An instruction to one device, with the model or a small vector."""

    node_id: int
    message_id: str
    message_type: str
    head_json: str
    image: memoryview | None
    """The model, which is sent in chunks before the instruction."""
    reply_bytes: int
    """The length of the vector in the reply."""
    head_bytes: int = MAX_REPLY_HEAD_BYTES
    """The most bytes of the reply's head."""
    is_length_exact: bool = True
    """Whether the vector has exactly that length; False: it has at most that length."""
    difference_from: FindDifference | None = None
    """Finds what a device needs in place of the model; None: all are sent the model."""
    frozen: memoryview | None = None
    """The frozen part of the model, for a device that lacks it; sent in chunks like the model."""
    frozen_id: str = ""
    """Its digest."""
    vector: bytes = b""
    """A vector small enough to travel in the instruction's own frame."""
    follows: bool = False
    """Whether it waits for the device's answer to the one before, in place of cancelling that."""

    def allows(self, num_bytes: int) -> bool:
        """Whether the vector in the reply may have this length."""
        if self.is_length_exact:
            return num_bytes == self.reply_bytes
        return num_bytes <= self.reply_bytes


@dataclass(kw_only=True, slots=True)
class OpenExchange:
    """Instructions that a round awaits together: its plans, or one phase of its secure session."""

    message_ids: frozenset[str]
    num_needed: int
    """With fewer replies the round would be aborted."""
    num_replies: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """The outcome of an instruction: a verified reply, or the error that replaces it."""

    message_id: str
    node_id: int
    head_json: str = ""
    staging: StagedUpload | None = None
    error: HeadwaterError | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class DeviceSession:
    """One device's state across all streams that it opens."""

    name: str
    node_id: int
    token: bytes
    """A device that returns with this token resumes the session."""
    certificate: PeerCertificate | None = None
    """The stream's certificate; None without TLS."""
    stream: Stream | None = None
    lost_at: float = 0.0
    heard_at: float = 0.0
    sending_since: float | None = None
    """Start of the frame write in progress; None if no write is in progress."""
    task: asyncio.Task[Any] | None = None
    outbox: asyncio.Queue[Callable[[], Work]] = field(default_factory=asyncio.Queue)
    image_id: str = ""
    """The model that the device holds."""
    frame_limit: FrameLimit = field(default_factory=FrameLimit)
    """Of the current stream."""
    instruction: DeviceInstruction | None = None
    """The instruction whose reply is awaited."""
    following: DeviceInstruction | None = None
    """The one after it, which the device carries out while that reply is uploaded."""
    receipts: deque[ServerFrame] = field(default_factory=deque)
    """Receipts of the upload, which pass the chunks of a model that is sent meanwhile."""
    has_answered: bool = False
    """Whether it has completed a reply, at least the one with its description."""
    num_starts_over: int = 0
    """How often the device came back to this instruction without its model, or as a new process."""
    missed: ServerFrame | None = None
    """The error that the device is sent when it returns: its round closed while it was away."""
    cancelled: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_CANCELLED))
    """Message ids of cancelled instructions; a reply to one may cross the cancellation."""
    reply: Reply | None = None
    upload: StagedUpload | None = None
    stage: Stage | None = None
    """Of its plan or of its masked vector; None while it has neither."""
    seconds_down: float = 0.0
    """Seconds in which instructions with their models were written to it so far."""
    seconds_up: float = 0.0
    """Seconds in which its vectors arrived so far."""
    record: DeviceRecord | None = None

    def awaits(self, instruction: DeviceInstruction) -> bool:
        """Whether an instruction is in progress, or the one after that."""
        return instruction is self.instruction or instruction is self.following

    @property
    def open_instructions(self) -> tuple[DeviceInstruction, ...]:
        """The instruction in progress and the one after it, in their order."""
        both = (self.instruction, self.following)
        return tuple(one for one in both if one is not None)


Sessions = dict[int, DeviceSession]
"""Sessions by node id."""
ClosingStreams = dict[Stream, HeadwaterError | None]
"""Streams that the server is ending, with the error to send; None: the device may return."""


def node_id_of(name: str) -> int:
    """Return a device's node id: 62 bits of its name's hash, so the id never changes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2
