"""What the intake knows of one device, and what passes between the intake and the rounds."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from headwater.common.errors import HeadwaterError
from headwater.common.transport.wire_pb2 import Reply
from headwater.server.enrolment.peer_certificates import PeerCertificate
from headwater.server.transport.device_records import DeviceRecord
from headwater.server.transport.rate_limit import FrameLimit
from headwater.server.transport.staging import StagedUpload

Work = Coroutine[Any, Any, None]
Stream = Any  # grpc.aio.ServicerContext, which ships without types

# Asks that were let go and whose replies may still be on their way: a device is at one at a time.
MAX_CANCELLED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInstruction:
    """An instruction to one device; ``image`` is the model that goes with it.

    ``beside`` is a small vector in its stead, which fits into the instruction's own frame.
    """

    node_id: int
    message_id: str
    message_type: str
    head_json: str
    image: memoryview | None
    reply_bytes: int
    """The length that the reply's vector must have."""
    beside: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """The answer to an ask: a verified reply, or the error that stands for it."""

    message_id: str
    node_id: int
    head_json: str = ""
    staging: StagedUpload | None = None
    error: HeadwaterError | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class DeviceSession:
    """One device, over as many streams as it takes."""

    name: str
    node_id: int
    token: bytes
    shown: PeerCertificate | None = None
    """The certificate of its stream; None where there is no TLS."""
    stream: Stream | None = None
    lost_at: float = 0.0
    heard_at: float = 0.0
    sending_since: float | None = None
    task: asyncio.Task[Any] | None = None
    outbox: asyncio.Queue[Callable[[], Work]] = field(default_factory=asyncio.Queue)
    image_id: str = ""
    frames: FrameLimit = field(default_factory=FrameLimit)
    """Of its stream."""
    ask: DeviceInstruction | None = None
    let_go: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_CANCELLED))
    """The messages that the server itself waits for no more: replies to them cross that news."""
    reply: Reply | None = None
    upload: StagedUpload | None = None
    known: DeviceRecord | None = None
    """What is noted of the device."""


Sessions = dict[int, DeviceSession]
"""By node."""
ClosingStreams = dict[Stream, HeadwaterError | None]
"""Streams that are being ended, and what their devices are told; None: to come back."""


def node_id_of(name: str) -> int:
    """Return the node id of a device: 62 bits of its name's hash, so that it keeps it."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2
