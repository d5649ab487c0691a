"""Certificates as both sides see them: keys, signing requests, dates, and the files they lie in.

All keys are on P-256. A device makes its key, and asks for a certificate with a signing request
(RFC 2986) that bears its name and proves that it holds the key. A device's key and certificate lie
in one file, so that a renewal replaces both by one rename.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from headwater.common.errors import CertificateProblem, SettingsError
from headwater.common.transport.limits import NAME_PATTERN

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

# RFC 5280, appendix A.1: ub-common-name.
MAX_COMMON_NAME = 64
# Files of these names belong to the authority and the server.
RESERVED_NAMES = ("ca", "ca-key", "server", "server-key")
MAX_REQUEST_BYTES = 4096
"""Of a signing request in PEM; one of ours has about 450."""
# A Pi without a battery clock may be behind: certificates are valid from the day before.
BACKDATED = dt.timedelta(days=1)


def new_key() -> Key:
    """Make a private key from the system's randomness."""
    return ec.generate_private_key(ec.SECP256R1())


def signing_request(name: str, key: Key) -> bytes:
    """Return a request, in PEM, for a certificate of ``name`` for this key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(common_name(name))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def read_request(pem: bytes) -> tuple[str, PublicKey]:
    """Return the name and the public key of a request; nothing else of it is ever looked at.

    Raises:
        CertificateProblem: it is too long, not a request, not for a key on P-256, or not signed
            with that key.
    """
    wrong = CertificateProblem("not a signing request for a P-256 key, signed with that key")
    if len(pem) > MAX_REQUEST_BYTES:
        raise wrong
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
        name = name_in(request.subject)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise wrong from error
    if not is_signed or not isinstance(key, ec.EllipticCurvePublicKey):
        raise wrong
    if not isinstance(key.curve, ec.SECP256R1):
        raise wrong
    return name, key


def common_name(name: str) -> x509.Name:
    """Return the subject of a certificate: the name, and nothing besides."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def name_in(subject: x509.Name) -> str:
    """Return the one common name of a subject, "" if it has none or several."""
    names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else ""


def check_name(name: str) -> None:
    """Check that a name can be a device's and stand in a certificate.

    Raises:
        SettingsError: it cannot.
    """
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > MAX_COMMON_NAME:
        raise SettingsError(
            f"{name[:80]!r} cannot be a client's name",
            remedy=f"letters, digits, dot, dash and underscore, {MAX_COMMON_NAME} at most",
        )
    if name in RESERVED_NAMES or name.endswith("-key"):
        raise SettingsError(
            f"{name} cannot be a client's name: the files are somebody else's",
            remedy="choose another name",
        )


def fingerprint(certificate: x509.Certificate) -> bytes:
    """Return the 32 bytes of the SHA-256 of a certificate."""
    return certificate.fingerprint(hashes.SHA256())


def key_digest(key: object) -> bytes:
    """Return the SHA-256 of a public key (of its SubjectPublicKeyInfo), by which it is known."""
    return hashlib.sha256(spki(key)).digest()


def spki(key: object) -> bytes:
    """Return a public key's SubjectPublicKeyInfo.

    Raises:
        CertificateProblem: there is no key.
    """
    if not hasattr(key, "public_bytes"):
        raise CertificateProblem("a certificate without a public key")
    encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def due_at(certificate: x509.Certificate) -> dt.datetime:
    """Return when the last third of a certificate's life begins, counted from its making."""
    made = certificate.not_valid_before_utc + BACKDATED
    return made + (certificate.not_valid_after_utc - made) * (2 / 3)


def check_dates(certificate: x509.Certificate, what: object) -> None:
    """Hold a certificate against this machine's clock.

    Raises:
        CertificateProblem: it has expired, or is not valid yet.
    """
    now = dt.datetime.now(dt.UTC)
    if certificate.not_valid_after_utc < now:
        raise CertificateProblem(
            f"{what} expired on {certificate.not_valid_after_utc:%Y-%m-%d}, and this machine's "
            f"clock says {now:%Y-%m-%d}"
        )
    if now < certificate.not_valid_before_utc:
        raise CertificateProblem(
            f"{what} is valid from {certificate.not_valid_before_utc:%Y-%m-%d}, and this machine's "
            f"clock says {now:%Y-%m-%d}",
            remedy="set the clock",
        )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Return a certificate in PEM."""
    return certificate.public_bytes(Encoding.PEM)


def key_pem(key: Key) -> bytes:
    """Return a private key in PEM; it belongs into a file that its owner alone can read."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
