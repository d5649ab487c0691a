"""Whether a device reaches its server, as far as a TLS handshake shows: for ``client.operations.doctor``.

No hello is said, where a second stream under this device's name would be in the way of the first.
"""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import time
from collections.abc import Iterator

from cryptography import x509

from headwater.client.enrolment.signing_identity import check_enrolment, host_name
from headwater.client.operations.findings import Finding, fault, fault_of, good, note
from headwater.common.errors import HeadwaterError
from headwater.common.settings.schema import Settings
from headwater.common.transport.certificates import name_in
from headwater.common.transport.tls import check_address, read_credentials, split_address

RENEW_DAYS = 30
LINK_SECONDS = 10.0
SLOW_LINK_SECONDS = 0.5


def check_connection(settings: Settings) -> Iterator[Finding]:
    """Yield what the link and the certificates are good for, as far as a handshake shows."""
    chosen = settings.client
    name = chosen.name or host_name()
    try:
        credentials = read_credentials(settings.tls)
        check_address(chosen.server, has_tls=credentials is not None, is_insecure=settings.insecure)
        check_enrolment(settings.secure, name)
        host, port = split_address(chosen.server)
    except HeadwaterError as error:
        yield fault_of("TLS", error)
        return
    if credentials is not None:
        yield check_certificate(credentials.leaf, name, dt.datetime.now(dt.UTC))
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), LINK_SECONDS) as plain:
            taken = time.monotonic() - began
            answers = f"{chosen.server} answers in {1e3 * taken:.0f} ms"
            yield (
                good("link", answers)
                if taken <= SLOW_LINK_SECONDS
                else note("link", answers, "a slow link: updates take long; see docs/install.md")
            )
            if credentials is not None:
                yield check_handshake(plain, host, settings)
    except OSError as error:
        yield fault(
            "link",
            f"{chosen.server} is not to be reached: {error.strerror or error}",
            "check the address, that the server runs, and the firewalls between",
        )


def check_certificate(leaf: x509.Certificate, name: str, now: dt.datetime) -> Finding:
    """Judge this device's own certificate, whose dates are known to be good today."""
    bears = name_in(leaf.subject)
    if bears != name:
        return fault(
            "TLS",
            f"the certificate is that of {bears}, and this device is called {name}",
            f"set client.name to {bears}, or enrol under this name",
        )
    left = (leaf.not_valid_after_utc - now).days
    text = f"certificate of {bears}, good for {left} more days"
    if left >= RENEW_DAYS:
        return good("TLS", text)
    return note(
        "TLS",
        text,
        "it is renewed while the client is connected: leave it running, or enrol again",
    )


def check_handshake(plain: socket.socket, host: str, settings: Settings) -> Finding:
    """Shake hands as the client does, and wait for the server's first bytes: it took us then."""
    tls = settings.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    assert tls.ca is not None  # read_credentials saw them
    assert tls.certificate is not None
    try:
        context.load_verify_locations(cafile=tls.ca)
        context.load_cert_chain(tls.certificate, tls.key)
        with context.wrap_socket(plain, server_hostname=host) as secure:
            version = secure.version()
            # With TLS 1.3 a refusal comes after what looks like success (RFC 8446, section 4.4).
            if secure.recv(1):
                return good("TLS", f"mutual, {version}; the server took us")
            text = "the server closed the connection after the handshake"
    except ssl.SSLCertVerificationError as error:
        text = f"the server's certificate is not good for {host}: {error.verify_message}"
    except OSError as error:
        text = f"no handshake: {error.strerror or error}"
    return fault(
        "TLS",
        text,
        "both sides need certificates of one authority, and the server's must name the "
        "address that is used here; enrol again if in doubt",
    )
