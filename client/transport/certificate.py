"""A connection's certificate, and when its stream asks the server for the next one.

``headwater.client.enrolment.renewal`` implements it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from headwater.client.transport.upload import Write
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import Certificate, ClientFrame, Renewal

# The wall clock is read this often: a laptop that slept wakes up late.
RENEWAL_POLL_SECONDS = 3600.0
RENEWAL_RETRY_SECONDS = 6 * 3600.0


class DeviceCertificate(Protocol):
    """The certificate in use, and its renewal."""

    credentials: Credentials

    def check(self) -> None:
        """Check before a connection that the certificate is still valid.

        Raises:
            CertificateProblem: it has expired.
        """

    def due_seconds(self) -> float:
        """Return the seconds until the certificate should be renewed; 0 if it is due."""

    def request(self) -> bytes | None:
        """Return a signing request; None if the certificate cannot be renewed."""

    def take(self, answer: Certificate) -> None:
        """Take the server's answer to the request."""


async def renew_when_due(certificate: DeviceCertificate, write: Write) -> None:
    """Request the next certificate in time, and again if the server refused."""
    while True:
        while (due := certificate.due_seconds()) > 0:
            await asyncio.sleep(min(due, RENEWAL_POLL_SECONDS))
        request = certificate.request()
        if request is not None:
            await write(ClientFrame(renewal=Renewal(signing_request=request)))
        await asyncio.sleep(RENEWAL_RETRY_SECONDS)
