"""The state that all streams of one server share."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.server.transport.device_records import DeviceRecords
from headwater.server.transport.downloads import Downloads
from headwater.server.transport.peer_certificates import CertificateVerifier
from headwater.server.transport.session import ClosingStreams, Sessions
from headwater.server.transport.uploads import Uploads


@dataclass(frozen=True, kw_only=True, slots=True)
class Connections:
    """Sessions and streams, and what serves them; used in the servicer's event loop."""

    sessions: Sessions
    closing: ClosingStreams
    verifier: CertificateVerifier
    device_records: DeviceRecords
    uploads: Uploads
    downloads: Downloads
