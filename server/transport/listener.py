"""The gRPC server on the devices' port: its limits, health service, and restart after a failure.

gRPC handles TCP, TLS and HTTP/2 before our code sees a connection. ``grpc_options`` limits the time
and number of connections at each of these layers. A connection that never opens a stream is
invisible to our code, so ``UnidentifiedConnections`` counts them by difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from headwater.common.errors import PortInUse, SettingsError, system_remedy
from headwater.common.system.portability import optional_module
from headwater.common.transport.limits import GRPC_OPTIONS, STREAM_METHOD
from headwater.common.transport.tls import Credentials

log = logging.getLogger(__name__)

resource = optional_module("resource")

HANDSHAKE_SECONDS = 10
IDLE_SECONDS = 60
# A device opens one stream and may request the server's health.
MAX_STREAMS = 4
# gRPC reads a connection into blocks of this size, and keeps the last ones while it is silent.
READ_BUFFER_BYTES = 8192
# Reserved for checkpoint, journal, history, spool files and the enrolment port.
RESERVED_DESCRIPTORS = 256
MAX_DESCRIPTORS = 65_536
MIN_CONNECTIONS = 16
CHECK_SECONDS = 0.25
MAX_PEERS = 8192
HEALTH_SERVICE = "grpc.health.v1.Health"
HEALTH_NAMES = ("", STREAM_METHOD.split("/")[1])


def max_connections() -> int:
    """Return how many devices may be connected, and raise the limit of file descriptors for them.

    The soft limit becomes the hard one: each device takes a descriptor, and the checkpoint still
    needs one after strangers have taken all that they can.
    """
    limit = MAX_DESCRIPTORS
    if resource is not None:  # Windows limits no sockets
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit - RESERVED_DESCRIPTORS, MIN_CONNECTIONS)


def check_descriptors(num_devices: int) -> None:
    """Check that so many devices can be connected at once.

    Raises:
        SettingsError: the limit of open files is too low; a device would see a closed connection.
    """
    if (possible := max_connections()) < num_devices:
        raise SettingsError(
            f"{num_devices} devices take a connection each, and the limit of open files leaves "
            f"{possible}",
            remedy=system_remedy(os.strerror(errno.EMFILE)),
        )


def grpc_options() -> list[tuple[str, int]]:
    """Return gRPC's options for the port."""
    return [
        # Otherwise a second server would silently share the port.
        ("grpc.so_reuseport", 0),
        # From accept() to HTTP/2's first settings; gRPC's default is two minutes.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        # With no stream open; gRPC's default is unlimited.
        ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # By default these grow with the largest reads, and stay: 0.9 MB for each device that has
        # sent 4 MB. gRPC before 1.84 ignores this option.
        ("grpc.experimental.tcp_max_read_buffer_size", READ_BUFFER_BYTES),
        # By default a device may send ahead as much as its link carries: 8 MiB from nearby. Without
        # the probe it sends one chunk ahead, which is 18 MB/s at a round trip of 50 ms. What the
        # server sends is not limited: each device probes its own link.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        # A strike for a frequent ping ends a connection only when its answers have been read, and
        # until then each further one copies all strikes before it. Without them gRPC reads a
        # connection no further while its answers are unread.
        ("grpc.http2.max_ping_strikes", 0),
    ]


class HealthService:
    """Answers ``grpc.health.v1.Health/Check``, as load balancers and ``grpc_health_probe`` call it.

    SERVING for the services "" and "headwater.Stream" until the server drains or closes; a pause
    does not change it, because devices stay connected. With TLS a health check needs a certificate
    as any device does. ``Watch`` is not served: it would hold a stream open per caller.
    """

    def __init__(self, note_call: Callable[[str], None]) -> None:
        """``note_call`` is called with the address and port of each caller."""
        self.is_serving = True
        self._note_call = note_call

    def rpc_handler(self) -> Any:
        """Return the handler to add to a grpc.aio server."""
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=HealthCheckRequest.FromString,
            response_serializer=HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, {"Check": check})

    async def _check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        self._note_call(context.peer())
        if request.service not in HEALTH_NAMES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        status = HealthCheckResponse.SERVING if self.is_serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=status)


