"""Serves one gRPC stream to the server, from the hello to the goodbye.

The client says hello, receives the model and its instructions, and sends each answer. Other tasks
on the same stream renew the certificate in time, and leave when the client is to stop or to stay
away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headwater import __version__
from headwater.client.device.owner_limits import AwayPeriod, OwnerLimits
from headwater.client.flower.node import Node
from headwater.client.operations.activity import WAITING
from headwater.client.operations.installed_tasks import task_in
from headwater.client.transport.certificate import DeviceCertificate, renew_when_due
from headwater.client.transport.exchange import Exchange
from headwater.client.transport.leaving import LeavePolicy, leave_frame, say_refusal
from headwater.common.errors import (
    HeadwaterError,
    ModelMismatch,
    ProtocolMismatch,
    TaskBundleRefused,
    TaskNotInstalled,
    error_of,
)
from headwater.common.model.mismatch import mismatch_error
from headwater.common.transport.limits import (
    FRAME_BYTES,
    HELLO_SECONDS,
    PROTOCOL_VERSION,
    named_version,
    same_version,
)
from headwater.common.transport.wire_pb2 import (
    ClientFrame,
    Fault,
    Hello,
    Leave,
    Notice,
    OtherTask,
    ServerFrame,
    Welcome,
)

log = logging.getLogger(__name__)

CONNECT_SECONDS = 20.0
PROGRESS_SECONDS = 2.0

WRITE_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError)

Call = Any  # grpc.aio.StreamStreamCall, which ships without types


class OtherTaskOffered(Exception):
    """The server's run has another task that is installed here: the device is to load it.

    ``spec`` is its place, if the server has just handed it out.
    """

    def __init__(self, name: str, spec: str | None = None) -> None:
        super().__init__(name)
        self.name, self.spec = name, spec


@dataclass(kw_only=True)
class ClientStream:
    """One stream, while its connection lasts."""

    address: str
    call: Call
    node: Node
    exchange: Exchange
    leaving: LeavePolicy
    limits: OwnerLimits
    certificate: DeviceCertificate | None
    stopping: asyncio.Event
    """Set when the client is to leave for good."""
    has_contact: bool = False
    """Whether the server has welcomed the client."""
    session: bytes = b""
    """The server's token, by which the next stream continues this session."""
    _away: AwayPeriod | None = None
    _has_left: bool = False
    _is_paused: bool = False
    _is_watched: bool = False
    """Whether somebody watches the devices' progress on the server's page."""
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def serve(self, hello: Hello) -> bool:
        """Serve the stream until the run ends or the client leaves.

        Returns False if the client has left for a while.

        Raises:
            HeadwaterError: the server refused the client, or broke the protocol.
            OlderTerm: the client has met a later server of this run.
            ModelBroken: a received model is not the announced one.
            AioRpcError, InvalidStateError, TimeoutError: the connection is lost.
        """
        async with asyncio.timeout(CONNECT_SECONDS):
            welcome = await self._say_hello(hello)
        self.node.enter(welcome.run_id, term=welcome.term)
        if hello.session and hello.session != welcome.session:
            self.exchange.forget()  # another server, or one that gave this device up
        self.session = welcome.session
        self.node.counters.connected()
        self.node.activity.enter(WAITING)
        log.info("connected to %s", self.address)
        self.has_contact = True
        jobs: list[Coroutine[Any, Any, None]] = [self._leave_when_stopped(), self._tell_progress()]
        if self.limits.is_set:
            jobs.append(self._leave_when_due())
        if self.certificate is not None:
            jobs.append(renew_when_due(self.certificate, self._write_if_open))
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            return await self._read_all()
        finally:
            for task in tasks:
                task.cancel()

    async def _say_hello(self, hello: Hello) -> Welcome:
        await self.write(ClientFrame(hello=hello))
        frame = await asyncio.wait_for(self._read(), HELLO_SECONDS)
        if frame is None:
            raise TimeoutError("the server closed the connection")
        if frame.WhichOneof("kind") == "fault":
            raise self._refusal(frame.fault)
        if frame.WhichOneof("kind") == "other_task":
            try:
                raise self._other_task(frame.other_task)
            except TaskBundleRefused as error:
                await say_refusal(self.call, error)
                raise
        if frame.WhichOneof("kind") != "welcome":
            raise ProtocolMismatch("the server did not answer hello with welcome")
        welcome = frame.welcome
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"the server speaks protocol {welcome.protocol_version}"
                f"{named_version(welcome.version)}, this device {PROTOCOL_VERSION} (headwater "
                f"{__version__})",
                remedy=same_version(welcome.version),
            )
        if welcome.has_displaced:
            log.warning(
                "the server ended another open stream of %s with this device's key: run only one "
                "process with a certificate",
                self.node.name,
            )
        return welcome

    def _other_task(self, offered: OtherTask) -> Exception:
        """Return what ends the stream for another task: a change to it, or the refusal of it.

        Raises:
            TaskBundleRefused, StateError: see ``task_in``.
        """
        name = offered.name
        if offered.bundle and self.node.bundle:
            return OtherTaskOffered(*task_in(offered.bundle, self.node.settings))
        if name in self.node.tasks and name != self.node.task:
            return OtherTaskOffered(name)
        has = ", ".join(self.node.tasks) or self.node.task
        return TaskNotInstalled(
            f"the server's run has the task {name[:100]!r}; this device has {has}"
        )

    def _refusal(self, fault: Fault) -> HeadwaterError:
        """Return the error by which the server refused; name the tensor if the models differ."""
        error = error_of(fault.code, fault.text, remedy=fault.remedy)
        if not isinstance(error, ModelMismatch) or not fault.layout:
            return error
        return mismatch_error(
            "this device's model is not the server's",
            self.node.trainer.image.layout.rows,
            fault.layout,
            here="this device's",
            there="the server's model",
        )

    async def _read(self) -> ServerFrame | None:
        data = await self.call.read()
        if data is grpc.aio.EOF:
            return None
        self.node.counters.received_bytes += len(data) + FRAME_BYTES
        self.limits.count(len(data) + FRAME_BYTES)
        try:
            return ServerFrame.FromString(data)
        except DecodeError:
            raise ProtocolMismatch("the server sent a frame that is not of this protocol") from None

    async def _read_all(self) -> bool:
        """Handle frames until the run ends; False if the client has left for a while."""
        while True:
            frame = await self._read()
            if frame is None:
                if self.stopping.is_set() or self._has_left:
                    return self.stopping.is_set()
                raise TimeoutError("the server closed the connection")
            if self._has_left:
                continue
            if (away := self.leaving.reason_to_decline(frame)) is not None:
                await self._leave(leave_frame(away))
            elif await self._handle(frame):
                self.node.activity.enter("the run has ended")
                log.info("the run has ended")
                return True

    async def _handle(self, frame: ServerFrame) -> bool:
        """Handle a frame; return whether it ends the run."""
        match frame.WhichOneof("kind"):
            case "image":
                await self.exchange.begin_image(frame.image)
            case "chunk":
                self.exchange.take_chunk(frame.chunk)
            case "instruction":
                if frame.small_image:
                    image_id = frame.instruction.image_id
                    await self.exchange.take_small_image(image_id, frame.small_image)
                is_stopping = self.stopping.is_set() or self._away is not None
                await self.exchange.take_instruction(frame.instruction, is_stopping=is_stopping)
            case "receipt":
                self.exchange.take_receipt(frame.receipt)
            case "fault":
                if not frame.fault.message_id:  # it concerns the whole stream
                    raise self._refusal(frame.fault)
                self.exchange.take_fault(frame.fault)
            case "certificate" if self.certificate is not None:
                self.certificate.take(frame.certificate)
            case "notice":
                self._take_notice(frame.notice)
            case "goodbye":
                return True
            case other:
                raise ProtocolMismatch(f"the server sent an unexpected frame of kind {other}")
        return False

    def _take_notice(self, notice: Notice) -> None:
        """Tell the device's owner that the run is paused, or continues."""
        self._is_watched = notice.is_watched
        if notice.is_paused == self._is_paused:
            return
        self._is_paused = notice.is_paused
        self.node.activity.enter("waits: the run is paused" if notice.is_paused else WAITING)
        if notice.is_paused:
            log.warning("the server's operator has paused the run; this device stays connected")
        else:
            log.warning("the run continues")

    async def write(self, frame: ClientFrame) -> None:
        """Write a frame.

        Raises:
            AioRpcError, InvalidStateError: the connection is lost.
        """
        async with self._write_lock:
            data = frame.SerializeToString()
            await self.call.write(data)
            self.node.counters.sent_bytes += len(data) + FRAME_BYTES
            self.limits.count(len(data) + FRAME_BYTES)

    async def _write_if_open(self, frame: ClientFrame) -> None:
        with contextlib.suppress(*WRITE_ERRORS):
            await self.write(frame)

    async def _tell_progress(self) -> None:
        """While somebody watches, tell how many micro-batches of the plan are done."""
        told = None
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            progress = self.exchange.progress() if self._is_watched else None
            if progress is not None and progress != told:
                told = progress
                await self._write_if_open(ClientFrame(progress=progress))

    async def _leave_when_stopped(self) -> None:
        """After ``Connection.stop``: finish the update, then leave."""
        await self.stopping.wait()
        await self.leaving.finish_for_good()
        await self._leave(Leave())

    async def _leave_when_due(self) -> None:
        """Leave for a while when the owner's settings require it, after the update is sent."""
        self._away = await self.leaving.wait_until_due()
        log.warning("%s: %s", self._away.error.code, self._away.error)
        await self._leave(await self.leaving.finish_until(self._away))

    async def _leave(self, leave: Leave) -> None:
        with contextlib.suppress(*WRITE_ERRORS):
            await self.write(ClientFrame(leave=leave))
            self._has_left = True
            await self.call.done_writing()
