"""The enrolment port and a server of streams in this process, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from headwater.common.transport.join_token import JoinToken
from headwater.server.enrolment.enrolment_port import EnrolmentPort
from headwater.server.enrolment.registry_verifier import RegistryVerifier
from tests.attacks.raw import serving
from tests.certificates import (
    credentials_of,
    tls_of,
    token_for,
)
from tests.processes import (
    until,
)

STREAM_PORT = 4321


@contextlib.contextmanager
def enrolment(folder: Path) -> Iterator[EnrolmentPort]:
    """Serve the enrolment port of a folder."""
    port = EnrolmentPort(folder, "127.0.0.1:0", stream_port=STREAM_PORT)
    port.start()
    try:
        yield port
    finally:
        port.stop()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def token_at(folder: Path, port: int, name: str = "pi", *, valid: float = 600) -> JoinToken:
    """Make a token, and wait until the port is open for it."""
    token = token_for(folder, name, address=f"127.0.0.1:{port}", valid=valid)
    until(lambda: is_open(port), what=lambda: "the enrolment port")
    return token


@contextlib.asynccontextmanager
async def stream_server(folder: Path, **how: object):  # type: ignore[no-untyped-def]
    """Serve streams with the registry and the authority of a folder."""
    own = credentials_of(folder, "server")
    verifier = RegistryVerifier.of(tls_of(folder, "server"), own)
    try:
        async with serving(credentials=own, verifier=verifier, **how) as run:  # type: ignore[arg-type]
            yield run
    finally:
        verifier.close()


def tls_to(
    address: tuple[str, int],
    *,
    version: ssl.TLSVersion | None = None,
    ciphers: str | None = None,
    own: Path | None = None,
) -> ssl.SSLSocket:
    """Open a TLS connection that accepts any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if version is not None:
        context.minimum_version = context.maximum_version = version
    if ciphers is not None:
        context.set_ciphers(ciphers)
    if own is not None:
        context.load_cert_chain(own)
    return context.wrap_socket(socket.create_connection(address, 20))