class UnidentifiedConnections:
    """Counts TLS connections that made no call: without a valid certificate, or silent.

    gRPC reports the start of a connection, and our code sees the first frame of a stream; a failure
    in between is reported to nobody. The count is therefore a difference: connections older than a
    handshake may take, minus connections that opened a stream or checked the health. It is exact
    where each connection does so at once, as devices do. The same address and port is another
    connection once its streams have ended: a device may come back from there.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._num_started = 0
        self._num_identified = 0
        self._identified: OrderedDict[str, None] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()

    def note_connection(self, now: float) -> None:
        """Record the start of a connection; gRPC calls this from a thread of its own."""
        with self._lock:
            self._recent.append(now)

    def note_call(self, peer: str) -> None:
        """Record a call; ``peer`` is its connection's address and port."""
        with self._lock:
            if peer not in self._identified:
                self._num_identified += 1
            self._identified[peer] = None
            self._identified.move_to_end(peer)
            if len(self._identified) > MAX_PEERS:
                self._identified.popitem(last=False)

    def note_end(self, peer: str) -> None:
        """Record the end of a stream, and with a device's stream of its connection."""
        with self._lock:
            self._identified.pop(peer, None)

    def count(self, now: float) -> int:
        """Return the number so far."""
        with self._lock:
            while self._recent and self._recent[0] < now - HANDSHAKE_SECONDS:
                self._recent.popleft()
                self._num_started += 1
            self._count = max(self._count, self._num_started - self._num_identified)
            return self._count


class Listener:
    """gRPC's server on the devices' port; all methods run in the servicer's event loop."""

    def __init__(
        self, address: str, credentials: Credentials | None, handlers: Sequence[Any]
    ) -> None:
        self.port = 0
        self.num_restarts = 0
        self.unidentified = UnidentifiedConnections()
        self._address = address
        self._credentials = credentials
        self._handlers = tuple(handlers)
        self._server: Any = None
        self._failed: dict[asyncio.Task[None], Any] = {}
        self._watching: asyncio.Task[None] | None = None

    def note_call(self, peer: str) -> None:
        """Record a call; without TLS gRPC reports no connections, so none is counted."""
        if self._credentials is not None:
            self.unidentified.note_call(peer)

    async def open(self) -> None:
        """Open the port.

        Raises:
            PortInUse: another process has it.
        """
        await self._open(self._address)
        self._watching = asyncio.create_task(self._restart_if_failed())

    async def close(self) -> None:
        """Close the port and every stream."""
        if self._watching is None:
            return
        self._watching.cancel()
        await self._server.stop(grace=0.2)
        for failed in list(self._failed.values()):
            with contextlib.suppress(Exception):  # the error that made it fail
                await failed.stop(grace=None)

    async def _open(self, address: str) -> None:
        server = grpc.aio.server(options=[*GRPC_OPTIONS, *grpc_options()])
        server.add_generic_rpc_handlers(self._handlers)
        try:
            if self._credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, self._tls(self._credentials))
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {address}") from error
        await server.start()
        self._server = server

    def _tls(self, credentials: Credentials) -> Any:
        configuration = grpc.ssl_server_certificate_configuration(
            [(credentials.key, credentials.certificate)], root_certificates=credentials.ca
        )

        def on_connection() -> None:
            """Count a connection; None keeps the certificate."""
            self.unidentified.note_connection(time.monotonic())

        return grpc.dynamic_ssl_server_credentials(
            configuration, on_connection, require_client_authentication=True
        )

    async def _restart_if_failed(self) -> None:
        """Open the port again whenever gRPC's server has failed; open streams continue.

        A request for a path that is not UTF-8 stops grpc.aio's server (grpcio 1.85; found by
        ``benchmarks/fuzz.py``): it accepts no more connections. None of our code runs before that
        point, and only ``is_running`` of its inner server shows it.
        """
        host = self._address.rpartition(":")[0]
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._server._server.is_running():
                continue
            failed = self._server
            try:
                await self._open(f"{host}:{self.port}")
            except PortInUse as error:
                log.error("gRPC's server has failed and cannot be restarted yet: %s", error)
                continue
            self.num_restarts += 1
            log.error("gRPC's server has failed and was restarted")
            ending = asyncio.create_task(_wait_for_end(failed))
            self._failed[ending] = failed
            ending.add_done_callback(self._failed.pop)


async def _wait_for_end(server: Any) -> None:
    """Wait until the last stream of a failed server has ended."""
    with contextlib.suppress(Exception):  # the error that made it fail is raised here again
        await server.wait_for_termination()
