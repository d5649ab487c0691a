"""The connections of a page: a limited number, and none that is silent for long.

uvicorn takes any number, and keeps a connection without a request for ever. The page shares its
process, and so its file descriptors, with the devices' port and the checkpoint. Anyone who reaches
the page's port may open connections, before any token is shown.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwater.server.transport.rate_limit import subscriber

MAX_CONNECTIONS = 128
MAX_OF_ADDRESS = 32  # a browser opens six to one server
SILENT_SECONDS = 10.0
RETRY_SECONDS = 0.5


class _CountedSocket(socket.socket):
    """A socket that counts what it sends: a transport's buffer under TLS does not tell."""

    num_sent_bytes = 0

    def send(self, *arguments: Any) -> int:
        num_bytes = super().send(*arguments)
        self.num_sent_bytes += num_bytes
        return num_bytes

    if sys.platform != "win32":  # which has none

        def sendmsg(self, *arguments: Any) -> int:  # what asyncio calls from Python 3.12 on
            num_bytes: int = super().sendmsg(*arguments)
            self.num_sent_bytes += num_bytes
            return num_bytes


class _Connection(H11Protocol):
    """A connection that tells when it has ended, and whether a request is under way."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.has_ended = asyncio.Event()

    @property
    def has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.has_ended.set()


class PageConnections:
    """Accepts connections for a uvicorn server, in its event loop; more are closed at once.

    A connection is silent, and ends, if it has no request and takes no byte of an answer for
    SILENT_SECONDS; this is looked at once every SILENT_SECONDS.
    """

    def __init__(self, listener: socket.socket, server: uvicorn.Server) -> None:
        self._listener = listener
        self._server = server
        self._open: dict[asyncio.Task[None], str] = {}

    async def accept(self) -> None:
        """Accept connections until this is cancelled."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            try:
                accepted, peer = await loop.sock_accept(self._listener)
            except OSError:  # no file descriptor is left, or the browser has gone again
                await asyncio.sleep(RETRY_SECONDS)
                continue
            address = subscriber(peer[0])
            num_of_address = [*self._open.values()].count(address)
            if len(self._open) >= MAX_CONNECTIONS or num_of_address >= MAX_OF_ADDRESS:
                accepted.close()
                continue
            connection = _CountedSocket(fileno=accepted.detach())
            connection.setblocking(False)
            task = loop.create_task(self._serve(connection))
            self._open[task] = address
            task.add_done_callback(self._open.pop)
            # Not in the task itself: one that is cancelled before its first step runs no code.
            task.add_done_callback(lambda _, done=connection: done.close())  # type: ignore[misc]

    async def _serve(self, connection: _CountedSocket) -> None:
        loop, config = asyncio.get_running_loop(), self._server.config
        protocol = _Connection(
            config=config, server_state=self._server.server_state, app_state={}, _loop=loop
        )
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=config.ssl,
                ssl_handshake_timeout=None if config.ssl is None else SILENT_SECONDS,
            )
        except OSError:  # no TLS, or none in time
            return
        num_sent_bytes = connection.num_sent_bytes
        while not protocol.has_ended.is_set():
            try:
                await asyncio.wait_for(protocol.has_ended.wait(), SILENT_SECONDS)
            except TimeoutError:
                # An answer has ended, or the browser still takes one from the buffer.
                has_sent = connection.num_sent_bytes > num_sent_bytes
                num_sent_bytes = connection.num_sent_bytes
                if not (has_sent or protocol.has_request):
                    transport.abort()
