"""What the fuzzers attack, and the checks after each input.

- ``decode``: each decoder of received bytes. It must return a value or raise its named error.
- ``Conversations``: whole streams of frames through the real servicer, over a stream without a
  socket: a thousand a second. After each, the stream has ended or continues correctly, no memory is
  held, and an accepted update is the one that was sent.

``tests.attacks.socket_bytes`` goes one step further out: bytes of a real connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import queue
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from headwater.common import messages as update
from headwater.common.errors import HeadwaterError
from headwater.common.flower import records
from headwater.common.secagg import protocol as secagg
from headwater.common.transport.certificates import read_request
from headwater.common.transport.join_token import JoinToken
from headwater.common.transport.wire_pb2 import ClientFrame, ServerFrame
from headwater.server.enrolment.join_request import JoinRequest
from headwater.server.transport.peer_certificates import CertificateVerifier
from headwater.server.transport.servicer import Servicer
from headwater.server.transport.session import DeviceInstruction, node_id_of
from tests.attacks.fuzz_inputs import MESSAGE_ID, NAME
from tests.attacks.raw import VECTOR, layout_digest

Result = TypeVar("Result")


HEADS: tuple[type[update.WireMessage], ...] = (
    update.Plan,
    update.DescribeRequest,
    update.DeviceReport,
    update.UpdateReport,
    update.ReadyReport,
    update.EvaluateReport,
    secagg.KeysRequest,
    secagg.KeysReply,
    secagg.Roster,
    secagg.SharesReply,
    secagg.CheckRequest,
    secagg.CheckReply,
    secagg.MaskRequest,
    secagg.MaskReply,
    secagg.SurvivorsRequest,
    secagg.SurvivorsReply,
    secagg.UnmaskRequest,
    secagg.UnmaskReply,
)


def _request(data: bytes) -> object:
    fields = json.loads(data)
    return JoinRequest.of_json(fields) if isinstance(fields, dict) else None


def _join_token(data: bytes) -> object:
    return JoinToken.parse(data.decode("latin-1"))


DECODERS: dict[str, tuple[Callable[[bytes], object], tuple[type[Exception], ...]]] = {
    "client frame": (ClientFrame.FromString, (DecodeError,)),
    "server frame": (ServerFrame.FromString, (DecodeError,)),
    "enrolment": (_request, (HeadwaterError, ValueError, RecursionError)),
    "signing request": (read_request, (HeadwaterError,)),
    "join token": (_join_token, (HeadwaterError,)),
}


def decode(data: bytes) -> Counter[str]:
    """Pass the same bytes to each decoder; return how many accepted them.

    Raises:
        Exception: what a decoder raised that is not among its own errors.
    """
    taken: Counter[str] = Counter()
    for name, (decoder, errors) in DECODERS.items():
        with contextlib.suppress(*errors):
            decoder(data)
            taken[name] += 1
    for kind in HEADS:
        with contextlib.suppress(HeadwaterError):
            records.parse(data, kind)
            taken[kind.__name__] += 1
    return taken


@dataclass(kw_only=True)
class ScriptedStream:
    """A stream without a socket that sends a script and then ends."""

    script: list[bytes | None]
    instruct: Callable[[], Coroutine[Any, Any, None]]
    port: int
    written: list[ServerFrame] = field(default_factory=list)

    def peer(self) -> str:
        return f"ipv4:192.0.{self.port % 256}.{self.port // 256 % 256}:{self.port}"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def read(self) -> Any:
        while self.script:
            frame = self.script.pop(0)
            await asyncio.sleep(0)  # the writer's turn
            if frame is not None:
                return frame
            await self.instruct()
        return grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        self.written.append(ServerFrame.FromString(data))


class Conversations:
    """A servicer, and the checks after each conversation with it."""

    def __init__(self) -> None:
        self.num_played = 0
        self.num_frames = 0
        self.endings: Counter[str] = Counter()
        self.servicer = Servicer(
            "127.0.0.1:0",
            run_id=7,
            credentials=None,
            verifier=CertificateVerifier(),
            staging_bytes=1 << 20,
            reconnect_seconds=60.0,
            return_seconds=5.0,
        )
        self.servicer.require_layout(layout_digest(), "")

    def __enter__(self) -> Conversations:
        self.servicer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.servicer.stop(say_goodbye=False)

    def play(self, script: Sequence[bytes | None]) -> None:
        """Send a script to the servicer, and check its state afterwards.

        Raises:
            AssertionError: it holds something, or took an update that was not sent.
            Exception: the servicer let through what it should have caught.
        """
        self.num_played += 1
        self.num_frames += sum(frame is not None for frame in script)
        stream = self._in_loop(self._talk(list(script)))
        for frame in stream.written:
            if frame.WhichOneof("kind") == "fault":
                self.endings[frame.fault.code] += 1
        self._check_arrivals()
        self._in_loop(self._leave_all())

    def _in_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.servicer._loop).result(60)

    async def _talk(self, script: list[bytes | None]) -> ScriptedStream:
        # Each from its own address, because refusals are limited per address.
        stream = ScriptedStream(script=script, instruct=self._instruct, port=self.num_played)
        await self.servicer._serve(None, stream)
        return stream

    async def _instruct(self) -> None:
        instruction = DeviceInstruction(
            node_id=node_id_of(NAME),
            message_id=MESSAGE_ID,
            message_type="train",
            head_json="{}",
            image=None,
            reply_bytes=len(VECTOR),
        )
        await self.servicer._send_instructions([instruction], None)

    def _check_arrivals(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                arrival = self.servicer.arrivals.get_nowait()
                assert (arrival.error is None) != (arrival.staging is None)
                if arrival.staging is not None:
                    assert arrival.staging.num_bytes == len(VECTOR)
                    view = arrival.staging.view()
                    assert hashlib.sha256(view).digest() == arrival.staging.sha256
                    view.release()
                    arrival.staging.release()
                    self.endings["taken"] += 1

    async def _leave_all(self) -> None:
        """Remove all sessions, and check that no memory is held for them."""
        servicer = self.servicer
        for session in list(servicer._sessions.values()):
            assert session.stream is None
            servicer._uploads.discard(session)
        servicer._sessions.clear()
        assert servicer._staging.held_bytes == 0
        assert not servicer._uploads._started
        assert not servicer._uploads._waiting
        assert not servicer._connections.closing
        await asyncio.sleep(0)
        assert not [writer for writer in servicer._streams._writers if not writer.done()]
