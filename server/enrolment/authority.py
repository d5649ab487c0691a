"""The certificate authority that signs the server's and the devices' certificates.

``headwater-server init`` creates it in a folder of its own. Anyone with ``ca-key.pem`` can create
device certificates, so the file stays on the server or with the operator. Without it no device can
join and no certificate is renewed; everything else works. A device's certificate takes only the
public key from its signing request.
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
from headwater.common.system.atomic_file import (
    OWNER_ONLY,
    READABLE,
    make_private_folder,
    write_atomically,
)
from headwater.common.transport.certificates import (
    BACKDATE,
    Key,
    PublicKey,
    certificate_pem,
    check_dates,
    common_name,
    key_pem,
    new_key,
    public_key_der,
    renewal_due_at,
)
from headwater.common.transport.trusted_file import read_trusted

CA_FILE, CA_KEY_FILE = "ca.pem", "ca-key.pem"
SERVER_FILE, SERVER_KEY_FILE = "server.pem", "server-key.pem"
AUTHORITY_LIFETIME = dt.timedelta(days=10 * 365)
SERVER_LIFETIME = dt.timedelta(days=2 * 365)


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """The authority's certificate, which both sides trust, and its private key."""

    certificate: x509.Certificate
    key: Key = field(repr=False)

    @classmethod
    def new(cls) -> Authority:
        """Create an authority with a new key."""
        key = new_key()
        name = common_name("headwater authority")
        certificate = (
            _builder(name, name, key.public_key(), AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(is_ca=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate=certificate, key=key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Read the authority in a folder.

        Raises:
            CertificateProblem: a file is missing or malformed, or the certificate has expired.
            OSError: a file cannot be read, or others may read the key.
        """
        path, key_path = folder / CA_FILE, folder / CA_KEY_FILE
        for needed in (path, key_path):
            if not needed.exists():
                raise CertificateProblem(
                    f"the authority's {needed.name} is not in {folder}",
                    remedy="restore it, or create another authority with `headwater-server init` "
                    "and another --folder",
                )
        try:
            pem = read_trusted(key_path, is_secret=True)
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise CertificateProblem(f"{key_path} is not a PEM file: {error}") from error
        certificate = read_certificate(path)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or (
            public_key_der(key.public_key()) != public_key_der(certificate.public_key())
        ):
            raise CertificateProblem(f"{key_path} is not the key of {path}")
        check_dates(certificate, path)
        return cls(certificate=certificate, key=key)

    def save(self, folder: Path) -> list[Path]:
        """Write certificate and key; return their paths."""
        return _write(folder, CA_FILE, CA_KEY_FILE, self.certificate, self.key)

    def sign_device(self, name: str, key: PublicKey, *, lifetime: dt.timedelta) -> x509.Certificate:
        """Return a new device certificate; it expires no later than the authority's."""
        return self._leaf(name, key, ExtendedKeyUsageOID.CLIENT_AUTH, lifetime).sign(
            self.key, hashes.SHA256()
        )

    def make_server(self, hosts: Sequence[str]) -> tuple[x509.Certificate, Key]:
        """Create the server's key and its certificate for these host names and addresses."""
        key = new_key()
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = self._leaf(
            "server", key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH, SERVER_LIFETIME
        )
        return builder.add_extension(names, critical=False).sign(self.key, hashes.SHA256()), key

    def _leaf(
        self, name: str, key: PublicKey, purpose: x509.ObjectIdentifier, lifetime: dt.timedelta
    ) -> x509.CertificateBuilder:
        left = self.certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
        return (
            _builder(common_name(name), self.certificate.subject, key, min(lifetime, left))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(is_ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        )


def make_authority(folder: Path, *, hosts: Sequence[str]) -> list[Path]:
    """Create an authority and a server certificate for ``hosts``; return the written files.

    An existing authority is kept. An existing server certificate is replaced only if it lacks one
    of ``hosts``, is in or past the last third of its lifetime, or was signed by another authority;
    the new one also contains the old one's hosts.

    Raises:
        CertificateProblem: the folder cannot be written, or holds a damaged authority.
    """
    try:
        make_private_folder(folder)
        written: list[Path] = []
        if (folder / CA_KEY_FILE).exists() or (folder / CA_FILE).exists():
            authority = Authority.load(folder)
        else:
            authority = Authority.new()
            written += authority.save(folder)
        if not _is_current(folder, hosts, authority):
            certificate, key = authority.make_server(
                list(dict.fromkeys([*hosts, *_old_hosts(folder)]))
            )
            written += _write(folder, SERVER_FILE, SERVER_KEY_FILE, certificate, key)
    except OSError as error:
        raise CertificateProblem(
            f"cannot write to {folder}: {error.strerror}", remedy="choose another --folder"
        ) from error
    return written


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate in PEM.

    Raises:
        CertificateProblem: the file cannot be read, or is no certificate.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise CertificateProblem(
            f"{path}: {error.strerror}",
            remedy="name its folder with --folder, or create it with `headwater-server init`",
        ) from error
    except ValueError as error:
        raise CertificateProblem(f"{path} is not a certificate: {error}") from error


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses of a server's certificate, in its order."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names.value]


def is_valid_for(certificate: x509.Certificate, host: str) -> bool:
    """Return whether a server's certificate names this host, in upper or lower case."""
    wanted = str(_host(host).value).lower()
    return wanted in [known.lower() for known in hosts_of(certificate)]


def _old_hosts(folder: Path) -> list[str]:
    try:
        return hosts_of(read_certificate(folder / SERVER_FILE))
    except CertificateProblem:
        return []


def _is_current(folder: Path, hosts: Sequence[str], authority: Authority) -> bool:
    """Return whether the server's certificate need not be replaced."""
    try:
        certificate = read_certificate(folder / SERVER_FILE)
        key = (folder / SERVER_KEY_FILE).read_bytes()
        private = serialization.load_pem_private_key(key, password=None)
        certificate.verify_directly_issued_by(authority.certificate)
    except (CertificateProblem, OSError, ValueError, TypeError, InvalidSignature):
        return False
    is_paired = public_key_der(private.public_key()) == public_key_der(certificate.public_key())
    is_young = dt.datetime.now(dt.UTC) < renewal_due_at(certificate)
    return is_paired and is_young and all(is_valid_for(certificate, host) for host in hosts)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, lifetime: dt.timedelta
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + lifetime)
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
    """Write the key, then the certificate, which is useless without its key; return the paths."""
    write_atomically(folder / key_file, key_pem(key), mode=OWNER_ONLY)
    write_atomically(folder / file, certificate_pem(certificate), mode=READABLE)
    return [folder / file, folder / key_file]
