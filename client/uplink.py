"""The device's end of the stream: one outbound connection, kept up whatever the network does.

The device says hello, is pushed the model and its plans, and sends each update in chunks. The
vector stays in the accumulator until the server has acknowledged all of it; after a broken
connection the upload goes on from the last byte that arrived. A plan that supersedes another ends
the work on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import signal
import time
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from client.node import Answer, Node
from common.errors import (
    ConnectionLost,
    CorruptUpdate,
    HeadwaterError,
    ModelMismatch,
    ProtocolMismatch,
    error_of,
    travelling,
)
from common.tls import Credentials
from common.wire import CHUNK_BYTES, HELLO_SECONDS, KEEPALIVE, METHOD, PROTOCOL_VERSION
from common.wire_pb2 import (
    Chunk,
    ClientFrame,
    Fault,
    Hello,
    Image,
    Instruction,
    Leave,
    Receipt,
    Reply,
    ServerFrame,
)

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 30.0
STOP_GRACE_SECONDS = 30.0
RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

Call = Any  # grpc.aio.StreamStreamCall, which ships without types


class Uplink:
    """Keeps a node connected until the run ends or it is asked to stop."""

    def __init__(
        self,
        node: Node,
        address: str,
        *,
        credentials: Credentials | None,
        patience_seconds: float,
    ) -> None:
        self._node = node
        self._address = address
        self._credentials = credentials
        self._patience_seconds = patience_seconds
        self._session = b""
        self._image_id = ""
        self._incoming: _IncomingImage | None = None
        self._work: asyncio.Task[None] | None = None
        self._working_on = ""
        self._answer: Answer | None = None
        self._receipts: asyncio.Queue[Receipt | HeadwaterError] = asyncio.Queue()
        self._upload: asyncio.Task[None] | None = None
        self._call: Call | None = None
        self._writing = asyncio.Lock()
        self._stopping = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ask for a graceful end: what was summed so far is sent, then the stream is closed."""
        self._stopping.set()
        self._node.interrupt()

    async def run(self) -> None:
        """Stay connected until the server says that the run has ended, or ``stop`` is called.

        Raises:
            DeviceRefused: the server turned this device away.
            ConnectionLost: the server was not to be reached for ``patience_seconds``.

        """
        backoff, last_contact = FIRST_BACKOFF_SECONDS, time.monotonic()
        while True:
            try:
                await self._connect()
                return
            except _Broken as broken:
                if broken.had_contact:
                    backoff, last_contact = FIRST_BACKOFF_SECONDS, time.monotonic()
                if self._stopping.is_set():
                    return
                if time.monotonic() - last_contact > self._patience_seconds:
                    raise ConnectionLost(
                        f"{self._address} was not to be reached for "
                        f"{self._patience_seconds:.0f} s: {broken}"
                    ) from None
                log.warning("%s: %s; trying again", self._address, broken)
            wait = asyncio.create_task(self._stopping.wait())
            await asyncio.wait([wait], timeout=backoff * random.uniform(0.5, 1.0))
            wait.cancel()
            backoff = min(backoff * 2, LONGEST_BACKOFF_SECONDS)

    async def _connect(self) -> None:
        """Serve one connection to its end; returns when the run has ended or we have left."""
        had_contact = False
        async with self._channel() as channel:
            self._call = channel.stream_stream(METHOD)()
            leaver: asyncio.Task[None] | None = None
            try:
                await self._hello()
                had_contact = True
                leaver = asyncio.create_task(self._leave_when_asked())
                await self._read_all()
            except grpc.aio.AioRpcError as error:
                if error.code() not in RETRIED:
                    raise ProtocolMismatch(f"{self._address}: {error.details()}") from error
                raise _Broken(str(error.details()), had_contact=had_contact) from None
            except (asyncio.InvalidStateError, TimeoutError) as error:
                raise _Broken(str(error) or "no answer", had_contact=had_contact) from None
            finally:
                if leaver is not None:
                    leaver.cancel()
                if self._upload is not None:
                    self._upload.cancel()
                self._call.cancel()
                self._call = None

    def _channel(self) -> Any:
        options = list(KEEPALIVE)
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        return grpc.aio.secure_channel(
            self._address,
            grpc.ssl_channel_credentials(
                root_certificates=self._credentials.ca,
                private_key=self._credentials.key,
                certificate_chain=self._credentials.certificate,
            ),
            options=options,
        )

    async def _hello(self) -> None:
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            name=self._node.name,
            layout_digest=self._node.resident.image.layout.digest,
            session=self._session,
            image_id=self._image_id,
        )
        await self._write(ClientFrame(hello=hello))
        frame = await asyncio.wait_for(self._read(), HELLO_SECONDS)
        if frame is None:
            raise TimeoutError("the server closed the connection")
        if frame.WhichOneof("kind") == "fault":
            raise error_of(frame.fault.code, frame.fault.text)
        if frame.WhichOneof("kind") != "welcome":
            raise ProtocolMismatch("the server did not answer hello with welcome")
        welcome = frame.welcome
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"the server speaks version {welcome.protocol_version} of the wire, this device "
                f"{PROTOCOL_VERSION}"
            )
        self._session = welcome.session
        self._node.enter(welcome.run_id)
        log.info("connected to %s", self._address)

    # Reading.

    async def _read(self) -> ServerFrame | None:
        assert self._call is not None
        data = await self._call.read()
        if data is grpc.aio.EOF:
            return None
        try:
            return ServerFrame.FromString(data)
        except DecodeError:
            raise ProtocolMismatch("the server sent a frame that is not of this protocol") from None

    async def _read_all(self) -> None:
        while True:
            frame = await self._read()
            if frame is None:
                if self._stopping.is_set():
                    return
                raise TimeoutError("the server closed the connection")
            match frame.WhichOneof("kind"):
                case "image":
                    await self._begin_image(frame.image)
                case "chunk":
                    self._take_chunk(frame.chunk)
                case "instruction":
                    await self._take_instruction(frame.instruction)
                case "receipt":
                    self._receipts.put_nowait(frame.receipt)
                case "fault":
                    self._take_fault(frame.fault)
                case "goodbye":
                    log.info("the run has ended")
                    return
                case other:
                    raise ProtocolMismatch(f"the server sent a frame of kind {other} in mid-stream")

    async def _begin_image(self, image: Image) -> None:
        """Make ready to receive a model, straight into the resident model's memory."""
        await self._end_work()
        memory = self._node.resident.image.buffer()
        if image.num_bytes != len(memory):
            raise ModelMismatch(
                f"the server's model has {image.num_bytes:,} bytes, this device's {len(memory):,}"
            )
        self._image_id = ""
        self._incoming = _IncomingImage(image, memory)

    def _take_chunk(self, chunk: Chunk) -> None:
        incoming = self._incoming
        if incoming is None or chunk.transfer_id != incoming.image_id:
            raise ProtocolMismatch("the server sent a chunk that belongs to nothing")
        incoming.add(chunk)

    async def _take_instruction(self, instruction: Instruction) -> None:
        """Begin the work, unless it is begun already; then send what is there of it."""
        message_id = instruction.message_id
        if message_id == self._working_on:
            if self._answer is not None:
                self._begin_upload(self._answer, is_resumed=True)
            return
        await self._end_work()
        if instruction.image_id and instruction.image_id != self._image_id:
            incoming = self._incoming
            if incoming is None or incoming.image_id != instruction.image_id:
                raise ProtocolMismatch("the server sent a plan without its model")
            incoming.verify()
            self._image_id, self._incoming = incoming.image_id, None
        self._working_on = message_id
        if not self._stopping.is_set():
            self._node.resume()
        self._work = asyncio.create_task(self._do(instruction))

    async def _do(self, instruction: Instruction) -> None:
        image = self._node.resident.image.buffer() if instruction.image_id else None
        answer = await asyncio.to_thread(
            self._node.answer,
            message_id=instruction.message_id,
            message_type=instruction.message_type,
            head_json=instruction.head_json,
            image=image,
        )
        self._answer = answer
        if self._call is not None:
            self._begin_upload(answer, is_resumed=False)

    async def _end_work(self) -> None:
        """Give up the work and the upload in progress: something newer has come."""
        self._working_on = ""
        self._answer = None
        if self._upload is not None:
            self._upload.cancel()
        if self._work is not None and not self._work.done():
            self._node.interrupt()
            await self._work
            self._answer = None
            if self._upload is not None:
                self._upload.cancel()

    def _take_fault(self, fault: Fault) -> None:
        error = error_of(fault.code, fault.text)
        if not fault.message_id:
            raise error
        log.warning("the server refused the update: %s: %s", error.code, error)
        if fault.message_id == self._working_on:
            self._receipts.put_nowait(error)

    # Writing.

    async def _write(self, frame: ClientFrame) -> None:
        if self._call is not None:
            async with self._writing:
                await self._call.write(frame.SerializeToString())

    def _begin_upload(self, answer: Answer, *, is_resumed: bool) -> None:
        if self._upload is not None:
            self._upload.cancel()
        self._receipts = asyncio.Queue()
        self._upload = asyncio.create_task(self._send_answer(answer, is_resumed=is_resumed))

    async def _send_answer(self, answer: Answer, *, is_resumed: bool) -> None:
        """Send a reply; on a new stream, from where the server has it."""
        try:
            if answer.error is not None:
                code, text = travelling(answer.error)
                fault = Fault(message_id=answer.message_id, code=code, text=text)
                await self._write(ClientFrame(fault=fault))
                log.warning("%s: %s", code, answer.error)
                self._working_on = ""
                return
            vector = memoryview(answer.vector)
            reply = Reply(
                message_id=answer.message_id,
                head_json=answer.head_json,
                num_bytes=len(vector),
                sha256=hashlib.sha256(vector).digest(),
            )
            await self._write(ClientFrame(reply=reply))
            start = 0
            if is_resumed:
                receipt = await self._receipts.get()
                if isinstance(receipt, HeadwaterError):
                    return
                start = receipt.next_offset
            for offset in range(start, len(vector), CHUNK_BYTES):
                data = bytes(vector[offset : offset + CHUNK_BYTES])
                chunk = Chunk(transfer_id=answer.message_id, offset=offset, data=data)
                await self._write(ClientFrame(chunk=chunk))
            while True:
                receipt = await self._receipts.get()
                if isinstance(receipt, HeadwaterError) or receipt.is_done:
                    break
            self._working_on, self._answer = "", None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("the stream broke in mid-upload: %s", error)

    async def _leave_when_asked(self) -> None:
        """After ``stop``: wait for the work to end and its update to arrive, then leave."""
        await self._stopping.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_SECONDS):
                if self._work is not None:
                    await self._work
                if self._upload is not None:
                    await asyncio.wait([self._upload])
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._write(ClientFrame(leave=Leave()))
            if self._call is not None:
                await self._call.done_writing()


