"""From a hello to a session: who is at the door, whether it may come in, and whom it displaces.

``server.transport.admission`` holds the hello against what the server knows. Here follows what the stream
itself shows: its certificate or address, by which refusals are rationed, and whether it may take
the place of another stream of its name. A device that comes back with its session's token finds
its instruction and what had arrived of its upload.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from urllib.parse import unquote

from headwater.common.errors import HeadwaterError, IdentityRefused, TooManyAttempts
from headwater.common.transport.limits import PROTOCOL_VERSION
from headwater.common.transport.wire_pb2 import Hello, Notice, ServerFrame, Welcome
from headwater.server.enrolment.peer_certificates import CertificateVerifier, PeerCertificate
from headwater.server.transport.admission import Admission
from headwater.server.transport.device_records import DeviceRecords
from headwater.server.transport.downloads import Downloads
from headwater.server.transport.rate_limit import FrameLimit, RateLimit, subscriber
from headwater.server.transport.session import (
    ClosingStreams,
    DeviceSession,
    Sessions,
    Stream,
    node_id_of,
)
from headwater.server.transport.uploads import Uploads

log = logging.getLogger(__name__)


class Doorway:
    """Lets streams in, or not; everything here runs in the intake's event loop."""

    def __init__(
        self,
        sessions: Sessions,
        displaced: ClosingStreams,
        *,
        run_id: int,
        has_tls: bool,
        admission: Admission,
        identities: CertificateVerifier,
        attendance: DeviceRecords,
        uploads: Uploads,
        downloads: Downloads,
    ) -> None:
        self.is_paused = False
        """Whether rounds are held back, which those who come are told."""
        self._sessions = sessions
        self._displaced = displaced
        self._run_id = run_id
        self._has_tls = has_tls
        self._admission = admission
        self._identities = identities
        self._attendance = attendance
        self._uploads = uploads
        self._downloads = downloads
        self._refusals = uploads.refusals
        self._ration = RateLimit()

    def may_knock(self, stream: Stream) -> bool:
        """Tell whether its name or address has refusals left; if not, that is counted."""
        if self._ration.is_left(self._who(stream), time.monotonic()):
            return True
        self._refusals[TooManyAttempts.__name__] += 1
        return False

    def count(self, stream: Stream, error: HeadwaterError) -> None:
        """Count that a stream was refused, or ended by its device's fault."""
        self._refusals[error.code] += 1
        self._ration.take(self._who(stream), time.monotonic())
        log.warning("%s refused: %s: %s", stream.peer(), error.code, error)

    def welcome(self, stream: Stream, hello: Hello) -> DeviceSession:
        """Check a hello, find or make the session, and attach the stream to it.

        It is called in the task that serves the stream.

        Raises:
            IdentityRefused: the certificate cannot be read, or the name's device is here already.
            HeadwaterError: what ``Admission.check`` raises.
        """
        shown = self._shown(stream)
        try:
            self._admission.check(hello, shown)
        except HeadwaterError as error:
            self._attendance.refuse(hello.name if shown is None else shown.name, error)
            raise
        session = self._sessions.get(node_id_of(hello.name))
        is_kin = session is not None and self._identities.is_same_device(session.shown, shown)
        is_same = (
            session is not None and is_kin and hmac.compare_digest(session.token, hello.session)
        )
        has_displaced = session is not None and session.stream is not None and not is_same
        if has_displaced and session is not None:
            self._displace(session, stream, is_kin=is_kin)
        if session is None:
            session = DeviceSession(name=hello.name, node_id=node_id_of(hello.name), token=b"")
            self._sessions[session.node_id] = session
        if not is_same:
            session.token = secrets.token_bytes(16)
            self._uploads.drop(session)
        if session.task is not None:
            session.task.cancel()  # the old stream
        session.shown = shown
        if shown is not None:
            self._identities.settle(shown)
        self._attach(session, stream, hello, has_displaced=has_displaced)
        return session

    def _who(self, stream: Stream) -> str:
        """Return whose refusals are rationed: a certificate's name, or an address."""
        if self._has_tls:
            name = stream.auth_context().get("x509_common_name", [b""])[0]
            return f"name {name.decode(errors='replace')}"
        host = stream.peer().rpartition(":")[0].partition(":")[2]
        return subscriber(unquote(host).strip("[]"))

    def _shown(self, stream: Stream) -> PeerCertificate | None:
        if not self._has_tls:
            return None
        return PeerCertificate.of_pem(stream.auth_context().get("x509_pem_cert", [b""])[0])

    def _displace(self, session: DeviceSession, stream: Stream, *, is_kin: bool) -> None:
        """Let a stream take the place of the device's other one, if it has proved to be its."""
        if not self._has_tls or not is_kin:
            # Not noted as the device's refusal: it is another that came under its name.
            key = ", with another key" if self._has_tls else ""
            raise IdentityRefused(f"a device of the name {session.name} is connected already{key}")
        first: Stream = session.stream
        log.warning(
            "%s: a stream from %s has proved the same key, and displaces the one from %s",
            session.name,
            stream.peer(),
            first.peer(),
        )
        self._displaced[first] = IdentityRefused(
            f"another stream has come with the key of {session.name}"
        )

    def _attach(
        self, session: DeviceSession, stream: Stream, hello: Hello, *, has_displaced: bool
    ) -> None:
        session.stream, session.task = stream, asyncio.current_task()
        session.outbox, session.image_id = asyncio.Queue(), hello.image_id
        session.sending_since, session.frames = None, FrameLimit(at=time.monotonic())
        if session.ask is not None:
            session.frames.asked(session.ask.reply_bytes)
        welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            session=session.token,
            run_id=self._run_id,
            has_displaced=has_displaced,
        )
        self._downloads.send(session, ServerFrame(welcome=welcome))
        session.known = self._attendance.connected(session.name)
        if self.is_paused:
            self._downloads.send(session, ServerFrame(notice=Notice(is_paused=True)))
        if session.ask is not None:
            self._downloads.push(session, session.ask)
        log.info("%s connected from %s", session.name, stream.peer())
