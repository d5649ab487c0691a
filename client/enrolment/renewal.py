"""A device's certificate, renewed over its stream before it ends.

In the last third of the certificate's life the device makes a new key and sends a signing request
over the stream that its certificate opened. The new key and certificate replace the old in one
rename, and serve from the next connection on. Where certificate and key lie in two files there is
no such rename: they are left alone, and the log says in time what to do.
"""

from __future__ import annotations

import datetime as dt
import logging
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from headwater.common.settings.schema import TlsSettings
from headwater.common.system.atomic_file import OWNER_ONLY, write_whole
from headwater.common.transport.certificates import (
    Key,
    certificate_pem,
    check_dates,
    due_at,
    key_pem,
    name_in,
    new_key,
    signing_request,
    spki,
)
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import Certificate

log = logging.getLogger(__name__)


class Renewal:
    """The certificate in use, and the next one."""

    def __init__(self, tls: TlsSettings, credentials: Credentials) -> None:
        self.credentials = credentials
        self._file: Path | None = tls.certificate if tls.certificate == tls.key else None
        self._own = credentials.leaf
        self._key: Key | None = None

    def check(self) -> None:
        """Check before a connection that the certificate is still good.

        Raises:
            CertificateProblem: it has expired.
        """
        check_dates(self._own, "this device's certificate")

    def due_seconds(self) -> float:
        """Return how long until the certificate should be renewed, 0 if now."""
        return max((due_at(self._own) - dt.datetime.now(dt.UTC)).total_seconds(), 0.0)

    def request(self) -> bytes | None:
        """Make a new key and return a signing request for it; None if it could not be kept."""
        if self._file is None:
            log.warning(
                "this device's certificate ends on %s, and is not renewed by itself, because it "
                "and its key lie in two files: join anew with a token of the operator's",
                self._end,
            )
            return None
        log.info("this device's certificate ends on %s: asking for the next", self._end)
        self._key = new_key()
        return signing_request(name_in(self._own.subject), self._key)

    def take(self, answer: Certificate) -> None:
        """Take the server's answer: keep the new certificate, or say that there is none."""
        key, self._key = self._key, None
        if key is None or self._file is None:
            log.warning("the server sent a certificate that was not asked for; it is ignored")
            return
        if answer.refusal:
            log.warning(
                "this device's certificate ends on %s, and the server does not renew it: %s. Ask "
                "the operator for a join token before then",
                self._end,
                answer.refusal[:1000],
            )
            return
        certificate = self._checked(answer.pem, key)
        if certificate is None:
            log.warning("the server's answer is not a certificate for this device; it is ignored")
            return
        fresh = Credentials(
            ca=self.credentials.ca, certificate=certificate_pem(certificate), key=key_pem(key)
        )
        try:
            write_whole(self._file, fresh.certificate + fresh.key, mode=OWNER_ONLY)
        except OSError as error:
            log.warning(
                "%s cannot be written, the certificate is not renewed: %s", self._file, error
            )
            return
        self.credentials, self._own = fresh, certificate
        log.warning("this device's certificate was renewed: the new one ends on %s", self._end)

    @property
    def _end(self) -> str:
        return f"{self._own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"

    def _checked(self, pem: bytes, key: Key) -> x509.Certificate | None:
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            certificate.verify_directly_issued_by(
                x509.load_pem_x509_certificate(self.credentials.ca)
            )
        except (ValueError, TypeError, InvalidSignature):
            return None
        is_own = spki(certificate.public_key()) == spki(key.public_key())
        is_named = name_in(certificate.subject) == name_in(self._own.subject)
        is_later = certificate.not_valid_after_utc > self._own.not_valid_after_utc
        return certificate if is_own and is_named and is_later else None
