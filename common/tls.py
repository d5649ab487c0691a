"""Certificates: an authority of one's own, and what each side shows the other.

``headwater-server init`` makes an authority, the server's certificate and one for each client, all
with P-256 keys. A client's certificate bears its name as common name; the server holds the name in
``Hello`` against it. Whoever has the authority's key can make clients: keep it off the devices.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import CertificateProblem, InsecureAddress, SettingsError
from common.settings import Tls
from common.wire import NAME_PATTERN

AUTHORITY_DAYS = 10 * 365
LEAF_DAYS = 2 * 365
# RFC 5280, appendix A.1: ub-common-name.
MAX_COMMON_NAME = 64
# Files of these names belong to the authority and the server.
RESERVED_NAMES = ("ca", "ca-key", "server", "server-key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """The bytes of the three PEM files."""

    ca: bytes
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Credentials(...)"


def read_credentials(tls: Tls) -> Credentials | None:
    """Read the three files; None if none is named.

    Raises:
        SettingsError: only some of the three are named.
        CertificateProblem: one cannot be read, or is not what it should be.
    """
    named = {"--tls-ca": tls.ca, "--tls-certificate": tls.certificate, "--tls-key": tls.key}
    missing = [flag for flag, path in named.items() if path is None]
    if len(missing) == len(named):
        return None
    if missing:
        raise SettingsError(
            f"{', '.join(missing)} is missing", remedy="give all three TLS files, or none"
        )
    ca, certificate, key = (_read(flag, path) for flag, path in named.items() if path)
    try:
        x509.load_pem_x509_certificate(ca)
        leaf = x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise CertificateProblem(f"a TLS file is not the PEM it should be: {error}") from error
    if _spki(leaf.public_key()) != _spki(private.public_key()):
        raise CertificateProblem(f"{tls.key} is not the key of {tls.certificate}")
    _check_dates(leaf, tls.certificate)
    return Credentials(ca=ca, certificate=certificate, key=key)


def _check_dates(leaf: x509.Certificate, path: Path | None) -> None:
    now = dt.datetime.now(dt.UTC)
    if leaf.not_valid_after_utc < now:
        raise CertificateProblem(f"{path} expired on {leaf.not_valid_after_utc:%Y-%m-%d}")
    if now < leaf.not_valid_before_utc:
        raise CertificateProblem(
            f"{path} is valid from {leaf.not_valid_before_utc:%Y-%m-%d}, and this machine's clock "
            f"says {now:%Y-%m-%d}",
            remedy="set the clock",
        )


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateProblem(f"{flag} {path}: {error.strerror}") from error


def _spki(key: object) -> bytes:
    if not hasattr(key, "public_bytes"):
        raise CertificateProblem("a certificate without a public key")
    encoded: bytes = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 host stands in brackets.

    Raises:
        SettingsError: it is neither.
    """
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65_535:
        raise SettingsError(f"expected HOST:PORT, found {address!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str, *, has_tls: bool, is_insecure: bool) -> None:
    """Refuse plain text beyond loopback, unless it was said aloud.

    Raises:
        InsecureAddress: no TLS, not loopback, and no --insecure.
    """
    host, _ = split_address(address)
    if not (has_tls or is_insecure or is_loopback(host)):
        raise InsecureAddress(f"{address} is beyond this machine, and no TLS files are given")


def make_certificates(folder: Path, *, hosts: Sequence[str], clients: Sequence[str]) -> list[Path]:
    """Make an authority, the server's certificate for ``hosts`` and one for each client.

    What is there already is kept, so that clients can be added later; only the server's certificate
    is made anew if it lacks one of ``hosts``. Private keys are readable by their owner only.
    Returns the paths that were written.

    Raises:
        SettingsError: a client's name cannot be one.
        CertificateProblem: the folder cannot be written, or holds a broken authority.
    """
    for name in clients:
        _check_name(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ca_path, ca_key_path = folder / "ca.pem", folder / "ca-key.pem"
        written: list[Path] = []
        if ca_key_path.exists() or ca_path.exists():
            ca, ca_key = _load_authority(ca_path, ca_key_path)
        else:
            ca, ca_key = _authority()
            written += _write(folder, "ca", ca, ca_key)
        if not _covers(folder / "server.pem", hosts):
            written += _write(folder, "server", *_leaf("server", ca, ca_key, hosts=hosts))
        for name in clients:
            if not (folder / f"{name}-key.pem").exists() or not (folder / f"{name}.pem").exists():
                written += _write(folder, name, *_leaf(name, ca, ca_key, hosts=()))
    except OSError as error:
        raise CertificateProblem(
            f"cannot write to {folder}: {error.strerror}", remedy="choose another --folder"
        ) from error
    return written


Key = ec.EllipticCurvePrivateKey


def _load_authority(path: Path, key_path: Path) -> tuple[x509.Certificate, Key]:
    for needed in (path, key_path):
        if not needed.exists():
            raise CertificateProblem(
                f"the authority's {needed.name} is not in {path.parent}, its other file is",
                remedy="put it back to make further certificates, or choose another --folder",
            )
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (ValueError, TypeError) as error:
        raise CertificateProblem(f"{path} or {key_path} is not a PEM file: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateProblem(f"{key_path} is not a key that `headwater-server init` made")
    return certificate, key


def _check_name(name: str) -> None:
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > MAX_COMMON_NAME:
        raise SettingsError(
            f"{name[:80]!r} cannot be a client's name",
            remedy=f"letters, digits, dot, dash and underscore, {MAX_COMMON_NAME} at most",
        )
    if name in RESERVED_NAMES or name.endswith("-key"):
        raise SettingsError(f"{name} cannot be a client's name: the files are somebody else's")


def _covers(path: Path, hosts: Sequence[str]) -> bool:
    """Tell whether the server's certificate is there and good for all these hosts."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (FileNotFoundError, ValueError, x509.ExtensionNotFound):
        return False
    return all(_host(host) in names.value for host in hosts)


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, days: int) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A Pi without a battery clock may be behind: valid from yesterday.
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority() -> tuple[x509.Certificate, Key]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("headwater authority")
    certificate = (
        _builder(name, name, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(is_ca=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _leaf(
    name: str, ca: x509.Certificate, ca_key: Key, *, hosts: Sequence[str]
) -> tuple[x509.Certificate, Key]:
    """Make a server's certificate if hosts are given, else a client's."""
    key = ec.generate_private_key(ec.SECP256R1())
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = (
        _builder(_common_name(name), ca.subject, key, LEAF_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(ca_key, hashes.SHA256()), key


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, name: str, certificate: x509.Certificate, key: Key) -> list[Path]:
    path, key_path = folder / f"{name}.pem", folder / f"{name}-key.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    descriptor = os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)  # it may have been there with another mode
        file.write(secret)
    return [path, key_path]
