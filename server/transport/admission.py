"""Who is let in: what a device says in its hello, held against what the server knows."""

from __future__ import annotations

import hmac
import re

from headwater.common.errors import HeadwaterError, IdentityRefused, ModelMismatch, ProtocolMismatch
from headwater.common.transport.limits import NAME_PATTERN, PROTOCOL_VERSION
from headwater.common.transport.wire_pb2 import Hello
from headwater.server.enrolment.peer_certificates import CertificateVerifier, PeerCertificate
from headwater.server.transport.session import node_id_of


class Admission:
    """The rules by which a stream is served or refused, and who was turned away for good."""

    def __init__(self, identities: CertificateVerifier) -> None:
        self._identities = identities
        self.layout_digest: str | None = None
        """Of the model; devices with another are refused."""
        self._turned_away: dict[int, tuple[bytes, HeadwaterError]] = {}

    def turn_away(self, node_id: int, token: bytes, error: HeadwaterError) -> None:
        """Refuse whoever comes back with this session; who is started anew gets a new chance."""
        self._turned_away[node_id] = (token, error)

    def check(self, hello: Hello, shown: PeerCertificate | None) -> None:
        """Check a hello; ``shown`` is the stream's certificate, None where there is no TLS.

        Raises:
            ProtocolMismatch: it speaks another version.
            IdentityRefused: the name is none, or not that of the certificate; or the registry does
                not know the certificate.
            CertificateRevoked: it counts no more.
            ModelMismatch: its model is laid out otherwise.
            HeadwaterError: what this session was turned away for.
        """
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"the device speaks version {hello.protocol_version} of the wire, the server "
                f"{PROTOCOL_VERSION}"
            )
        if not re.fullmatch(NAME_PATTERN, hello.name):
            raise IdentityRefused(
                f"{hello.name[:80]!r} is no name for a device",
                remedy="letters, digits, dot, dash and underscore, 128 at most",
            )
        if shown is not None:
            if shown.name != hello.name:
                raise IdentityRefused(
                    f"the certificate is that of {shown.name!r}, not of {hello.name!r}"
                )
            self._identities.check(shown)
        token, error = self._turned_away.get(node_id_of(hello.name), (b"", None))
        if error is not None and hmac.compare_digest(token, hello.session):
            raise error
        if self.layout_digest is not None and hello.layout_digest != self.layout_digest:
            raise ModelMismatch(
                f"{hello.name}: its model's layout is {hello.layout_digest[:12] or 'unknown'}, the "
                f"server's {self.layout_digest[:12]}"
            )
