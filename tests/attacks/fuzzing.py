"""The fuzzers' inputs, and the checks after each input.

Three targets, from the inside out:

- ``decode``: each decoder of received bytes. It must return a value or raise its named error.
- ``Conversations``: whole streams of frames, valid and mutated, through the real servicer, over a
  stream without a socket: a thousand a second. After each, the stream has ended or continues
  correctly, no memory is held, and an accepted update is the one that was sent.
- ``Wire``: a real connection's bytes including HTTP/2, mutated and sent over a socket.

Hypothesis draws the streams, so a failure shrinks to the shortest failing stream.
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
from hypothesis import strategies as st

from headwater.common import messages as update
from headwater.common.errors import HeadwaterError
from headwater.common.flower import records
from headwater.common.secagg import protocol as secagg
from headwater.common.settings.schema import TlsSettings
from headwater.common.transport.certificates import read_request
from headwater.common.transport.join_token import JoinToken
from headwater.common.transport.limits import CHUNK_BYTES, PROTOCOL_VERSION
from headwater.common.transport.wire_pb2 import (
    Chunk,
    ClientFrame,
    Fault,
    Hello,
    Leave,
    Renewal,
    Reply,
    ServerFrame,
)
from headwater.server.enrolment.join_request import JoinRequest
from headwater.server.enrolment.peer_certificates import CertificateVerifier
from headwater.server.transport.servicer import Servicer
from headwater.server.transport.session import DeviceInstruction, node_id_of
from tests.attacks.raw import VECTOR, WAIT_SECONDS, RawDevice, head_of, layout_digest

Result = TypeVar("Result")

MESSAGE_ID = "instruction"
NAME = "fuzzed"
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


# What is drawn.

SIZES = (0, 1, 43, 44, 45, CHUNK_BYTES, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
TEXTS = ("", NAME, MESSAGE_ID, "x" * 129, "a\nb", "../x", "\0", "[" * 5000, '{"name": "fuzzed"}')


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """Draw valid bytes, and change them in up to four places."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("flip", "cut", "insert", "repeat", "overwrite"))):
            case "flip" if place < len(data):
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[place:]
            case "insert":
                data[place:place] = draw(st.binary(max_size=16))
            case "repeat":
                data[place:place] = data[place : place + draw(st.integers(1, 64))]
            case _:
                data[place : place + 9] = draw(st.binary(min_size=9, max_size=9))
    return bytes(data)


def texts() -> st.SearchStrategy[str]:
    return st.sampled_from(TEXTS) | st.text(max_size=20)


def hellos() -> st.SearchStrategy[Hello]:
    honest = Hello(protocol_version=PROTOCOL_VERSION, name=NAME, layout_digest=layout_digest())
    return st.just(honest) | st.builds(
        Hello,
        protocol_version=st.sampled_from((0, PROTOCOL_VERSION, 2**32 - 1)),
        name=texts(),
        layout_digest=st.just(layout_digest()) | texts(),
        session=st.binary(max_size=20),
        image_id=texts(),
    )


def honest_reply() -> Reply:
    return Reply(
        message_id=MESSAGE_ID,
        head_json="{}",
        num_bytes=len(VECTOR),
        sha256=hashlib.sha256(VECTOR).digest(),
    )


def replies() -> st.SearchStrategy[Reply]:
    return st.just(honest_reply()) | st.builds(
        Reply,
        message_id=st.just(MESSAGE_ID) | texts(),
        head_json=texts(),
        num_bytes=st.sampled_from(SIZES),
        sha256=st.just(hashlib.sha256(VECTOR).digest()) | st.binary(max_size=40),
    )


def chunks() -> st.SearchStrategy[Chunk]:
    places = st.sampled_from((0, 4, 20, 40, 43, 44)) | st.sampled_from(SIZES)
    right = st.tuples(st.integers(0, 44), st.integers(0, 44)).map(
        lambda ends: Chunk(
            transfer_id=MESSAGE_ID, offset=min(ends), data=VECTOR[min(ends) : max(ends)]
        )
    )
    whole = Chunk(transfer_id=MESSAGE_ID, offset=0, data=VECTOR)
    wrong = st.builds(Chunk, transfer_id=texts(), offset=places, data=st.binary(max_size=64))
    return st.just(whole) | right | wrong


def client_frames() -> st.SearchStrategy[bytes]:
    """Draw frames of a device, each valid on its own."""
    faults = st.builds(Fault, message_id=texts(), code=texts(), text=texts())
    return st.one_of(
        replies().map(lambda reply: ClientFrame(reply=reply)),
        chunks().map(lambda chunk: ClientFrame(chunk=chunk)),
        hellos().map(lambda hello: ClientFrame(hello=hello)),
        faults.map(lambda fault: ClientFrame(fault=fault)),
        st.binary(max_size=64).map(lambda data: ClientFrame(renewal=Renewal(signing_request=data))),
        st.just(ClientFrame(leave=Leave())),
        st.just(ClientFrame()),
    ).map(lambda frame: frame.SerializeToString())


