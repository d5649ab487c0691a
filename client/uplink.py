"""The device's end of the stream: one outbound connection, kept up whatever the network does.

The device says hello, is pushed the model and its plans, and sends each update in chunks. The
vector stays in the accumulator until the server has acknowledged all of it; after a broken
connection the upload goes on from the last byte that arrived. A plan that supersedes another, or
the news that its round is over, ends the work on it.

Nothing here cancels a task that may be writing: grpc.aio would end the whole stream with it. An
upload that is given up stops at its next chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
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
CONNECT_SECONDS = 20.0
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
        self._asked_here = ""
        self._answer: Answer | None = None
        self._upload: _Upload | None = None
        self._call: Call | None = None
        self._writing = asyncio.Lock()
        self._stopping = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ask for a graceful end: what was summed so far is sent, then the stream is closed."""
        if self._stopping.is_set():
            log.warning("asked again: stopped at once, nothing more is sent")
            logging.shutdown()
            os._exit(130)
        log.warning("asked to stop: what is summed so far is sent; ask again to stop at once")
        self._stopping.set()
        self._node.interrupt()

    async def run(self) -> None:
        """Stay connected until the server says that the run has ended, or ``stop`` is called.

        Raises:
            DeviceRefused: the server turned this device away.
            ConnectionLost: the server was not to be reached for ``patience_seconds``.
        """
        try:
            await self._keep_connected()
        finally:
            await self._end_work()

    async def _keep_connected(self) -> None:
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
                left_seconds = last_contact + self._patience_seconds - time.monotonic()
                if left_seconds <= 0:
                    raise self._lost(broken) from None
                log.warning("%s: %s; trying again", self._address, broken)
            wait = asyncio.create_task(self._stopping.wait())
            wait_seconds = min(backoff * random.uniform(0.5, 1.0), left_seconds)
            await asyncio.wait([wait], timeout=wait_seconds)
            wait.cancel()
            backoff = min(backoff * 2, LONGEST_BACKOFF_SECONDS)

    def _lost(self, broken: _Broken) -> ConnectionLost:
        protection = "without TLS" if self._credentials is None else "with TLS"
        return ConnectionLost(
            f"{self._address} was not to be reached for {self._patience_seconds:g} s: {broken}",
            remedy=f"check the address and that the server runs, {protection} as this device",
        )

    async def _connect(self) -> None:
        """Serve one connection to its end; returns when the run has ended or we have left."""
        had_contact = False
        async with self._channel() as channel:
            self._call, self._asked_here = channel.stream_stream(METHOD)(), ""
            leaver: asyncio.Task[None] | None = None
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
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
                    self._upload.give_up()
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
                    self._take_receipt(frame.receipt)
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
        self._asked_here = instruction.message_id
        if instruction.message_id == self._working_on:
            if self._answer is not None:
                self._begin_upload(self._answer)
            return
        await self._end_work()
        if instruction.image_id and instruction.image_id != self._image_id:
            incoming = self._incoming
            if incoming is None or incoming.image_id != instruction.image_id:
                raise ProtocolMismatch("the server sent a plan without its model")
            incoming.verify()
            self._image_id, self._incoming = incoming.image_id, None
        self._working_on = instruction.message_id
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
        if self._working_on != instruction.message_id:
            return  # given up meanwhile
        self._answer = answer
        if self._asked_here == instruction.message_id:
            self._begin_upload(answer)

    def _give_up_work(self) -> None:
        """Give up the work and the upload in progress: nobody waits for them any more."""
        self._working_on, self._answer = "", None
        if self._upload is not None:
            self._upload.give_up()
        if self._work is not None and not self._work.done():
            self._node.interrupt()

    async def _end_work(self) -> None:
        """Give up the work and wait for its end: the vector and the model are free again."""
        self._give_up_work()
        if self._work is not None:
            await self._work

    def _take_receipt(self, receipt: Receipt) -> None:
        if self._upload is not None and receipt.message_id == self._upload.answer.message_id:
            self._upload.receipts.put_nowait(receipt)

    def _take_fault(self, fault: Fault) -> None:
        error = error_of(fault.code, fault.text)
        if not fault.message_id:
            raise error
        log.warning("the server refused the update: %s: %s", error.code, error)
        if fault.message_id == self._working_on:
            self._give_up_work()

    # Writing.

    async def _write(self, frame: ClientFrame) -> None:
        if self._call is not None:
            async with self._writing:
                await self._call.write(frame.SerializeToString())

    def _begin_upload(self, answer: Answer) -> None:
        self._upload = upload = _Upload(answer)
        upload.task = asyncio.create_task(self._send_answer(upload))

    async def _send_answer(self, upload: _Upload) -> None:
        """Send a reply from where the server has it, or the error that stands for it."""
        answer = upload.answer
        try:
            if answer.error is None:
                await self._send_reply(upload)
            else:
                code, text = travelling(answer.error)
                log.warning("%s: %s", code, answer.error)
                fault = Fault(message_id=answer.message_id, code=code, text=text)
                await self._write(ClientFrame(fault=fault))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("the stream broke in mid-upload: %s", error)
            return
        if not upload.is_given_up and self._working_on == answer.message_id:
            self._working_on, self._answer = "", None

    async def _send_reply(self, upload: _Upload) -> None:
        """Send a reply's head and, from the offset that the server then names, its vector."""
        answer, vector = upload.answer, memoryview(upload.answer.vector)
        digest = await asyncio.to_thread(hashlib.sha256, vector)
        reply = Reply(
            message_id=answer.message_id,
            head_json=answer.head_json,
            num_bytes=len(vector),
            sha256=digest.digest(),
        )
        if upload.is_given_up:
            return
        await self._write(ClientFrame(reply=reply))
        receipt = await upload.receipts.get()
        if receipt is None:
            return
        for offset in range(receipt.next_offset, len(vector), CHUNK_BYTES):
            if upload.is_given_up:
                return
            data = bytes(vector[offset : offset + CHUNK_BYTES])
            chunk = Chunk(transfer_id=answer.message_id, offset=offset, data=data)
            await self._write(ClientFrame(chunk=chunk))
        while receipt is not None and not receipt.is_done:
            receipt = await upload.receipts.get()

    async def _leave_when_asked(self) -> None:
        """After ``stop``: wait for the work to end and its update to arrive, then leave."""
        await self._stopping.wait()
        if self._work is not None:
            await asyncio.wait([self._work], timeout=STOP_GRACE_SECONDS)
        if self._upload is not None and self._upload.task is not None:
            await asyncio.wait([self._upload.task], timeout=STOP_GRACE_SECONDS)
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


class _Upload:
    """An answer on its way out, over one stream."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.task: asyncio.Task[None] | None = None
        self.receipts: asyncio.Queue[Receipt | None] = asyncio.Queue()
        self.is_given_up = False

    def give_up(self) -> None:
        """Stop at the next chunk."""
        self.is_given_up = True
        self.receipts.put_nowait(None)


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
