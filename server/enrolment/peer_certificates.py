"""Who is behind a stream: the certificate that it showed, held against the registry.

TLS has checked that the authority signed the certificate and that it has not expired. Here follows
what a signature cannot say: whether it is revoked, whether two streams are one device, and that a
stream may go on for no longer than its certificate. A device renews its certificate over its own
stream: the name is that of the stream, whatever the request says.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509

from headwater.common.errors import CertificateRevoked, HeadwaterError, IdentityRefused, StateError
from headwater.common.settings.schema import TlsSettings
from headwater.common.transport.certificates import (
    BACKDATED,
    due_at,
    key_digest,
    name_in,
    read_request,
)
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import Certificate
from headwater.server.enrolment.authority import CA_KEY_FILE, Authority
from headwater.server.enrolment.registry import REGISTRY_FILE, Registry, serial_of

log = logging.getLogger(__name__)

RENEWAL_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerCertificate:
    """What a stream's certificate says."""

    name: str
    serial: str
    key: bytes
    """The digest of its public key, by which two streams are known to be of one device."""
    half_life: dt.datetime
    """Before then nobody needs another."""
    expires_at: dt.datetime

    @classmethod
    def of(cls, certificate: x509.Certificate) -> PeerCertificate:
        """Read a certificate that TLS has verified."""
        made, end = certificate.not_valid_before_utc + BACKDATED, certificate.not_valid_after_utc
        return cls(
            name=name_in(certificate.subject),
            serial=serial_of(certificate),
            key=key_digest(certificate.public_key()),
            half_life=made + (end - made) / 2,
            expires_at=end,
        )

    @classmethod
    def of_pem(cls, pem: bytes) -> PeerCertificate:
        """Read a certificate that TLS has verified.

        Raises:
            IdentityRefused: it cannot be read.
        """
        try:
            return cls.of(x509.load_pem_x509_certificate(pem))
        except ValueError as error:
            raise IdentityRefused("the certificate cannot be read") from error


class CertificateVerifier:
    """The registry and the authority, as far as they are at hand; all is called from one thread."""

    def __init__(
        self, *, registry: Registry | None = None, authority: Authority | None = None
    ) -> None:
        self._registry = registry
        self._authority = authority
        self._asked_at: dict[str, float] = {}

    @classmethod
    def of(cls, tls: TlsSettings, credentials: Credentials | None) -> CertificateVerifier:
        """Open what lies beside the authority's certificate, and warn of what is missing or due.

        Raises:
            CertificateProblem, StateError: it is there, and broken.
        """
        if credentials is None or tls.ca is None:
            return cls()
        folder = tls.ca.parent
        if dt.datetime.now(dt.UTC) > due_at(credentials.leaf):
            log.warning(
                "the server's certificate ends on %s: run `headwater-server init --folder %s`, and "
                "start the server anew",
                f"{credentials.leaf.not_valid_after_utc:%Y-%m-%d}",
                folder,
            )
        registry = authority = None
        if Registry.is_in(folder):
            registry = Registry(folder)
        else:
            log.warning("there is no %s in %s: no device can be revoked", REGISTRY_FILE, folder)
        if not (folder / CA_KEY_FILE).exists():
            log.warning(
                "there is no %s in %s: no device can join, and certificates are not renewed",
                CA_KEY_FILE,
                folder,
            )
        else:
            authority = Authority.load(folder)
            if dt.datetime.now(dt.UTC) > due_at(authority.certificate):
                end = authority.certificate.not_valid_after_utc
                log.warning("the authority itself ends on %s: plan another", f"{end:%Y-%m-%d}")
        return cls(registry=registry, authority=authority)

    def check(self, shown: PeerCertificate) -> None:
        """Hold a certificate against the registry.

        Raises:
            CertificateRevoked: it counts no more.
            IdentityRefused: the registry does not know it, or under another name.
            StateError: the registry cannot be read.
        """
        if self._registry is None:
            return
        entry = self._registry.entry(shown.serial)
        if entry is None or entry.name != shown.name:
            raise IdentityRefused(
                f"the certificate of {shown.name} is not in the server's registry",
                remedy="ask the operator for a join token: `headwater-server enroll NAME`",
            )
        if entry.ended == "renewed":
            raise CertificateRevoked(
                f"the certificate of {shown.name} was renewed, and the new one has been used"
            )
        if entry.ended is not None:
            raise CertificateRevoked(f"the certificate of {shown.name} was {entry.ended}")

    def is_same_device(self, before: PeerCertificate | None, now: PeerCertificate | None) -> bool:
        """Tell whether two streams showed one key, or the second one's was made to renew the first.

        Without certificates there is nothing to tell apart.
        """
        if before is None or now is None:
            return before is now
        if before.key == now.key:
            return True
        entry = None if self._registry is None else self._registry.entry(now.serial)
        return entry is not None and entry.renews == before.serial

    def settle(self, shown: PeerCertificate) -> None:
        """End the certificate that this one renews: its first use proves that it has arrived."""
        entry = None if self._registry is None else self._registry.entry(shown.serial)
        if self._registry is not None and entry is not None and entry.renews is not None:
            before = self._registry.entry(entry.renews)
            if before is not None and before.ended is None:
                self._registry.supersede(entry.renews)
                log.warning(
                    "%s came with its renewed certificate; the old one is ended", shown.name
                )

    def ended(self, shown: Iterable[PeerCertificate]) -> dict[str, HeadwaterError]:
        """Return who of these must go, by serial: looked up only when the registry has changed."""
        if self._registry is None or not self._registry.has_changed():
            return {}
        found: dict[str, HeadwaterError] = {}
        for one in shown:
            try:
                self.check(one)
            except StateError:
                raise
            except HeadwaterError as error:
                found[one.serial] = error
        return found

    def renew(self, shown: PeerCertificate, signing_request: bytes) -> Certificate:
        """Sign a device's next certificate, or say why not.

        A device that asks again within a minute is put off without a word in the log.
        """
        now = time.monotonic()
        if now - self._asked_at.get(shown.serial, -math.inf) < RENEWAL_SECONDS:
            return Certificate(refusal=f"it was asked for within {RENEWAL_SECONDS:g} s before")
        self._asked_at[shown.serial] = now
        try:
            pem = self._renewed(shown, signing_request)
        except HeadwaterError as error:
            log.warning("%s: its certificate is not renewed: %s", shown.name, error)
            return Certificate(refusal=error.message)
        log.warning("%s: its certificate is renewed", shown.name)
        return Certificate(pem=pem)

    def _renewed(self, shown: PeerCertificate, signing_request: bytes) -> bytes:
        if self._authority is None or self._registry is None:
            raise IdentityRefused(
                f"the authority's key is not on the server, and the certificate ends on "
                f"{shown.expires_at:%Y-%m-%d}"
            )
        if dt.datetime.now(dt.UTC) < shown.half_life:
            raise IdentityRefused("more than half of the certificate's life is left")
        self.check(shown)
        name, key = read_request(signing_request)
        if name != shown.name:
            raise IdentityRefused(f"the request is for {name[:80]!r}")
        authority, lasts = self._authority, self._registry.lasts
        return self._registry.renew(
            shown.serial,
            shown.name,
            key_digest(key),
            sign=lambda: authority.device(name, key, lasts=lasts),
        )

    def close(self) -> None:
        """Close the registry."""
        if self._registry is not None:
            self._registry.close()
