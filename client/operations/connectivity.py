"""Checks that a device reaches its server, by a TCP connection, a TLS handshake and a health check.

No hello is sent: a second stream under this device's name could displace the first.
"""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import time
from collections.abc import Iterator

from cryptography import x509

from headwater.client.device.host_name import host_name
from headwater.client.enrolment.signing_identity import check_enrolment
from headwater.client.operations.findings import Finding, fault, fault_of, good, note
from headwater.client.operations.health_call import is_answered
from headwater.common.errors import HeadwaterError
from headwater.common.settings.schema import Settings
from headwater.common.transport.certificates import common_name_in
from headwater.common.transport.proxy import ProxyRefused, connect, proxy_of, proxy_remedy
from headwater.common.transport.server_names import OTHER_NAME, name_remedy, names_text
from headwater.common.transport.tls import (
    check_address,
    read_credentials,
    split_address,
    split_addresses,
)

RENEW_DAYS = 30
CONNECT_SECONDS = 10.0
SLOW_LINK_SECONDS = 0.5


def check_connection(settings: Settings) -> Iterator[Finding]:
    """Yield whether the credentials are valid, the server answers, and its handshake succeeds."""
    client = settings.client
    name = client.name or host_name()
    try:
        credentials = read_credentials(settings.tls)
        addresses = split_addresses(client.server)
        for address in addresses:
            check_address(address, has_tls=credentials is not None, is_allowed=settings.plain_text)
        check_enrolment(settings.secure, name)
    except HeadwaterError as error:
        yield fault_of("TLS", error)
        return
    if credentials is not None:
        yield check_certificate(credentials.leaf, name, dt.datetime.now(dt.UTC))
    found = [
        list(check_server(address, settings, has_tls=credentials is not None))
        for address in addresses
    ]
    for findings in found:
        one = findings[0]
        if one.grade == "fault" and any(others[0].grade != "fault" for others in found):
            # A standby opens its port when it takes over.
            yield note(one.topic, one.text, "no fault if that is the standby, which waits")
        else:
            yield from findings


def check_server(address: str, settings: Settings, *, has_tls: bool) -> Iterator[Finding]:
    """Yield whether one server answers, and its handshake succeeds."""
    host, port = split_address(address)
    start = time.monotonic()
    try:
        with connect(host, port, timeout_seconds=CONNECT_SECONDS) as plain:
            seconds = time.monotonic() - start
            proxy = proxy_of(host)
            way = f" through {proxy}" if proxy else ""
            answers = f"{address} answers in {1e3 * seconds:.0f} ms{way}"
            yield (
                good("link", answers)
                if seconds <= SLOW_LINK_SECONDS
                else note("link", answers, "a slow link: updates take long; see docs/install.md")
            )
            if has_tls:
                yield check_handshake(plain, host, port, settings)
    except ProxyRefused as error:
        yield fault("link", str(error), proxy_remedy(host))
    except OSError as error:
        yield fault(
            "link",
            f"{address} cannot be reached: {error.strerror or error}",
            "check the address, that the server runs, and the firewalls in between",
        )


def check_certificate(leaf: x509.Certificate, name: str, now: dt.datetime) -> Finding:
    """Check the name and the remaining days of this device's certificate, which is valid today."""
    certified_name = common_name_in(leaf.subject)
    if certified_name != name:
        return fault(
            "TLS",
            f"the certificate is for {certified_name}, and this device's name is {name}",
            f"set client.name to {certified_name}, or enrol under this name",
        )
    days = (leaf.not_valid_after_utc - now).days
    text = f"certificate of {certified_name}, valid for {days} more days"
    if days >= RENEW_DAYS:
        return good("TLS", text)
    return note(
        "TLS",
        text,
        "it is renewed while the client is connected: leave it running, or enrol again",
    )


def check_handshake(plain: socket.socket, host: str, port: int, settings: Settings) -> Finding:
    """Shake hands as the client does, and ask for the server's health: an answer accepts it."""
    tls = settings.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    assert tls.ca is not None  # read_credentials has checked both
    assert tls.certificate is not None
    try:
        context.load_verify_locations(cafile=tls.ca)
        context.load_cert_chain(tls.certificate, tls.key)
        with context.wrap_socket(plain, server_hostname=host) as secure:
            version = secure.version()
            # In TLS 1.3 a refusal arrives after an apparent success (RFC 8446, section 4.4).
            if is_answered(secure):
                return good("TLS", f"mutual, {version}; the server accepted this device")
            text = "the server closed the connection after the handshake"
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in OTHER_NAME:
            return fault("TLS", names_text(host, port, context), name_remedy(host))
        text = f"the server's certificate is not valid for {host}: {error.verify_message}"
    except OSError as error:
        text = f"no handshake: {error.strerror or error}"
    return fault(
        "TLS",
        text,
        "both sides need certificates of one authority, and the server's must name the "
        "address that is used here; enrol again if in doubt",
    )
