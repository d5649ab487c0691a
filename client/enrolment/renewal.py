"""Renews a device's certificate over its stream before it expires.

In the last third of the certificate's life the device makes a new key and sends a signing request
over the stream that its certificate opened. The new key and certificate replace the old file in one
rename, and are used from the next connection on. If certificate and key are in two files, they
cannot be replaced at once: the files stay as they are, and the log says in time what to do.
"""

from __future__ import annotations

import datetime as dt
import logging
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from headwater.common.settings.schema import TlsSettings
from headwater.common.system.atomic_file import OWNER_ONLY, write_atomically
from headwater.common.transport.certificates import (
    Key,
    certificate_pem,
    check_dates,
    common_name_in,
    key_pem,
    new_key,
    public_key_der,
    renewal_due_at,
    signing_request,
)
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import Certificate

log = logging.getLogger(__name__)


class Renewal:
    """The certificate in use, and its renewal."""

    def __init__(self, tls: TlsSettings, credentials: Credentials) -> None:
        self.credentials = credentials
        self._file: Path | None = tls.certificate if tls.certificate == tls.key else None
        self._leaf = credentials.leaf
        self._key: Key | None = None

    def check(self) -> None:
        """Check before a connection that the certificate is still valid.

        Raises:
            CertificateProblem: it has expired.
        """
        check_dates(self._leaf, "this device's certificate")

    def due_seconds(self) -> float:
        """Return the seconds until the certificate should be renewed; 0 if it is due."""
        return max((renewal_due_at(self._leaf) - dt.datetime.now(dt.UTC)).total_seconds(), 0.0)

    def request(self) -> bytes | None:
        """Make a new key and return its signing request; None if the files allow no renewal."""
        if self._file is None:
            log.warning(
                "this device's certificate ends on %s and is not renewed automatically, because it "
                "and its key are in two files: join again with a token from the operator",
                self._end,
            )
            return None
        log.info("this device's certificate ends on %s: requesting its renewal", self._end)
        self._key = new_key()
        return signing_request(common_name_in(self._leaf.subject), self._key)

    def take(self, answer: Certificate) -> None:
        """Write the server's new certificate to the file, or log why there is none."""
        key, self._key = self._key, None
        if key is None or self._file is None:
            log.warning("the server sent a certificate that was not requested; it is ignored")
            return
        if answer.refusal:
            log.warning(
                "this device's certificate ends on %s, and the server does not renew it: %s. Ask "
                "the operator for a join token before then",
                self._end,
                answer.refusal[:1000],
            )
            return
        certificate = self._parse(answer.pem, key)
        if certificate is None:
            log.warning("the server's answer is not a certificate for this device; it is ignored")
            return
        renewed = Credentials(
            ca=self.credentials.ca, certificate=certificate_pem(certificate), key=key_pem(key)
        )
        try:
            write_atomically(self._file, renewed.certificate + renewed.key, mode=OWNER_ONLY)
        except OSError as error:
            log.warning(
                "%s cannot be written, the certificate is not renewed: %s", self._file, error
            )
            return
        self.credentials, self._leaf = renewed, certificate
        log.warning("this device's certificate was renewed: the new one ends on %s", self._end)

    @property
    def _end(self) -> str:
        return f"{self._leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"

    def _parse(self, pem: bytes, key: Key) -> x509.Certificate | None:
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            certificate.verify_directly_issued_by(
                x509.load_pem_x509_certificate(self.credentials.ca)
            )
        except (ValueError, TypeError, InvalidSignature):
            return None
        is_own = public_key_der(certificate.public_key()) == public_key_der(key.public_key())
        is_named = common_name_in(certificate.subject) == common_name_in(self._leaf.subject)
        is_later = certificate.not_valid_after_utc > self._leaf.not_valid_after_utc
        return certificate if is_own and is_named and is_later else None
