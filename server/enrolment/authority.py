"""The authority: who signs the server's certificate and the devices'.

``headwater-server init`` makes one, in a folder of its own. Whoever has ``ca-key.pem`` can make
devices, so it stays on the server, or with the operator: without it nobody enrols and no
certificate is renewed, and all else works. A device's certificate takes nothing from its request
but the public key.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from headwater.common.errors import CertificateProblem
from headwater.common.system.atomic_file import OWNER_ONLY, READABLE, write_whole
from headwater.common.transport.certificates import (
    BACKDATED,
    Key,
    PublicKey,
    certificate_pem,
    check_dates,
    common_name,
    due_at,
    key_pem,
    new_key,
    spki,
)

CA_FILE, CA_KEY_FILE = "ca.pem", "ca-key.pem"
SERVER_FILE, SERVER_KEY_FILE = "server.pem", "server-key.pem"
AUTHORITY_LASTS = dt.timedelta(days=10 * 365)
SERVER_LASTS = dt.timedelta(days=2 * 365)


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """A certificate that both sides trust, and its key."""

    certificate: x509.Certificate
    key: Key = field(repr=False)

    @classmethod
    def new(cls) -> Authority:
        """Make an authority."""
        key = new_key()
        name = common_name("headwater authority")
        certificate = (
            _builder(name, name, key.public_key(), AUTHORITY_LASTS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(is_ca=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate=certificate, key=key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Read the authority in a folder.

        Raises:
            CertificateProblem: one of its files is missing or broken, or it has expired.
            OSError: one cannot be read.
        """
        path, key_path = folder / CA_FILE, folder / CA_KEY_FILE
        for needed in (path, key_path):
            if not needed.exists():
                raise CertificateProblem(
                    f"the authority's {needed.name} is not in {folder}",
                    remedy="put it back, or make another authority with `headwater-server init` "
                    "and another --folder",
                )
        try:
            key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (ValueError, TypeError) as error:
            raise CertificateProblem(f"{path} or {key_path} is not a PEM file: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or (
            spki(key.public_key()) != spki(certificate.public_key())
        ):
            raise CertificateProblem(f"{key_path} is not the key of {path}")
        check_dates(certificate, path)
        return cls(certificate=certificate, key=key)

    def save(self, folder: Path) -> list[Path]:
        """Write both files; return their paths."""
        return _write(folder, CA_FILE, CA_KEY_FILE, self.certificate, self.key)

    def device(self, name: str, key: PublicKey, *, lasts: dt.timedelta) -> x509.Certificate:
        """Sign a device's certificate; it does not outlive the authority."""
        return self._leaf(name, key, ExtendedKeyUsageOID.CLIENT_AUTH, lasts).sign(
            self.key, hashes.SHA256()
        )

    def server(self, hosts: Sequence[str]) -> tuple[x509.Certificate, Key]:
        """Make the server's key and certificate, good for these names and addresses."""
        key = new_key()
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = self._leaf(
            "server", key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH, SERVER_LASTS
        )
        return builder.add_extension(names, critical=False).sign(self.key, hashes.SHA256()), key

    def _leaf(
        self, name: str, key: PublicKey, purpose: x509.ObjectIdentifier, lasts: dt.timedelta
    ) -> x509.CertificateBuilder:
        left = self.certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
        return (
            _builder(common_name(name), self.certificate.subject, key, min(lasts, left))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(is_ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        )


def make_authority(folder: Path, *, hosts: Sequence[str]) -> list[Path]:
    """Make an authority and the server's certificate for ``hosts``; return what was written.

    What is there is kept. Only the server's certificate is made anew: if it lacks one of ``hosts``,
    is in the last third of its life or past it, or is of another authority; the names that it had
    stay in it.

    Raises:
        CertificateProblem: the folder cannot be written, or holds a broken authority.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written: list[Path] = []
        if (folder / CA_KEY_FILE).exists() or (folder / CA_FILE).exists():
            authority = Authority.load(folder)
        else:
            authority = Authority.new()
            written += authority.save(folder)
        if not _is_good(folder, hosts, authority):
            certificate, key = authority.server(list(dict.fromkeys([*hosts, *_known(folder)])))
            written += _write(folder, SERVER_FILE, SERVER_KEY_FILE, certificate, key)
    except OSError as error:
        raise CertificateProblem(
            f"cannot write to {folder}: {error.strerror}", remedy="choose another --folder"
        ) from error
    return written


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses that a server's certificate is good for, in its order."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names.value]


def _known(folder: Path) -> list[str]:
    try:
        return hosts_of(x509.load_pem_x509_certificate((folder / SERVER_FILE).read_bytes()))
    except (OSError, ValueError):
        return []


def _is_good(folder: Path, hosts: Sequence[str], authority: Authority) -> bool:
    """Tell whether the server's certificate can stay as it is."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / SERVER_FILE).read_bytes())
        key = (folder / SERVER_KEY_FILE).read_bytes()
        private = serialization.load_pem_private_key(key, password=None)
        certificate.verify_directly_issued_by(authority.certificate)
    except (OSError, ValueError, TypeError, InvalidSignature):
        return False
    is_paired = spki(private.public_key()) == spki(certificate.public_key())
    is_young = dt.datetime.now(dt.UTC) < due_at(certificate)
    known = hosts_of(certificate)
    return is_paired and is_young and all(str(_host(host).value) in known for host in hosts)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, lasts: dt.timedelta
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + lasts)
    )


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


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(
    folder: Path, file: str, key_file: str, certificate: x509.Certificate, key: Key
) -> list[Path]:
    """Write the key first: a certificate whose key is not there yet helps nobody."""
    write_whole(folder / key_file, key_pem(key), mode=OWNER_ONLY)
    write_whole(folder / file, certificate_pem(certificate), mode=READABLE)
    return [folder / file, folder / key_file]
