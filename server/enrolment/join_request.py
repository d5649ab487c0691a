"""A device's request for its first certificate: parsing it, and issuing the certificate."""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from typing import Any

from headwater.common.errors import IdentityRefused, ProtocolMismatch
from headwater.common.transport.certificates import key_digest, read_request
from headwater.common.transport.join_token import SECRET_BYTES, secret_digest
from headwater.server.enrolment.authority import Authority
from headwater.server.enrolment.token_registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """A device's name, its token's secret and its signing request."""

    name: str
    secret: bytes
    signing_request: bytes

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> JoinRequest:
        """Read a request.

        Raises:
            ProtocolMismatch: a field is missing or malformed.
        """
        try:
            secret = bytes.fromhex(fields["secret"])
            name, request = str(fields["name"]), str(fields["request"]).encode("ascii")
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise ProtocolMismatch("received an incomplete request for a certificate") from None
        if len(secret) != SECRET_BYTES:
            raise ProtocolMismatch("received an incomplete request for a certificate")
        return cls(name=name, secret=secret, signing_request=request)


def issue(request: JoinRequest, authority: Authority, registry: Registry, *, now: float) -> bytes:
    """Return the certificate, in PEM, that the request's token entitles to.

    Raises:
        CertificateProblem: the signing request is malformed.
        IdentityRefused: it is for another name than the token.
        DeviceRefused, NameTaken: see ``Registry.redeem``.
    """
    name, key = read_request(request.signing_request)
    if name != request.name:
        raise IdentityRefused(
            f"the signing request is for {name[:80]!r}, not for {request.name[:80]!r}"
        )
    return registry.redeem(
        secret_digest(request.secret),
        name,
        key_digest(key),
        now=now,
        sign=lambda: authority.sign_device(name, key, lifetime=registry.certificate_lifetime),
    )