def honest_heads() -> st.SearchStrategy[bytes]:
    """Draw the JSON of a head, mostly an update's, with odd values in its fields."""
    plan = json.dumps({"round": 1})
    instruction = type("Instruction", (), {"head_json": plan})
    head = json.loads(head_of(instruction, NAME))  # type: ignore[arg-type]
    odd: st.SearchStrategy[Any] = st.one_of(
        st.sampled_from([-1, 0, 2**53, 2**64, 1e308, None, True, "", [], {}, "NaN"]),
        st.floats(),
        st.text(max_size=8),
    )
    changed = st.tuples(st.sampled_from(sorted(head)), odd).map(lambda kv: head | {kv[0]: kv[1]})
    return changed.map(lambda fields: json.dumps(fields).encode())


def honest_script() -> list[bytes | None]:
    """Return an honest stream; None marks where the server sends an instruction."""
    hello = Hello(protocol_version=PROTOCOL_VERSION, name=NAME, layout_digest=layout_digest())
    parts = [
        Chunk(transfer_id=MESSAGE_ID, offset=offset, data=VECTOR[offset : offset + 20])
        for offset in range(0, len(VECTOR), 20)
    ]
    frames = [
        ClientFrame(hello=hello),
        ClientFrame(reply=honest_reply()),
        *(ClientFrame(chunk=part) for part in parts),
        ClientFrame(leave=Leave()),
    ]
    hello_frame, *rest = (frame.SerializeToString() for frame in frames)
    return [hello_frame, None, *rest]


@st.composite
def scripts(draw: st.DrawFn) -> list[bytes | None]:
    """Draw an honest stream with up to four wrong frames."""
    script = honest_script()
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(script)))
        here = script[place] if place < len(script) else None
        match draw(st.sampled_from(("drop", "repeat", "swap", "mutate", "insert", "ask"))):
            case "drop":
                del script[place : place + 1]
            case "repeat":
                script.insert(draw(st.integers(0, len(script))), here)
            case "swap" if place + 1 < len(script):
                script[place], script[place + 1] = script[place + 1], here
            case "mutate" if here is not None:
                script[place] = draw(mutated(st.just(here)))
            case "ask":
                script.insert(place, None)
            case _:
                script.insert(place, draw(client_frames()))
    return script


# The decoders.


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


# Conversations with the servicer.


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
            verifier=CertificateVerifier.of(TlsSettings(), None),
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


# The wire itself.


async def record(port: int) -> bytes:
    """Return the bytes of a device's socket: HTTP/2's preface, a hello, a reply, a chunk."""
    received, is_over = bytearray(), asyncio.Event()
    near: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near.append(writer)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

        async def back() -> None:
            while data := await far_reader.read(65536):
                writer.write(data)

        answering = asyncio.create_task(back())
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                received.extend(data)
                far_writer.write(data)
        answering.cancel()
        for end in (far_writer, writer):
            await _close(end)
        is_over.set()

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with proxy:
        async with RawDevice(proxy.sockets[0].getsockname()[1], "recorded") as device:
            await device.enter()
            await device.send(reply=honest_reply())
            await device.fault()  # nobody asked
            await device.send(chunk=Chunk(transfer_id=MESSAGE_ID, data=VECTOR))
            await device.send(leave=Leave())
            await device.end()
        near[0].close()  # gRPC may keep its end for another channel
        await is_over.wait()
    return bytes(received)


async def send_bytes(port: int, data: bytes) -> None:
    """Send bytes to the port, and read until the server is silent or closes."""
    reader, writer = await _connect(port)
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                while await reader.read(65536):
                    pass
    await _close(writer)


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and wait if the port is being reopened."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def is_served(port: int) -> bool:
    """Return whether an honest device is still admitted, now or after a short wait.

    As a device does, it tries again where nothing is said for a while: gRPC's server may lose a
    stream that comes at the same time as those that it refuses ("Failed execute_batch").
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError, EOFError):
                    try:
                        async with asyncio.timeout(WAIT_SECONDS / 4):
                            await _come_and_go(port)
                            return True
                    except TimeoutError:
                        pass
                await asyncio.sleep(0.1)
    return False


async def _come_and_go(port: int) -> None:
    async with RawDevice(port, "honest-too") as device:
        await device.enter()
        await device.send(leave=Leave())
        await device.end()
