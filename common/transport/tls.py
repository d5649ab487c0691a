"""TLS setup: reads the three PEM files of either side, and checks which addresses need TLS.

The common name of a device's certificate is its name; the server compares the name in ``Hello``
with it (``server.transport.admission``). gRPC accepts TLS 1.2 with authenticated encryption, and
TLS 1.3; our client and server negotiate 1.3, and an attacker between them cannot downgrade them
(RFC 8446, section 4.1.3). ``common.transport.certificates`` and cryptography's x509 (1.3 MB of an
idle device) are imported only if there are certificates.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.common.errors import CertificateProblem, InsecureAddress, SettingsError
from headwater.common.settings.schema import TlsSettings

if TYPE_CHECKING:
    from cryptography import x509


KEY_FLAG = "--tls-key"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """A side's certificate and key, and the authority that it trusts, in PEM."""

    ca: bytes
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Credentials(...)"

    @property
    def leaf(self) -> x509.Certificate:
        """This side's own certificate."""
        from cryptography import x509

        return x509.load_pem_x509_certificate(self.certificate)


def read_credentials(tls: TlsSettings) -> Credentials | None:
    """Read the three files; return None if none is named.

    Certificate and key may be in one file, which is then named twice.

    Raises:
        SettingsError: only some of the three are named.
        CertificateProblem: a file cannot be read, has the wrong content, or others may change it,
            or read the key (``transport.trusted_file``).
    """
    named = {"--tls-ca": tls.ca, "--tls-certificate": tls.certificate, KEY_FLAG: tls.key}
    missing = [flag for flag, path in named.items() if path is None]
    if len(missing) == len(named):
        return None
    if missing:
        raise SettingsError(
            f"{', '.join(missing)} is missing", remedy="give all three TLS files, or none"
        )
    ca, certificate, key = (_read(flag, path) for flag, path in named.items() if path)
    return _checked(ca, certificate, key, tls)


def _checked(ca: bytes, certificate: bytes, key: bytes, tls: TlsSettings) -> Credentials:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    from headwater.common.transport.certificates import check_dates, public_key_der

    try:
        authority = x509.load_pem_x509_certificate(ca)
        chain = x509.load_pem_x509_certificates(certificate)
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise CertificateProblem(f"a TLS file is not valid PEM of its kind: {error}") from error
    if public_key_der(chain[0].public_key()) != public_key_der(private.public_key()):
        raise CertificateProblem(f"{tls.key} is not the key of {tls.certificate}")
    check_dates(authority, tls.ca)
    check_dates(chain[0], tls.certificate)
    return Credentials(
        ca=ca,
        certificate=b"".join(one.public_bytes(Encoding.PEM) for one in chain),
        key=private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def _read(flag: str, path: Path) -> bytes:
    from headwater.common.transport.trusted_file import read_trusted  # not without TLS files

    try:
        return read_trusted(path, is_secret=flag == KEY_FLAG)
    except OSError as error:
        raise CertificateProblem(f"{flag} {path}: {error.strerror}") from error


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 host must be in brackets.

    Raises:
        SettingsError: the address is not HOST:PORT.
    """
    host, separator, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host.removeprefix("[").removesuffix("]")
    is_host = bool(host) and (is_bracketed or ":" not in host) and not {*",/"} & {*host}
    if not separator or not is_host or not port.isdecimal() or int(port) > 65_535:
        raise SettingsError(
            f"expected HOST:PORT, found {address!r}", remedy=_address_remedy(address)
        )
    return host, int(port)


def _address_remedy(address: str) -> str:
    """Return how an address is written that looks like a URL or a bare IPv6 address."""
    if "://" in address:
        return "write the host and the port alone, as in river.example.org:8500"
    host, _, port = address.rpartition(":")
    if address.startswith("["):
        return "write the port after the bracket, as in [::1]:8500"
    if ":" in host and port.isdecimal():
        return f"put an IPv6 address in brackets: [{host}]:{port}"
    return "name both, as in river.example.org:8500"


def split_addresses(text: str) -> tuple[str, ...]:
    """Split HOST:PORT,HOST:PORT at its commas; at least one address.

    Raises:
        SettingsError: one of them is not HOST:PORT, or is named twice.
    """
    addresses = tuple(part.strip() for part in text.split(","))
    for address in addresses:
        split_address(address)
    if len(set(addresses)) < len(addresses):
        raise SettingsError(f"an address is named twice in {text!r}", remedy="name each one once")
    return addresses


def host_in(header: str) -> str:
    """Return the host in a request's Host, without its port; an IPv6 address has brackets."""
    return header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str, *, has_tls: bool, is_allowed: bool) -> None:
    """Check that an address uses TLS, is loopback, or was allowed by --plain-text.

    Raises:
        InsecureAddress: none of these.
    """
    host, _ = split_address(address)
    if not (has_tls or is_allowed or is_loopback(host)):
        raise InsecureAddress(f"{address} is not a loopback address, and no TLS files are given")
