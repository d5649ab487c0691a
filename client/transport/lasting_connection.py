"""Keeps a device connected to its server, and reconnects after every failure of the network.

The connection is outbound. A broken one is replaced, by the next of the servers' addresses if there
are several, until none could be reached for the client's patience. The exchange
(``client.transport.exchange``) continues in the meantime.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from headwater import __version__
from headwater.client.device.owner_limits import OwnerLimits
from headwater.client.flower.node import Node
from headwater.client.operations.counters import Counters
from headwater.client.transport.certificate import DeviceCertificate
from headwater.client.transport.exchange import Exchange
from headwater.client.transport.incoming_image import ModelBroken
from headwater.client.transport.leaving import LeavePolicy
from headwater.client.transport.retry_policy import (
    FIRST_BACKOFF_SECONDS,
    ConnectionBroken,
    RetryPolicy,
)
from headwater.client.transport.stream import WRITE_ERRORS, ClientStream
from headwater.client.transport.upload import StreamBroken
from headwater.common.errors import ConnectionLost, OlderTerm, ProtocolMismatch, TaskNotInstalled
from headwater.common.system.stop_signals import StopRequests, at_stop_signals
from headwater.common.transport.last_events import last_events
from headwater.common.transport.limits import PROTOCOL_VERSION, STREAM_METHOD, channel_options
from headwater.common.transport.proxy import proxy_options
from headwater.common.transport.tls import Credentials, split_address
from headwater.common.transport.wire_pb2 import ClientFrame, Hello
from headwater.common.wording import duration_text

log = logging.getLogger(__name__)

OTHER_TASK_SECONDS = 30.0
"""How often a device that stays asks again for a run of a task that it has."""

RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class Connection:
    """A node's connection, until the run ends or ``stop`` is called."""

    def __init__(
        self,
        node: Node,
        addresses: Sequence[str],
        *,
        certificate: DeviceCertificate | None,
        limits: OwnerLimits | None,
        patience_seconds: float,
    ) -> None:
        """Connect to the first address that serves the run, trying them in turn.

        Without a certificate the connection is plain text.
        """
        self._node = node
        self._addresses = deque(addresses)
        self._certificate = certificate
        self._limits = limits or OwnerLimits()
        self.patience_seconds = patience_seconds
        self._exchange = Exchange(node, self._write)
        self._leaving = LeavePolicy(node, self._exchange, self._limits)
        self._session = b""
        self._stream: ClientStream | None = None
        self._stopping = asyncio.Event()
        self._awaits_next = False
        """Whether the device's last run has ended, and it waits for the next one."""

    @property
    def _address(self) -> str:
        """The server that the device is connected to, or tries next."""
        return self._addresses[0]

    @property
    def name(self) -> str:
        """The device's name."""
        return self._node.name

    @property
    def has_connected(self) -> bool:
        """Whether a server has welcomed this device; known once the stream has ended."""
        return bool(self._session)

    @property
    def has_trained(self) -> bool:
        """Whether the device has carried out a plan."""
        return self._node.counters.num_updates > 0

    @property
    def counters(self) -> Counters:
        """What the device has done, and why its last answer did not count."""
        return self._node.counters

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Stop gracefully: send what is summed so far, then close."""
        log.warning("stopping: what is summed so far is sent; stop again to end at once")
        self._stopping.set()
        self._node.activity.enter("stops, and sends what is summed so far")
        self._node.interrupt()

    async def run_next(self) -> None:
        """Wait for the next run as long as the patience lasts, and take part in it.

        Raises:
            HeadwaterError, OtherTaskOffered: see ``run``.
        """
        self._awaits_next = True
        self._node.activity.enter("the run has ended; waits for the next one")
        await self.wait(FIRST_BACKOFF_SECONDS)
        try:
            await self.run()
        except ConnectionLost:
            if not self._awaits_next:
                raise
            self._stopping.set()  # no server has come back: the device has done its work

    async def run(self) -> None:
        """Stay connected until the server says that the run has ended, or ``stop`` is called.

        Raises:
            DeviceRefused: the server refused this device.
            ConnectionLost: the server could not be reached for ``patience_seconds``.
            CorruptUpdate: the server's models are repeatedly not those that it announces.
            OtherTaskOffered: the server's run has another task, which is installed here.
        """
        try:
            await self._keep_connected()
        finally:
            await self._exchange.end()
            self._node.leave()

    async def _keep_connected(self) -> None:
        retries = RetryPolicy(
            self._addresses, self.patience_seconds, has_tls=self._certificate is not None
        )
        while True:
            if await self._stay_away():
                retries.reset()
            if self._stopping.is_set():
                return
            try:
                if not self._awaits_next:
                    self._node.activity.enter(f"connects to {self._address}")
                if await self._connect():
                    return
                await self._exchange.end()
                self._node.leave()  # its secure session cannot continue while it is away
            except ConnectionBroken as broken:
                if self._stopping.is_set():
                    return
                if self._exchange.is_offline:
                    retries.reset()  # it has work, however long the link is away
                seconds = retries.wait_seconds(broken)
                hint = retries.hint(broken)
                why = str(broken) if hint is None else f"{broken}; {hint}"
                self._awaits_next = self._awaits_next and not broken.had_contact
                # That no server is there is what this device waits out: it is no fault.
                level = logging.INFO if self._awaits_next else logging.WARNING
                if retries.is_news(broken, why):
                    log.log(level, "%s: %s; trying again", self._address, why)
                self._addresses.rotate(-1)
                if not self._awaits_next:
                    self._node.activity.enter(f"tries {self._address} again at {_time_in(seconds)}")
                await self.wait(seconds)

    async def _stay_away(self) -> bool:
        """Wait without a connection until the owner's settings allow one; True if it waited."""
        reason = ""
        while not self._stopping.is_set():
            away = self._leaving.reason_to_stay_away()
            if away is None:
                break
            if str(away.error) != reason:
                reason = str(away.error)
                log.warning("%s: %s", away.error.code, reason)
                self._node.activity.enter(f"stays away: {reason}")
            await self.wait(self._leaving.wait_seconds(away))
        return bool(reason)

    async def wait_after_change(self, seconds: float) -> None:
        """Wait before the first connection, because servers have named one task after another."""
        log.warning(
            "servers have named one task after another, and none has had this device train: it "
            "waits %.1f s",
            seconds,
        )
        self._node.activity.enter(f"connects to {self._address} at {_time_in(seconds)}")
        await self.wait(seconds)

    async def wait(self, seconds: float) -> None:
        """Wait, or return early if ``stop`` is called."""
        wait = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([wait], timeout=seconds)
        wait.cancel()

    async def _connect(self) -> bool:
        """Serve one connection; False if the client has left for a while.

        Raises:
            ConnectionBroken: another connection may succeed.
        """
        async with self._channel() as channel:
            call = channel.stream_stream(STREAM_METHOD)()
            self._stream = stream = ClientStream(
                address=self._address,
                call=call,
                node=self._node,
                exchange=self._exchange,
                leaving=self._leaving,
                limits=self._limits,
                certificate=self._certificate,
                stopping=self._stopping,
            )
            self._exchange.connected()
            try:
                return await stream.serve(self._hello())
            except grpc.aio.AioRpcError as error:
                if error.code() not in RETRIED:
                    raise ProtocolMismatch(f"{self._address}: {error.details()}") from error
                raise ConnectionBroken(
                    str(error.details()), had_contact=stream.has_contact
                ) from None
            except (asyncio.InvalidStateError, TimeoutError) as error:
                raise ConnectionBroken(
                    str(error) or "no answer", had_contact=stream.has_contact
                ) from None
            except OlderTerm as error:
                raise ConnectionBroken(f"{error.code}: {error}", had_contact=False) from None
            except ModelBroken as error:
                raise ConnectionBroken(
                    str(error), had_contact=stream.has_contact, is_corrupt=True
                ) from None
            finally:
                self._session = stream.session or self._session
                self._node.counters.disconnected()
                self._exchange.disconnected()
                self._limits.write()
                call.cancel()
                self._stream = None

    def _hello(self) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            name=self._node.name,
            layout_digest=self._node.trainer.image.layout.digest,
            session=self._session,
            image_id=self._exchange.image_id,
            task=self._node.task,
            tasks=self._node.tasks,
            bundle=self._node.bundle,
            version=__version__,
        )

    def _channel(self) -> Any:
        has_standby = len(self._addresses) > 1
        if self._certificate is None:
            return channel_to(self._address, None, has_standby=has_standby)
        self._certificate.check()
        return channel_to(self._address, self._certificate.credentials, has_standby=has_standby)

    async def _write(self, frame: ClientFrame) -> None:
        """Write a frame of the exchange to the current stream, if there is one."""
        if self._stream is None:
            return
        try:
            await self._stream.write(frame)
        except WRITE_ERRORS as error:
            raise StreamBroken(str(error)) from error


