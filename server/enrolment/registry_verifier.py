"""Verifies the certificate of a stream against the registry, and renews it.

A device renews its certificate over its own stream; the new certificate's name is always the
stream's.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import time
from collections.abc import Iterable

from headwater.common.errors import CertificateRevoked, HeadwaterError, IdentityRefused, StateError
from headwater.common.settings.schema import TlsSettings
from headwater.common.transport.certificates import (
    key_digest,
    read_request,
    renewal_due_at,
)
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import Certificate
from headwater.server.enrolment.authority import CA_KEY_FILE, Authority
from headwater.server.enrolment.token_registry import (
    REGISTRY_FILE,
    CertificateEntry,
    Registry,
)
from headwater.server.transport.peer_certificates import CertificateVerifier, PeerCertificate

log = logging.getLogger(__name__)

RENEWAL_SECONDS = 60.0


class RegistryVerifier(CertificateVerifier):
    """Checks certificates against the registry, and renews them; used by one thread.

    Without a registry every certificate that TLS accepts is valid; without the authority's key none
    is renewed.
    """

    def __init__(
        self, *, registry: Registry | None = None, authority: Authority | None = None
    ) -> None:
        self._registry = registry
        self._authority = authority
        self._renewal_requested_at: dict[str, float] = {}

    @classmethod
    def of(cls, tls: TlsSettings, credentials: Credentials | None) -> CertificateVerifier:
        """Open registry and authority in the folder of ``tls.ca``; warn of missing or due files.

        Raises:
            CertificateProblem, StateError: a file is damaged.
        """
        if credentials is None or tls.ca is None:
            return CertificateVerifier()
        folder, now = tls.ca.parent, dt.datetime.now(dt.UTC)
        if now > renewal_due_at(credentials.leaf):
            log.warning(
                "the server's certificate expires on %s: run `headwater-server init --folder %s`, "
                "then restart the server",
                f"{credentials.leaf.not_valid_after_utc:%Y-%m-%d}",
                folder,
            )
        registry = authority = None
        if Registry.is_in(folder):
            registry = Registry(folder)
        else:
            log.warning("%s is not in %s: no device can be revoked", REGISTRY_FILE, folder)
        if (folder / CA_KEY_FILE).exists():
            authority = Authority.load(folder)
            if now > renewal_due_at(authority.certificate):
                end = authority.certificate.not_valid_after_utc
                log.warning("the authority itself expires on %s: plan a new one", f"{end:%Y-%m-%d}")
        else:
            log.warning(
                "%s is not in %s: no device can join, and certificates are not renewed",
                CA_KEY_FILE,
                folder,
            )
        return cls(registry=registry, authority=authority)

    def check(self, certificate: PeerCertificate) -> None:
        """Check that the registry has a certificate, and that it has not ended."""
        if self._registry is None:
            return
        entry = self._registry.entry(certificate.serial)
        if entry is None or entry.name != certificate.name:
            raise IdentityRefused(
                f"the certificate of {certificate.name} is not in the server's registry",
                remedy="ask the operator for a join token: `headwater-server enroll NAME`",
            )
        if entry.ended is not None:
            used = ", and the new one has been used" if entry.ended == "renewed" else ""
            raise CertificateRevoked(
                f"the certificate of {certificate.name} was {entry.ended}{used}"
            )

    def is_same_device(self, before: PeerCertificate | None, now: PeerCertificate | None) -> bool:
        """Return whether two streams have the same key, or the second renews the first's."""
        if super().is_same_device(before, now):
            return True
        entry = None if before is None or now is None else self._entry(now)
        return before is not None and entry is not None and entry.renews == before.serial

    def end_renewed(self, certificate: PeerCertificate) -> None:
        """End the certificate that this one renews: its first use proves that it has arrived."""
        entry = self._entry(certificate)
        if self._registry is None or entry is None or entry.renews is None:
            return
        before = self._registry.entry(entry.renews)
        if before is not None and before.ended is None:
            self._registry.end_renewed(entry.renews)
            log.warning(
                "%s connected with its renewed certificate; the old one is no longer valid",
                certificate.name,
            )

    def _entry(self, certificate: PeerCertificate) -> CertificateEntry | None:
        return None if self._registry is None else self._registry.entry(certificate.serial)

    def newly_invalid(self, certificates: Iterable[PeerCertificate]) -> dict[str, HeadwaterError]:
        """Return the certificates, by serial, that are not valid any more, and why.

        They are looked up only if the registry has changed since the last call.
        """
        if self._registry is None or not self._registry.has_changed():
            return {}
        invalid: dict[str, HeadwaterError] = {}
        for certificate in certificates:
            try:
                self.check(certificate)
            except StateError:
                self._registry.look_again()
                raise
            except HeadwaterError as error:
                invalid[certificate.serial] = error
        return invalid

    def renew(self, certificate: PeerCertificate, signing_request: bytes) -> Certificate:
        """Sign a device's next certificate, or return the reason for a refusal.

        A second request within a minute is refused without a log line.
        """
        now = time.monotonic()
        if now - self._renewal_requested_at.get(certificate.serial, -math.inf) < RENEWAL_SECONDS:
            return Certificate(refusal=f"the last request was less than {RENEWAL_SECONDS:g} s ago")
        self._renewal_requested_at[certificate.serial] = now
        try:
            pem = self._renewed(certificate, signing_request)
        except HeadwaterError as error:
            log.warning("%s: its certificate is not renewed: %s", certificate.name, error)
            return Certificate(refusal=error.message)
        log.warning("%s: its certificate is renewed", certificate.name)
        return Certificate(pem=pem)

    def _renewed(self, certificate: PeerCertificate, signing_request: bytes) -> bytes:
        if self._authority is None or self._registry is None:
            raise IdentityRefused(
                f"the authority's key is not on the server; the certificate expires on "
                f"{certificate.expires_at:%Y-%m-%d}"
            )
        if dt.datetime.now(dt.UTC) < certificate.half_life:
            raise IdentityRefused("the certificate is in the first half of its lifetime")
        self.check(certificate)
        name, key = read_request(signing_request)
        if name != certificate.name:
            raise IdentityRefused(f"the request is for {name[:80]!r}")
        authority, lifetime = self._authority, self._registry.certificate_lifetime
        return self._registry.renew(
            certificate.serial,
            certificate.name,
            key_digest(key),
            sign=lambda: authority.sign_device(name, key, lifetime=lifetime),
        )

    def close(self) -> None:
        """Close the registry."""
        if self._registry is not None:
            self._registry.close()
