"""The enrolment port, where a device exchanges its join token for a certificate.

It is separate from the devices' port, because gRPC requires client certificates on all connections
of a port or on none. It speaks TLS 1.3 and one line of JSON in each direction, with the ``ssl``
module: no HTTP/2, protobuf or third-party parser handles a stranger's bytes. It listens only while
a join token is valid.

A stranger can obtain the authority's certificate, which is public, and a named refusal. Guessing a
secret means guessing 256 bits. Connections are few at a time, short, and limited per address; the
line is bounded; only the key of a signing request is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwater.common.errors import (
    HeadwaterError,
    PortInUse,
    ProtocolMismatch,
    TooManyAttempts,
    travelling,
)
from headwater.common.parsed_text import json_of
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.common.transport.certificates import certificate_pem
from headwater.common.transport.tls import split_address
from headwater.server.enrolment.authority import (
    CA_KEY_FILE,
    SERVER_FILE,
    SERVER_KEY_FILE,
    Authority,
)
from headwater.server.enrolment.join_request import JoinRequest, issue
from headwater.server.enrolment.port_address import enrolment_address
from headwater.server.enrolment.token_registry import Registry
from headwater.server.transport.rate_limit import RateLimit, subscriber

log = logging.getLogger(__name__)

VERSION = 1
MAX_LINE_BYTES = 8192
EXCHANGE_SECONDS, HANDSHAKE_SECONDS = 10.0, 2.0
POLL_SECONDS = 0.25
MAX_CONNECTIONS, MAX_OF_ADDRESS = 64, 4  # a joining device has one at a time


class EnrolmentPort:
    """Serves the enrolment port in a thread of its own, while any join token is valid."""

    def __init__(self, folder: Path, listen: str, *, stream_port: int) -> None:
        """Read the authority and the server's certificate in ``folder``.

        Raises:
            CertificateProblem, StateError: see ``Authority.load``, ``Registry``.
        """
        self.refusals: Counter[str] = Counter()
        self._host, self.port = split_address(listen)
        self._authority = Authority.load(folder)
        self._registry = Registry(folder)
        self._stream_port = stream_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_cert_chain(folder / SERVER_FILE, folder / SERVER_KEY_FILE)
        self._rate_limit = RateLimit()
        self._exchanges: dict[asyncio.Task[None], str] = {}
        self._listener: socket.socket | None = None
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._is_ready = threading.Event()
        self._error: HeadwaterError | None = None
        self._thread = threading.Thread(target=self._run, name="enrolment", daemon=True)

    def start(self) -> None:
        """Check that the port is free, and release it until a token is valid.

        Raises:
            PortInUse: another process has it.
        """
        self._thread.start()
        self._is_ready.wait()
        if self._error is not None:
            self._thread.join()
            self._registry.close()
            raise self._error

    def stop(self) -> None:
        """Close the port."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._registry.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        try:
            self._test_port()
        except HeadwaterError as error:
            self._error = error
            return
        finally:
            self._is_ready.set()
        last_error = ""
        while not self._stopping.is_set():
            try:
                self._open_or_close()
                last_error = ""
            except (HeadwaterError, OSError) as error:
                if str(error) != last_error:
                    log.error("the enrolment port: %s", error)
                last_error = str(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), POLL_SECONDS)
        self._close_listener()
        tasks = [*self._exchanges]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=EXCHANGE_SECONDS)

    def _test_port(self) -> None:
        """Report a port that is in use at the start, not with the first token."""
        try:
            with self._bind() as probe:
                self.port = probe.getsockname()[1]
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {self._host}:{self.port} for enrolment",
                remedy="choose another with --enrolment-listen HOST:PORT",
            ) from error
        self._registry.set_fact("enrolment_port", str(self.port))

    def _bind(self) -> socket.socket:
        host = "::" if self._host == "*" else self._host
        family = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)[0][0]
        is_any = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, self.port), family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=is_any
        )

    def _open_or_close(self) -> None:
        is_wanted = self._registry.has_open_token(time.time())
        if is_wanted and self._listener is None:
            self._listener = self._bind()
            self._listener.setblocking(False)
            # Not ``sock_accept``: when that is cancelled, a connection that it has accepted is lost
            # without being closed.
            self._loop.add_reader(self._listener, self._accept, self._listener)
            log.warning("a join token is valid: the enrolment port %d is open", self.port)
        elif self._listener is not None and not is_wanted:
            self._close_listener()
            log.warning("no join token is valid: the enrolment port %d is closed", self.port)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        """Take a connection that waits; the listener is opened again after an error."""
        try:
            connection, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("the enrolment port: %s", error)
            self._close_listener()
            return
        connection.setblocking(False)
        peer, own = str(address[0]), subscriber(str(address[0]))
        num_of_address = [*self._exchanges.values()].count(own)
        is_full = len(self._exchanges) >= MAX_CONNECTIONS or num_of_address >= MAX_OF_ADDRESS
        if is_full or not self._rate_limit.take(own, time.monotonic()):
            connection.close()  # before any handshake
            self._count(peer, TooManyAttempts("too many connections"))
            return
        task = self._loop.create_task(self._serve_one(connection, peer))
        self._exchanges[task] = own
        task.add_done_callback(self._exchanges.pop)
        # Not in the task itself: one that is cancelled before its first step runs no code.
        task.add_done_callback(lambda _: connection.close())

    async def _serve_one(self, connection: socket.socket, peer: str) -> None:
        """Serve one device within ``EXCHANGE_SECONDS``."""
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                try:
                    await self._exchange(reader, writer, peer)
                finally:
                    transport.abort()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self._count(peer, ProtocolMismatch(f"received no request ({type(error).__name__})"))

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        try:
            answer = self._answer(await reader.readuntil(b"\n"), peer)
        except HeadwaterError as error:
            self._count(peer, error)
            code, text = travelling(error)
            answer = {"code": code, "text": text}
        writer.write(json.dumps({"now": time.time(), **answer}).encode() + b"\n")
        await writer.drain()
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await reader.read(1)  # until the device has read the answer and closes

    def _answer(self, line: bytes, peer: str) -> dict[str, Any]:
        try:
            fields = json_of(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or fields.get("version") != VERSION:
            raise ProtocolMismatch(f"expected a request of version {VERSION}")
        if fields.get("want") == "authority":
            return {"authority": certificate_pem(self._authority.certificate).decode()}
        request = JoinRequest.of_json(fields)
        pem = issue(request, self._authority, self._registry, now=time.time())
        log.warning("%s has joined from %s", request.name, peer)
        return {"certificate": pem.decode(), "port": self._stream_port}

    def _count(self, peer: str, error: HeadwaterError) -> None:
        self.refusals[error.code] += 1
        count = self.refusals[error.code]
        # The 1st, 2nd, 4th, 8th, ... of each code, so that strangers cannot fill the log.
        if count & (count - 1) == 0:
            log.warning(
                "enrolment from %s refused: %s: %s (%d so far)", peer, error.code, error, count
            )


@contextlib.contextmanager
def enrolment_port(settings: Settings, *, stream_port: int) -> Iterator[EnrolmentPort | None]:
    """Serve the enrolment port, if the folder of ``tls.ca`` has the authority's key and a registry.

    Raises:
        PortInUse: another process has the port.
        CertificateProblem, StateError: the authority or the registry is damaged.
    """
    folder = None if settings.tls.ca is None else settings.tls.ca.parent
    if folder is None or not (folder / CA_KEY_FILE).exists() or not Registry.is_in(folder):
        yield None
        return
    port = EnrolmentPort(folder, enrolment_address(settings.server), stream_port=stream_port)
    try:
        port.start()
        console.print(f"devices join at port {port.port} while a join token is valid")
        yield port
    finally:
        port.stop()