def _time_in(seconds: float) -> str:
    """Return the time of day after so many seconds, as 14:05:32."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))


def channel_to(address: str, credentials: Credentials | None, *, has_standby: bool) -> Any:
    """Return a channel to a server, through the proxy that leads to it, if there is one."""
    host, _ = split_address(address)
    options = [*channel_options(has_standby=has_standby), *proxy_options(host)]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(
            root_certificates=credentials.ca,
            private_key=credentials.key,
            certificate_chain=credentials.certificate,
        ),
        options=options,
    )


async def stay_connected(
    connection: Connection, *, stay: bool | None, after_seconds: float = 0.0
) -> None:
    """Run a connection until its run has ended, and then those of the next runs.

    | ``stay`` | after the end of a run |
    | --- | --- |
    | False | it ends, too |
    | None | it waits for the next run as long as its patience lasts |
    | True | it waits without limit, also for a run of a task that it has |

    A stop signal ends it. ``after_seconds`` is how long to wait first
    (``client.transport.retry_policy.TaskChanges``).

    Raises:
        HeadwaterError, OtherTaskOffered: see ``Connection.run``.
    """
    loop = asyncio.get_running_loop()
    # Not by the loop's add_signal_handler, which Windows lacks.
    requests = StopRequests(lambda: loop.call_soon_threadsafe(connection.stop))
    try:
        with at_stop_signals(requests):
            if after_seconds:
                await connection.wait_after_change(after_seconds)
            await _unless_other_task(connection, connection.run, stay=stay)
            if not connection.is_stopping:
                _warn_of_absence(connection.counters)
            if stay is not False and not connection.is_stopping:
                log.warning(
                    "the run has ended; this device waits for the next one%s",
                    ""
                    if stay
                    else f", {duration_text(connection.patience_seconds)} (with --once it ends)",
                )
            while stay is not False and not connection.is_stopping:
                await _unless_other_task(connection, connection.run_next, stay=stay)
    finally:
        await last_events()


def _warn_of_absence(counters: Counters) -> None:
    """Log at a run's end that this device was in no round, or that its last answer did not count.

    The end alone would look like success.
    """
    if (error := counters.refusal) is not None:
        log.warning("this device's last answer did not count: %s: %s", error.code, error)
        if error.remedy:
            log.warning("remedy: %s", error.remedy)
    elif not counters.has_plan:
        log.warning(
            "this device was in no round: it connected too late, or was left out; on the server, "
            "`headwater-server plan --out DIR --explain` says why"
        )


async def _unless_other_task(
    connection: Connection, run: Callable[[], Awaitable[None]], *, stay: bool | None
) -> None:
    """Run a connection until its run ends; a device that stays waits out a run of another task."""
    try:
        await run()
    except TaskNotInstalled as error:
        if not stay:
            raise
        log.warning("%s: %s; %s", error.code, error, error.remedy)
        await connection.wait(OTHER_TASK_SECONDS)
