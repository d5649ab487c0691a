"""The device's end of the stream: one outbound connection, kept up whatever the network does.

The device says hello, is pushed the model and its plans, and sends each update in chunks. A broken
connection is made anew until the server has not been reached for so long; what the device is at
(``client.transport.exchange``) goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headwater.client.device.availability import Availability, AwayPeriod
from headwater.client.flower.node import Node
from headwater.client.transport.exchange import Exchange, ModelBroken, StreamBroken
from headwater.client.transport.leaving import LeavePolicy, leave_frame
from headwater.common.errors import ConnectionLost, CorruptUpdate, ProtocolMismatch, error_of
from headwater.common.transport.limits import (
    CHANNEL,
    FRAME_BYTES,
    HELLO_SECONDS,
    METHOD,
    PROTOCOL_VERSION,
)
from headwater.common.transport.wire_pb2 import (
    ClientFrame,
    Fault,
    Hello,
    Leave,
    Notice,
    ServerFrame,
)
from headwater.common.transport.wire_pb2 import Renewal as RenewalFrame

if TYPE_CHECKING:
    from headwater.client.enrolment.renewal import Renewal

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 30.0
# Garbled models in a row: a flipped bit comes alone, a server that lies does not.
MOST_GARBLED = 4
CONNECT_SECONDS = 20.0
# The wall clock is looked at so often: a laptop that slept wakes up late.
RENEWAL_LOOK_SECONDS = 3600.0
RENEWAL_RETRY_SECONDS = 6 * 3600.0
RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)

Call = Any  # grpc.aio.StreamStreamCall, which ships without types


class Connection:
    """Keeps a node connected until the run ends or it is asked to stop."""

    def __init__(
        self,
        node: Node,
        address: str,
        *,
        renewal: Renewal | None,
        absence: Availability,
        patience_seconds: float,
    ) -> None:
        self.tally = node.tally
        self._node = node
        self._address = address
        self._renewal = renewal
        self._absence = absence
        self._patience_seconds = patience_seconds
        self._session = b""
        self._work = Exchange(node, self._write_of_work)
        self._departure = LeavePolicy(node, self._work, absence)
        self._away: AwayPeriod | None = None
        self._has_left = False
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
            CorruptUpdate: the models that it sends are not those that it announces.
        """
        try:
            await self._keep_connected()
        finally:
            await self._work.end()
            self._node.leave()

    async def _keep_connected(self) -> None:
        backoff, last_contact, num_garbled = FIRST_BACKOFF_SECONDS, time.monotonic(), 0
        while True:
            if await self._stay_away():
                backoff, last_contact = FIRST_BACKOFF_SECONDS, time.monotonic()
            if self._stopping.is_set():
                return
            try:
                if await self._connect():
                    return
                await self._work.end()
                self._node.leave()  # of a session that it cannot answer any more
            except _Broken as broken:
                if broken.had_contact:
                    last_contact = time.monotonic()
                if broken.had_contact and not broken.is_garbled:  # else each try costs a model
                    backoff = FIRST_BACKOFF_SECONDS
                if self._stopping.is_set():
                    return
                num_garbled = num_garbled + 1 if broken.is_garbled else 0
                if num_garbled == MOST_GARBLED:
                    raise CorruptUpdate(f"{num_garbled} times in a row {broken}") from None
                left_seconds = last_contact + self._patience_seconds - time.monotonic()
                if left_seconds <= 0:
                    raise self._lost(broken) from None
                log.warning("%s: %s; trying again", self._address, broken)
                await self._pause(min(backoff * random.uniform(0.5, 1.0), left_seconds))
                backoff = min(backoff * 2, LONGEST_BACKOFF_SECONDS)

    async def _stay_away(self) -> bool:
        """Wait, without a connection, until the settings allow one; True if they did not."""
        reason = ""
        while not self._stopping.is_set() and (away := self._departure.keeps_away()) is not None:
            if str(away.error) != reason:
                reason = str(away.error)
                log.warning("%s: %s", away.error.code, reason)
            await self._pause(self._departure.wait_seconds(away))
        return bool(reason)

    async def _pause(self, seconds: float) -> None:
        """Wait, unless asked to stop."""
        wait = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([wait], timeout=seconds)
        wait.cancel()

    def _lost(self, broken: _Broken) -> ConnectionLost:
        protection = "without TLS" if self._renewal is None else "with TLS"
        return ConnectionLost(
            f"{self._address} was not to be reached for {self._patience_seconds:g} s: {broken}",
            remedy=f"check the address and that the server runs, {protection} as this device",
        )

    async def _connect(self) -> bool:
        """Serve one connection; returns when the run has ended or we have left.

        False if we have left for a while.
        """
        had_contact, self._away, self._has_left = False, None, False
        async with self._channel() as channel:
            self._call = channel.stream_stream(METHOD)()
            self._work.connected()
            beside: list[asyncio.Task[None]] = []
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._hello()
                had_contact = True
                beside.append(asyncio.create_task(self._leave_when_asked()))
                if self._absence.is_set:
                    beside.append(asyncio.create_task(self._leave_when_due()))
                if self._renewal is not None:
                    beside.append(asyncio.create_task(self._renew_when_due(self._renewal)))
                return await self._read_all()
            except grpc.aio.AioRpcError as error:
                if error.code() not in RETRIED:
                    raise ProtocolMismatch(f"{self._address}: {error.details()}") from error
                raise _Broken(str(error.details()), had_contact=had_contact) from None
            except (asyncio.InvalidStateError, TimeoutError) as error:
                raise _Broken(str(error) or "no answer", had_contact=had_contact) from None
            except ModelBroken as error:
                raise _Broken(str(error), had_contact=True, is_garbled=True) from None
            finally:
                for task in beside:
                    task.cancel()
                self.tally.disconnected()
                self._work.disconnected()
                self._absence.write()
                self._call.cancel()
                self._call = None

    def _channel(self) -> Any:
        options = list(CHANNEL)
        if self._renewal is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        self._renewal.check()
        credentials = self._renewal.credentials
        return grpc.aio.secure_channel(
            self._address,
            grpc.ssl_channel_credentials(
                root_certificates=credentials.ca,
                private_key=credentials.key,
                certificate_chain=credentials.certificate,
            ),
            options=options,
        )

    async def _hello(self) -> None:
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            name=self._node.name,
            layout_digest=self._node.trainer.image.layout.digest,
            session=self._session,
            image_id=self._work.image_id,
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
        if welcome.has_displaced:
            log.warning(
                "another stream of %s was open, with this device's key, and has been ended for "
                "this one: run one process with a certificate",
                self._node.name,
            )
        self._session = welcome.session
        self._node.enter(welcome.run_id)
        self.tally.connected()
        log.info("connected to %s", self._address)

    # Reading.

    async def _read(self) -> ServerFrame | None:
        assert self._call is not None
        data = await self._call.read()
        if data is grpc.aio.EOF:
            return None
        self.tally.received_bytes += len(data) + FRAME_BYTES
        self._absence.count(len(data) + FRAME_BYTES)
        try:
            return ServerFrame.FromString(data)
        except DecodeError:
            raise ProtocolMismatch("the server sent a frame that is not of this protocol") from None

    async def _read_all(self) -> bool:
        """Take frames until the run has ended; False if we have left for a while."""
        while True:
            frame = await self._read()
            if frame is None:
                if self._stopping.is_set() or self._has_left:
                    return self._stopping.is_set()
                raise TimeoutError("the server closed the connection")
            if self._has_left:
                continue
            if (away := self._departure.declines(frame)) is not None:
                await self._leave(leave_frame(away))
                continue
            match frame.WhichOneof("kind"):
                case "image":
                    await self._work.begin_image(frame.image)
                case "chunk":
                    self._work.take_chunk(frame.chunk)
                case "instruction":
                    if frame.small_image:
                        image_id = frame.instruction.image_id
                        await self._work.take_small_image(image_id, frame.small_image)
                    is_stopping = self._stopping.is_set() or self._away is not None
                    await self._work.take_instruction(frame.instruction, is_stopping=is_stopping)
                case "receipt":
                    self._work.take_receipt(frame.receipt)
                case "fault":
                    self._take_fault(frame.fault)
                case "certificate" if self._renewal is not None:
                    self._renewal.take(frame.certificate)
                case "notice":
                    _tell(frame.notice)
                case "goodbye":
                    log.info("the run has ended")
                    return True
                case other:
                    raise ProtocolMismatch(f"the server sent a frame of kind {other} in mid-stream")

    def _take_fault(self, fault: Fault) -> None:
        """Tell the work that its update was refused; a fault of no message ends it all."""
        if not fault.message_id:
            raise error_of(fault.code, fault.text)
        self._work.take_fault(fault)

    # Writing.

    async def _write(self, frame: ClientFrame) -> None:
        if self._call is not None:
            async with self._writing:
                data = frame.SerializeToString()
                await self._call.write(data)
                self.tally.sent_bytes += len(data) + FRAME_BYTES
                self._absence.count(len(data) + FRAME_BYTES)

    async def _write_of_work(self, frame: ClientFrame) -> None:
        try:
            await self._write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StreamBroken(str(error)) from error

    async def _renew_when_due(self, renewal: Renewal) -> None:
        """Ask for the next certificate in time, and again if the server would not."""
        while True:
            while (due := renewal.due_seconds()) > 0:
                await asyncio.sleep(min(due, RENEWAL_LOOK_SECONDS))
            request = renewal.request()
            if request is not None:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._write(ClientFrame(renewal=RenewalFrame(signing_request=request)))
            await asyncio.sleep(RENEWAL_RETRY_SECONDS)

    async def _leave_when_asked(self) -> None:
        """After ``stop``: wait for the work to end and its update to arrive, then leave."""
        await self._stopping.wait()
        await self._departure.finish_for_good()
        await self._leave(Leave())

    async def _leave_when_due(self) -> None:
        """Leave for a while when the owner's settings say so, with what was summed sent before."""
        self._away = await self._departure.due()
        log.warning("%s: %s", self._away.error.code, self._away.error)
        await self._leave(await self._departure.finish_until(self._away))

    async def _leave(self, leave: Leave) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._write(ClientFrame(leave=leave))
            self._has_left = True
            if self._call is not None:
                await self._call.done_writing()


async def stay_connected(uplink: Connection, *, stay: bool) -> None:
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


def _tell(notice: Notice) -> None:
    """Say to the device's owner why it has nothing to do, or has again."""
    if notice.is_paused:
        log.warning("the server's operator has paused the run; this device stays connected")
    else:
        log.warning("the run goes on")


class _Broken(Exception):
    """The connection broke; it may be tried again."""

    def __init__(self, text: str, *, had_contact: bool, is_garbled: bool = False) -> None:
        super().__init__(text)
        self.had_contact = had_contact
        self.is_garbled = is_garbled
