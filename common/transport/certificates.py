"""Certificates of devices and server: keys, signing requests, names, dates and PEM.

All keys are on P-256. A device generates its key and requests a certificate with a signing request
(RFC 2986) that has its name and proves that it has the key. A device's key and certificate are in
one file, so that a renewal replaces both by one rename.
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
# The authority and the server have files of these names.
RESERVED_NAMES = ("ca", "ca-key", "server", "server-key")
MAX_REQUEST_BYTES = 4096
"""The largest signing request in PEM; ours have about 450 bytes."""
# The clock of a Pi without a battery may be slow: certificates are valid from the day before.
BACKDATE = dt.timedelta(days=1)


def new_key() -> Key:
    """Generate a private key from the system's randomness."""
    return ec.generate_private_key(ec.SECP256R1())


def signing_request(name: str, key: Key) -> bytes:
    """Return a signing request in PEM for a certificate with this name and key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(common_name(name))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def read_request(pem: bytes) -> tuple[str, PublicKey]:
    """Return the name and the public key of a request; all its other fields are ignored.

    Raises:
        CertificateProblem: the request is too long, malformed, not for a key on P-256, or not
            signed with that key.
    """
    problem = CertificateProblem("not a signing request for a P-256 key, signed with that key")
    if len(pem) > MAX_REQUEST_BYTES:
        raise problem
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
        name = common_name_in(request.subject)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise problem from error
    if not is_signed or not isinstance(key, ec.EllipticCurvePublicKey):
        raise problem
    if not isinstance(key.curve, ec.SECP256R1):
        raise problem
    return name, key


def common_name(name: str) -> x509.Name:
    """Return a certificate's subject, which is the name alone."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def common_name_in(subject: x509.Name) -> str:
    """Return a subject's only common name; "" if it has none or several."""
    names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else ""


def check_name(name: str) -> None:
    """Check that a name is valid for a device and its certificate.

    Raises:
        SettingsError: the name is malformed, too long or reserved.
    """
    if not re.fullmatch(NAME_PATTERN, name) or len(name) > MAX_COMMON_NAME:
        raise SettingsError(
            f"{name[:80]!r} is not a valid client name",
            remedy=f"use at most {MAX_COMMON_NAME} letters a-z and A-Z, digits, dots, dashes "
            "and underscores",
        )
    if name in RESERVED_NAMES or name.endswith("-key"):
        raise SettingsError(
            f"{name} is not a valid client name: the authority has files of that name",
            remedy="choose another name",
        )


def fingerprint(certificate: x509.Certificate) -> bytes:
    """Return the 32-byte SHA-256 of a certificate."""
    return certificate.fingerprint(hashes.SHA256())


def key_digest(key: object) -> bytes:
    """Return the SHA-256 of a public key's SubjectPublicKeyInfo, which identifies the key."""
    return hashlib.sha256(public_key_der(key)).digest()


def serial_of(certificate: x509.Certificate) -> str:
    """Return a certificate's serial number in hexadecimal; it has up to 159 bits."""
    return f"{certificate.serial_number:x}"


def public_key_der(key: object) -> bytes:
    """Return a public key's SubjectPublicKeyInfo in DER.

    Raises:
        CertificateProblem: ``key`` is not a public key.
    """
    if not hasattr(key, "public_bytes"):
        raise CertificateProblem("a certificate without a public key")
    encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def renewal_due_at(certificate: x509.Certificate) -> dt.datetime:
    """Return when the last third of a certificate's validity, from its creation, begins."""
    made = certificate.not_valid_before_utc + BACKDATE
    return made + (certificate.not_valid_after_utc - made) * (2 / 3)


def check_dates(certificate: x509.Certificate, what: object) -> None:
    """Check a certificate's validity by this machine's clock.

    Raises:
        CertificateProblem: it has expired, or is not valid yet.
    """
    now = dt.datetime.now(dt.UTC)
    if certificate.not_valid_after_utc < now:
        raise CertificateProblem(
            f"{what} expired on {certificate.not_valid_after_utc:%Y-%m-%d}, and this machine's "
            f"clock says {now:%Y-%m-%d}",
            remedy=f"set the clock, if it is wrong; otherwise {CertificateProblem.remedy}",
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
    """Return a private key in PEM; store it in a file that only its owner can read."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