async def keep_up(uplink: Uplink, *, stay: bool) -> None:
    """Run an uplink until its run has ended, or for good with ``stay``; SIGTERM ends it gracefully.

    Raises:
        HeadwaterError: see ``Uplink.run``.

    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, uplink.stop)
    await uplink.run()
    while stay and not uplink.is_stopping:
        await asyncio.sleep(FIRST_BACKOFF_SECONDS)
        await uplink.run()


class _Broken(Exception):
    """The connection broke; it may be tried again."""

    def __init__(self, text: str, *, had_contact: bool) -> None:
        super().__init__(text)
        self.had_contact = had_contact


class _IncomingImage:
    """A model on its way in."""

    def __init__(self, image: Image, memory: memoryview) -> None:
        self.image_id = image.image_id
        self._sha256 = image.sha256
        self._memory = memory
        self._received = 0
        self._digest = hashlib.sha256()

    def add(self, chunk: Chunk) -> None:
        end = self._received + len(chunk.data)
        if chunk.offset != self._received or end > len(self._memory):
            raise ProtocolMismatch("the server sent a chunk of its model out of order")
        self._memory[self._received : end] = chunk.data
        self._digest.update(chunk.data)
        self._received = end

    def verify(self) -> None:
        """Check the whole model.

        Raises:
            CorruptUpdate: its digest is not the announced one.

        """
        if self._received != len(self._memory) or self._digest.digest() != self._sha256:
            raise CorruptUpdate("the model that arrived is not the one that was announced")
