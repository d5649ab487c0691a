"""The enrolment port: where a device that has a join token gets its certificate.

It is a port of its own, because gRPC asks either all or none of a port's clients for certificates.
It speaks TLS 1.3 and a line of JSON each way, by the ``ssl`` module: no HTTP/2, no protobuf, no
third party's parser stands before a secret was shown. It listens only while a token is out.

A stranger can have the authority's certificate, which is public, and a named refusal. A guess at a
secret meets 256 bits. Connections are few at a time, short, and rationed by address; the line that
is read is bounded; nothing of a signing request is used but its key.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import json
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.common.errors import (
    HeadwaterError,
    IdentityRefused,
    PortInUse,
    ProtocolMismatch,
    TooManyAttempts,
    travelling,
)
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.common.transport.certificates import certificate_pem, key_digest, read_request
from headwater.common.transport.join_token import SECRET_BYTES, digest_of
from headwater.common.transport.tls import split_address
from headwater.server.enrolment.authority import (
    CA_KEY_FILE,
    SERVER_FILE,
    SERVER_KEY_FILE,
    Authority,
)
from headwater.server.enrolment.registry import Registry
from headwater.server.transport.rate_limit import RateLimit, subscriber

log = logging.getLogger(__name__)

VERSION = 1
MAX_LINE_BYTES = 8192
TALK_SECONDS = 10.0
POLL_SECONDS = 0.25
MAX_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """What a device asks for with its token."""

    name: str
    secret: bytes
    signing_request: bytes

    @classmethod
    def of(cls, told: dict[str, Any]) -> JoinRequest:
        """Read it from what came.

        Raises:
            ProtocolMismatch: it is not what it should be.
        """
        try:
            secret = bytes.fromhex(told["secret"])
            name, request = str(told["name"]), str(told["request"]).encode("ascii")
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise ProtocolMismatch("a request for a certificate that is not whole") from None
        if len(secret) != SECRET_BYTES:
            raise ProtocolMismatch("a request for a certificate that is not whole")
        return cls(name=name, secret=secret, signing_request=request)


def issue(request: JoinRequest, authority: Authority, registry: Registry, *, now: float) -> bytes:
    """Return the certificate, in PEM, that a token entitles to.

    Raises:
        CertificateProblem: the signing request is none.
        IdentityRefused: it is for another name than the token.
        DeviceRefused, NameTaken: see ``Registry.redeem``.
    """
    name, key = read_request(request.signing_request)
    if name != request.name:
        raise IdentityRefused(
            f"the signing request is for {name[:80]!r}, not {request.name[:80]!r}"
        )
    return registry.redeem(
        digest_of(request.secret),
        name,
        key_digest(key),
        now=now,
        sign=lambda: authority.device(name, key, lasts=registry.lasts),
    )


class EnrolmentPort:
    """Serves the enrolment port in a thread of its own, while any join token is out."""

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
        self._ration = RateLimit()
        self._talks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._is_ready = threading.Event()
        self._error: HeadwaterError | None = None
        self._thread = threading.Thread(target=self._run, name="enrolment", daemon=True)

    def start(self) -> None:
        """Take the port, and give it back until a token is out.

        Raises:
            PortInUse: it cannot be had.
        """
        self._thread.start()
        self._is_ready.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def stop(self) -> None:
        """Close the port."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended meanwhile
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
            self._try_port()
        except HeadwaterError as error:
            self._error = error
            return
        finally:
            self._is_ready.set()
        listener: asyncio.Task[None] | None = None
        trouble = ""
        while not self._stopping.is_set():
            try:
                listener = self._open_or_close(listener)
                trouble = ""
            except (HeadwaterError, OSError) as error:
                if str(error) != trouble:
                    log.error("the enrolment port: %s", error)
                trouble = str(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), POLL_SECONDS)
        ends = [*self._talks, *([listener] if listener else [])]
        for task in ends:
            task.cancel()
        if ends:
            await asyncio.wait(ends, timeout=TALK_SECONDS)

    def _try_port(self) -> None:
        """Find out now, and not with the first token, whether the port is to be had."""
        try:
            with self._bound() as probe:
                self.port = probe.getsockname()[1]
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {self._host}:{self.port} for enrolment",
                remedy="choose another with --enrolment-listen HOST:PORT",
            ) from error
        self._registry.state("enrolment_port", str(self.port))

    def _bound(self) -> socket.socket:
        host = "::" if self._host == "*" else self._host
        family = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)[0][0]
        is_any = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, self.port), family=family, backlog=MAX_AT_ONCE, dualstack_ipv6=is_any
        )

    def _open_or_close(self, listener: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
        is_wanted = self._registry.has_open_token(time.time())
        if listener is not None and listener.done():
            listener.result()  # what ended it
            listener = None
        if is_wanted and listener is None:
            listener = self._loop.create_task(self._listen(self._bound()))
            log.warning("a join token is out: the enrolment port %d is open", self.port)
        elif listener is not None and not is_wanted:
            listener.cancel()
            listener = None
            log.warning("no join token is out: the enrolment port %d is closed", self.port)
        return listener

    async def _listen(self, bound: socket.socket) -> None:
        with bound:
            bound.setblocking(False)
            while True:
                connection, address = await self._loop.sock_accept(bound)
                peer = str(address[0])
                is_full = len(self._talks) >= MAX_AT_ONCE
                if is_full or not self._ration.take(subscriber(peer), time.monotonic()):
                    connection.close()  # before any handshake
                    self._count(peer, TooManyAttempts("too many connections"))
                    continue
                talk = self._loop.create_task(self._serve_one(connection, peer))
                self._talks.add(talk)
                talk.add_done_callback(self._talks.discard)
                # Here, as a task that is cancelled before its first step runs none of its own.
                talk.add_done_callback(lambda _, done=connection: done.close())  # type: ignore[misc]

    async def _serve_one(self, connection: socket.socket, peer: str) -> None:
        """Talk to one device, for a short time."""
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            async with asyncio.timeout(TALK_SECONDS):
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, connection, ssl=self._context
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                try:
                    await self._talk(reader, writer, peer)
                finally:
                    transport.abort()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self._count(peer, ProtocolMismatch(f"no request came ({type(error).__name__})"))

    async def _talk(
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
            await reader.read(1)  # until the device has read it, and closes

    def _answer(self, line: bytes, peer: str) -> dict[str, Any]:
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or told.get("version") != VERSION:
            raise ProtocolMismatch(f"expected a request of version {VERSION}")
        if told.get("want") == "authority":
            return {"authority": certificate_pem(self._authority.certificate).decode()}
        request = JoinRequest.of(told)
        pem = issue(request, self._authority, self._registry, now=time.time())
        log.warning("%s has joined from %s", request.name, peer)
        return {"certificate": pem.decode(), "port": self._stream_port}

    def _count(self, peer: str, error: HeadwaterError) -> None:
        self.refusals[error.code] += 1
        times = self.refusals[error.code]
        # A stranger must not fill the log: the 1st, 2nd, 4th, 8th, ... of a kind.
        if times & (times - 1) == 0:
            log.warning(
                "enrolment from %s refused: %s: %s (%d so far)", peer, error.code, error, times
            )


@contextlib.contextmanager
def enrolling(settings: Settings, *, stream_port: int) -> Iterator[EnrolmentPort | None]:
    """Serve the enrolment port, if the authority's key and the registry lie beside ``tls.ca``.

    Raises:
        PortInUse: the port cannot be had.
        CertificateProblem, StateError: the authority or the registry is broken.
    """
    folder = None if settings.tls.ca is None else settings.tls.ca.parent
    if folder is None or not (folder / CA_KEY_FILE).exists() or not Registry.is_in(folder):
        yield None
        return
    port = EnrolmentPort(folder, _listen(settings), stream_port=stream_port)
    try:
        port.start()
        console.print(f"devices join at port {port.port}, while a join token is out")
        yield port
    finally:
        port.stop()


def _listen(settings: Settings) -> str:
    """Return HOST:PORT of the enrolment port: by default the port after the stream's."""
    if settings.server.enrolment_listen is not None:
        return settings.server.enrolment_listen
    host, port = split_address(settings.server.listen)
    return f"[{host}]:{port + 1 if port else 0}"
