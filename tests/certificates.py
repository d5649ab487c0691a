"""An authority and devices in one folder, created as the commands create them."""

from __future__ import annotations

import datetime as dt
import ipaddress
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from headwater.common.settings.schema import TlsSettings
from headwater.common.system.atomic_file import OWNER_ONLY, write_atomically
from headwater.common.transport.certificates import (
    Key,
    certificate_pem,
    common_name,
    fingerprint,
    key_digest,
    key_pem,
    new_key,
    signing_request,
)
from headwater.common.transport.join_token import JoinToken
from headwater.common.transport.tls import Credentials
from headwater.server.enrolment.authority import Authority, make_authority
from headwater.server.enrolment.join_request import JoinRequest, issue
from headwater.server.enrolment.token_registry import Registry

HOSTS = ("localhost", "127.0.0.1")


def make_folder(folder: Path, *names: str, hosts: Sequence[str] = HOSTS) -> Path:
    """Create an authority and its registry, and enrol devices."""
    make_authority(folder, hosts=hosts)
    Registry(folder, create=True).close()
    for name in names:
        enrol(folder, name)
    return folder


def token_for(
    folder: Path, name: str, *, address: str = "127.0.0.1:1", valid: float = 600
) -> JoinToken:
    """Create a join token and register it."""
    token = JoinToken.new(
        address=address,
        fingerprint=fingerprint(Authority.load(folder).certificate),
        name=name,
        expires_at=int(time.time() + valid),
    )
    registry = Registry(folder)
    registry.add_token(name, token.secret_digest, expires_at=time.time() + valid, now=time.time())
    registry.close()
    return token


def enrol(folder: Path, name: str, *, days: tuple[float, float] | None = None) -> Key:
    """Enrol a device; its certificate and key are written to NAME.pem.

    With ``days`` the certificate is valid from and until so many days from now.
    """
    key, token = new_key(), token_for(folder, name)
    if days is not None:
        begins, ends = (dt.datetime.now(dt.UTC) + dt.timedelta(days=d) for d in days)
        registry = Registry(folder)
        pem = registry.redeem(
            token.secret_digest,
            name,
            key_digest(key.public_key()),
            now=time.time(),
            sign=lambda: signed(folder, name, key, begins=begins, ends=ends),
        )
        registry.close()
        write_atomically(folder / f"{name}.pem", pem + key_pem(key), mode=OWNER_ONLY)
        return key
    request = JoinRequest(
        name=name, secret=token.secret, signing_request=signing_request(name, key)
    )
    registry = Registry(folder)
    pem = issue(request, Authority.load(folder), registry, now=time.time())
    registry.close()
    write_atomically(folder / f"{name}.pem", pem + key_pem(key), mode=OWNER_ONLY)
    return key


def revoke(folder: Path, name: str) -> int:
    """Revoke a device."""
    registry = Registry(folder)
    try:
        return registry.revoke(name)
    finally:
        registry.close()


def signed(
    folder: Path, name: str, key: Key, *, begins: dt.datetime, ends: dt.datetime
) -> x509.Certificate:
    """Return a certificate that the authority signed and the registry does not have."""
    authority = Authority.load(folder)
    builder = (
        x509.CertificateBuilder()
        .subject_name(common_name(name))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )
    if name == "server":
        here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([here]), critical=False)
    return builder.sign(authority.key, hashes.SHA256())


def put_signed(folder: Path, name: str, *, days: Iterable[float]) -> None:
    """Write a certificate to NAME.pem that is valid between these days from now."""
    key, now = new_key(), dt.datetime.now(dt.UTC)
    begins, ends = (now + dt.timedelta(days=d) for d in days)
    certificate = signed(folder, name, key, begins=begins, ends=ends)
    write_atomically(
        folder / f"{name}.pem", certificate_pem(certificate) + key_pem(key), mode=OWNER_ONLY
    )


def tls_of(folder: Path, name: str) -> TlsSettings:
    """Return the settings that name a side's files."""
    key = folder / ("server-key.pem" if name == "server" else f"{name}.pem")
    return TlsSettings(ca=folder / "ca.pem", certificate=folder / f"{name}.pem", key=key)


def files(folder: Path, name: str) -> tuple[object, ...]:
    """Return the flags that name a side's files."""
    tls = tls_of(folder, name)
    return ("--tls-ca", tls.ca, "--tls-certificate", tls.certificate, "--tls-key", tls.key)


def credentials_of(folder: Path, name: str) -> Credentials:
    """Read a side's files without checking their dates."""
    tls = tls_of(folder, name)
    assert tls.ca is not None
    assert tls.certificate is not None
    assert tls.key is not None
    return Credentials(
        ca=tls.ca.read_bytes(), certificate=tls.certificate.read_bytes(), key=tls.key.read_bytes()
    )
