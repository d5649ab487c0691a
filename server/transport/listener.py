"""The port that devices reach: gRPC's server, bounded, counted, and opened anew if it falls.

TCP, TLS and HTTP/2 are gRPC's, and strangers meet them before they meet us. ``bounds`` says how
long a connection may dawdle at each, how many streams it may open and how many connections there
may be.
Of a connection that never gets as far as a stream we learn nothing but that it was begun, so those
are counted as the difference (``Strangers``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from headwater.common.errors import PortInUse
from headwater.common.transport.limits import KEEPALIVE
from headwater.common.transport.tls import Credentials

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10
IDLE_SECONDS = 60
# A device opens one stream, and may ask for the server's health.
MAX_STREAMS = 4
# Files that are not connections: checkpoint, journal, history, spool files, the enrolment port.
RESERVED_DESCRIPTORS = 256
MAX_DESCRIPTORS = 65_536
LOOK_SECONDS = 0.25
MAX_PEERS = 8192


def bounds() -> list[tuple[str, int]]:
    """Return gRPC's options for the port, as far as they are no devices' business.

    The soft limit on descriptors is raised to the hard one: each device takes a descriptor, and
    the checkpoint must still get one when strangers have taken what they can.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return [
        # Without it a second server would silently share the port.
        ("grpc.so_reuseport", 0),
        # From accept() to HTTP/2's first settings: two minutes otherwise.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        # With no stream open; forever otherwise.
        ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max(most - RESERVED_DESCRIPTORS, 16)),
    ]


class UnidentifiedConnections:
    """Counts the TLS connections that brought no stream: no certificate, a false one, or silence.

    gRPC tells when a connection begins, and ours is the first word of a stream; who fails in
    between, it says to nobody. So what is counted is the difference: connections that are older
    than a handshake may take, less connections that brought a stream. It is exact where each
    connection opens its stream at once, as those of devices do.
    """

    def __init__(self) -> None:
        self._young: deque[float] = deque()
        self._num_begun = 0
        self._num_known = 0
        self._known: OrderedDict[str, None] = OrderedDict()
        self._num_strangers = 0
        self._lock = threading.Lock()

    def begun(self, now: float) -> None:
        """Note that a connection begins; gRPC calls from a thread of its own."""
        with self._lock:
            self._young.append(now)

    def brought_stream(self, peer: str) -> None:
        """Note a stream, which makes its connection, by address and port, no stranger's."""
        with self._lock:
            if peer not in self._known:
                self._num_known += 1
            self._known[peer] = None
            self._known.move_to_end(peer)
            if len(self._known) > MAX_PEERS:
                self._known.popitem(last=False)

    def count(self, now: float) -> int:
        """Return how many there have been."""
        with self._lock:
            while self._young and self._young[0] < now - HANDSHAKE_SECONDS:
                self._young.popleft()
                self._num_begun += 1
            self._num_strangers = max(self._num_strangers, self._num_begun - self._num_known)
            return self._num_strangers


class Listener:
    """gRPC's server; everything here runs in the intake's event loop."""

    def __init__(
        self, address: str, credentials: Credentials | None, handlers: Sequence[Any]
    ) -> None:
        self.number = 0
        self.num_reopened = 0
        self.strangers = UnidentifiedConnections()
        self._address = address
        self._credentials = credentials
        self._handlers = tuple(handlers)
        self._server: Any = None
        self._fallen: dict[asyncio.Task[None], Any] = {}
        self._keeper: asyncio.Task[None] | None = None

    def brought_stream(self, peer: str) -> None:
        """Note a stream; in plain text gRPC tells of no connection, and none can be missing."""
        if self._credentials is not None:
            self.strangers.brought_stream(peer)

    async def open(self) -> None:
        """Open it.

        Raises:
            PortInUse: it cannot be had.
        """
        await self._open(self._address)
        self._keeper = asyncio.create_task(self._keep_open())

    async def close(self) -> None:
        """Close it, and every stream."""
        if self._keeper is None:
            return
        self._keeper.cancel()
        await self._server.stop(grace=0.2)
        for fallen in list(self._fallen.values()):
            with contextlib.suppress(Exception):  # what felled it
                await fallen.stop(grace=None)

    async def _open(self, address: str) -> None:
        server = grpc.aio.server(options=[*KEEPALIVE, *bounds()])
        server.add_generic_rpc_handlers(self._handlers)
        try:
            if self._credentials is None:
                self.number = server.add_insecure_port(address)
            else:
                self.number = server.add_secure_port(address, self._protection(self._credentials))
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {address}") from error
        await server.start()
        self._server = server

    def _protection(self, credentials: Credentials) -> Any:
        shown = grpc.ssl_server_certificate_configuration(
            [(credentials.key, credentials.certificate)], root_certificates=credentials.ca
        )

        def on_connection() -> None:
            """Count a connection; no other certificate is to be shown."""
            self.strangers.begun(time.monotonic())

        return grpc.dynamic_ssl_server_credentials(
            shown, on_connection, require_client_authentication=True
        )

    async def _keep_open(self) -> None:
        """Open the port again if gRPC's server has fallen; the streams of the old one go on.

        A request for a path that is not UTF-8 ends grpc.aio's server (grpcio 1.85; found by
        ``benchmarks/fuzz.py``): it takes no connection any more. No code of ours stands before it,
        and nothing tells but ``is_running`` of its inner part.
        """
        host = self._address.rpartition(":")[0]
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._server._server.is_running():
                continue
            fallen = self._server
            try:
                await self._open(f"{host}:{self.number}")
            except PortInUse as error:
                log.error(
                    "gRPC's server has fallen, and no other can take its place yet: %s", error
                )
                continue
            self.num_reopened += 1
            log.error("gRPC's server has fallen, and another has taken its place")
            ending = asyncio.create_task(_end_of(fallen))
            self._fallen[ending] = fallen
            ending.add_done_callback(self._fallen.pop)


async def _end_of(server: Any) -> None:
    """Wait until the last stream of a fallen server has ended."""
    with contextlib.suppress(Exception):  # what felled it is raised here again
        await server.wait_for_termination()
