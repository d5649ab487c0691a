"""The certificate of a stream, and its verifier.

TLS has checked that the authority signed the certificate and that it has not expired. A verifier
checks what a signature cannot show: whether the certificate is revoked, and whether two streams
belong to one device. ``server.enrolment`` has a verifier with a registry of certificates.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.common.errors import HeadwaterError, IdentityRefused
from headwater.common.transport.wire_pb2 import Certificate


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerCertificate:
    """The contents of a stream's certificate."""

    name: str
    serial: str
    key: bytes
    """The digest of its public key; two streams with one key belong to one device."""
    half_life: dt.datetime
    """The certificate is not renewed before this time."""
    expires_at: dt.datetime

    @classmethod
    def of_pem(cls, pem: bytes) -> PeerCertificate:
        """Read a certificate that TLS has verified.

        Raises:
            IdentityRefused: it cannot be read.
        """
        from cryptography import x509  # only if there are certificates, as in ``tls``

        from headwater.common.transport import certificates as fields

        try:
            found = x509.load_pem_x509_certificate(pem)
            start, end = found.not_valid_before_utc + fields.BACKDATE, found.not_valid_after_utc
            return cls(
                name=fields.common_name_in(found.subject),
                serial=fields.serial_of(found),
                key=fields.key_digest(found.public_key()),
                half_life=start + (end - start) / 2,
                expires_at=end,
            )
        except ValueError as error:
            raise IdentityRefused("the certificate cannot be read") from error


class CertificateVerifier:
    """Accepts every certificate that TLS accepts, and renews none."""

    def check(self, certificate: PeerCertificate) -> None:
        """Check a certificate.

        Raises:
            CertificateRevoked: it was revoked, or renewed and the new one has been used.
            IdentityRefused: it is unknown, or known under another name.
            StateError: the registry cannot be read.
        """

    def is_same_device(self, before: PeerCertificate | None, now: PeerCertificate | None) -> bool:
        """Return whether two streams have the same key, or the second renews the first's.

        Without certificates, streams of one name cannot be told apart: True.
        """
        return before is now if before is None or now is None else before.key == now.key

    def end_renewed(self, certificate: PeerCertificate) -> None:
        """End the certificate that this one renews: its first use proves that it has arrived."""

    def newly_invalid(self, certificates: Iterable[PeerCertificate]) -> dict[str, HeadwaterError]:
        """Return the certificates, by serial, that are not valid any more, and why."""
        return {}

    def renew(self, certificate: PeerCertificate, signing_request: bytes) -> Certificate:
        """Sign a device's next certificate, or return the reason for a refusal."""
        return Certificate(refusal="this server renews no certificates")

    def close(self) -> None:
        """Close what the checks need."""
