"""Admission of a stream: checks its hello and certificate, and attaches it to the device's session.

Refusals are rate-limited by certificate name or address. A device that returns with its session's
token resumes the session, with its instruction and the received part of its upload. A second stream
under a connected device's name replaces the first one only with the same key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from urllib.parse import unquote

from headwater import __version__
from headwater.common.errors import (
    ConnectionLost,
    HeadwaterError,
    IdentityRefused,
    ModelMismatch,
    ProtocolMismatch,
    TaskNotInstalled,
    TooManyAttempts,
)
from headwater.common.transport.limits import (
    NAME_PATTERN,
    PROTOCOL_VERSION,
    is_version,
    named_version,
    same_version,
)
from headwater.common.transport.wire_pb2 import Hello, Notice, ServerFrame, Welcome
from headwater.server.transport.connections import Connections
from headwater.server.transport.peer_certificates import PeerCertificate
from headwater.server.transport.rate_limit import FrameLimit, RateLimit, subscriber
from headwater.server.transport.session import DeviceSession, Stream, node_id_of

log = logging.getLogger(__name__)

MAX_STARTS_OVER = 5  # in one round
MAX_TASKS = 50  # of a device, in a message


class OtherTaskNeeded(Exception):
    """The device is to load another of its tasks, and to connect again; it is no refusal.

    ``bundle`` is that task, if the device takes it from here.
    """

    def __init__(self, name: str, bundle: bytes = b"") -> None:
        super().__init__(name)
        self.name, self.bundle = name, bundle


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedTask:
    """The run's task in a signed bundle, for devices whose owners trust its signer."""

    name: str
    digest: str
    data: bytes = field(repr=False)


def check_bundle(offered: OfferedTask | None, hello: Hello) -> None:
    """Check that a device that takes tasks from its server has this one loaded.

    Raises:
        OtherTaskNeeded: it has another one, or none.
    """
    if offered is not None and hello.bundle not in ("", offered.digest):
        raise OtherTaskNeeded(offered.name, offered.data)


def check_task(task: str, hello: Hello) -> None:
    """Check that a device has the run's ``task`` loaded; "" accepts any.

    | the device lists | loaded | result |
    | --- | --- | --- |
    | no tasks | any | its model's layout decides |
    | tasks, not the run's | any | TaskNotInstalled |
    | the run's task | another | OtherTaskNeeded |
    | the run's task | the run's | accepted |

    Raises: see ``Admission.admit``.
    """
    if not task or not hello.tasks:
        return
    if task not in hello.tasks:
        listed = ", ".join(one[:100] for one in hello.tasks[:MAX_TASKS])
        raise TaskNotInstalled(f"the run has the task {task!r}; {hello.name} has {listed}")
    if hello.task != task:
        raise OtherTaskNeeded(task)


class Admission:
    """Admits or refuses streams; all methods run in the servicer's event loop."""

    def __init__(
        self,
        connections: Connections,
        *,
        run_id: int,
        term: int,
        has_tls: bool,
        task: str = "",
        offered: OfferedTask | None = None,
    ) -> None:
        """``task`` is the name of the run's task; "" accepts devices with any."""
        self.is_paused = False
        """Whether the operator has paused the run; each admitted device is notified of it."""
        self.is_watched = False
        """Whether somebody watches the devices' progress; devices are notified of it too."""
        self.layout_digest: str | None = None
        """The model's layout; a device with another layout is refused. None accepts any."""
        self.layout = ""
        """The layout's rows (``common.model.mismatch``), which the refusal shows to the device."""
        self._connections = connections
        self._run_id, self._task, self._offered = run_id, task, offered
        self.term = term
        self._has_tls = has_tls
        self._refused_sessions: dict[int, tuple[bytes, HeadwaterError]] = {}
        self._rate_limit = RateLimit()

    def has_attempts_left(self, stream: Stream) -> bool:
        """Return whether the stream's name or address may still be refused; count it if not."""
        if self._rate_limit.has_capacity(self._rate_key(stream), time.monotonic()):
            return True
        self._connections.uploads.refusals[TooManyAttempts.__name__] += 1
        return False

    def count_refusal(self, stream: Stream, error: HeadwaterError) -> None:
        """Count and log that a stream was refused, or was ended through its device's fault."""
        self._connections.uploads.refusals[error.code] += 1
        self._rate_limit.take(self._rate_key(stream), time.monotonic())
        log.warning("%s refused: %s: %s", stream.peer(), error.code, error)

    def note_unanswered(self, stream: Stream) -> None:
        """Count a stream that ended before its device answered anything, as if it was refused.

        An honest device's connection seldom breaks so early, and a fleet's refusals have room for
        it; a device that says hello and leaves, again and again, has to wait as refused ones do.
        """
        self._rate_limit.take(self._rate_key(stream), time.monotonic())

    def refuse_session(self, session: DeviceSession, error: HeadwaterError) -> None:
        """Refuse this session from now on; a restarted device has a new one and may try again."""
        self._refused_sessions[session.node_id] = (session.token, error)

    def admit(self, stream: Stream, hello: Hello) -> DeviceSession:
        """Check a hello, find or make the session, and attach the stream to it.

        Called in the task that serves the stream.

        Raises:
            ProtocolMismatch: the device speaks another version of the protocol.
            IdentityRefused: the certificate is unreadable, not in the registry or not for this
                name; the name is invalid; or a device of this name is connected already.
            CertificateRevoked: the certificate was revoked or replaced.
            ModelMismatch: the device's model has another layout.
            TaskNotInstalled: the run's task is none of those that the device lists.
            OtherTaskNeeded: it is one of them, and the device has another one loaded.
            HeadwaterError: the error with which this session was refused before.
        """
        certificate = self._certificate(stream)
        try:
            self._check(hello, certificate)
        except HeadwaterError as error:
            name = hello.name if certificate is None else certificate.name
            self._connections.device_records.note_refusal(name, error)
            raise
        session = self._connections.sessions.get(node_id_of(hello.name))
        is_same_device = session is not None and self._connections.verifier.is_same_device(
            session.certificate, certificate
        )
        resumes = (
            session is not None
            and is_same_device
            and hmac.compare_digest(session.token, hello.session)
        )
        has_displaced = session is not None and session.stream is not None and not resumes
        if has_displaced and session is not None:
            self._displace(session, stream, is_same_device=is_same_device)
        if session is None:
            session = DeviceSession(name=hello.name, node_id=node_id_of(hello.name), token=b"")
            self._connections.sessions[session.node_id] = session
        if not resumes:
            session.token = secrets.token_bytes(16)
            self._connections.uploads.discard(session)
        if session.task is not None:
            session.task.cancel()  # serves the old stream
        session.certificate = certificate
        if certificate is not None:
            self._connections.verifier.end_renewed(certificate)
        self._attach(session, stream, hello, has_displaced=has_displaced)
        self._continue(session, resumes=resumes)
        return session

    def _check(self, hello: Hello, certificate: PeerCertificate | None) -> None:
        """Check a hello; ``certificate`` is None without TLS. Raises: see ``admit``."""
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"the device speaks protocol {hello.protocol_version}"
                f"{named_version(hello.version)}, the server {PROTOCOL_VERSION} (headwater "
                f"{__version__})",
                remedy=same_version(__version__),
            )
        if not re.fullmatch(NAME_PATTERN, hello.name):
            raise IdentityRefused(
                f"{hello.name[:80]!r} is not a valid device name: expected at most 128 letters "
                "from a to z, digits, dots, dashes and underscores, a letter or digit first"
            )
        if certificate is not None:
            if certificate.name != hello.name:
                raise IdentityRefused(
                    f"the certificate is for {certificate.name!r}, not for {hello.name!r}"
                )
            self._connections.verifier.check(certificate)
        token, error = self._refused_sessions.get(node_id_of(hello.name), (b"", None))
        if error is not None and hmac.compare_digest(token, hello.session):
            raise error
        check_bundle(self._offered, hello)
        check_task(self._task, hello)
        if self.layout_digest is not None and hello.layout_digest != self.layout_digest:
            raise ModelMismatch(
                f"{hello.name}: its model's layout is {hello.layout_digest[:12] or 'unknown'}, the "
                f"server's {self.layout_digest[:12]}; the device's log names the tensor",
                layout=self.layout,
            )

    def _rate_key(self, stream: Stream) -> str:
        """Return what refusals are limited by: the certificate's name, or the address."""
        if self._has_tls:
            name = stream.auth_context().get("x509_common_name", [b""])[0]
            return f"name {name.decode(errors='replace')}"
        host = stream.peer().rpartition(":")[0].partition(":")[2]
        return subscriber(unquote(host).strip("[]"))

    def _certificate(self, stream: Stream) -> PeerCertificate | None:
        if not self._has_tls:
            return None
        return PeerCertificate.of_pem(stream.auth_context().get("x509_pem_cert", [b""])[0])

    def _displace(self, session: DeviceSession, stream: Stream, *, is_same_device: bool) -> None:
        """End the device's older stream, if the new one has proved that it is the same device."""
        if not self._has_tls or not is_same_device:
            # Not recorded as the device's refusal: another device used its name.
            key = ", with another key" if self._has_tls else ""
            raise IdentityRefused(f"a device named {session.name} is already connected{key}")
        older: Stream = session.stream
        log.warning(
            "%s: a stream from %s has the same key and replaces the one from %s",
            session.name,
            stream.peer(),
            older.peer(),
        )
        self._connections.closing[older] = IdentityRefused(
            f"another stream has the key of {session.name}"
        )

    def _attach(
        self, session: DeviceSession, stream: Stream, hello: Hello, *, has_displaced: bool
    ) -> None:
        welcome = Welcome(  # first: a session that could not be welcomed is not attached
            protocol_version=PROTOCOL_VERSION,
            session=session.token,
            run_id=self._run_id,
            has_displaced=has_displaced,
            term=self.term,
            version=__version__,
        )
        session.stream, session.task = stream, asyncio.current_task()
        session.outbox, session.image_id = asyncio.Queue(), hello.image_id
        session.sending_since, session.frame_limit = None, FrameLimit(at=time.monotonic())
        session.receipts.clear()
        for instruction in session.open_instructions:
            session.frame_limit.grant_reply(instruction.reply_bytes)
        self._connections.downloads.send(session, ServerFrame(welcome=welcome))
        session.record = self._connections.device_records.note_connected(session.name)
        session.record.version = hello.version if is_version(hello.version) else None
        if self.is_paused or self.is_watched:
            self._connections.downloads.send(session, self.notice())
        log.info("%s connected from %s", session.name, stream.peer())

    def notice(self) -> ServerFrame:
        """Return the frame that tells a device whether the run is paused, and watched."""
        notice = Notice(is_paused=self.is_paused, is_watched=self.is_watched)
        return ServerFrame(notice=notice)

    def _continue(self, session: DeviceSession, *, resumes: bool) -> None:
        """Send what a device that returns has missed: its instruction, or that its round closed.

        A device that starts over again and again, for example because the kernel kills it for lack
        of memory each time, is in this round no longer.
        """
        instruction, downloads = session.instruction, self._connections.downloads
        if session.missed is not None and resumes:
            downloads.send(session, session.missed)
        session.missed = None
        if instruction is None:
            return
        following = session.following
        # A device that resumes, and holds the model of the next one, has done this one.
        is_done = (
            resumes
            and following is not None
            and (session.reply is not None or not downloads.lacks_model(session, following))
        )
        if not resumes or (downloads.lacks_model(session, instruction) and not is_done):
            session.num_starts_over += 1
        if session.num_starts_over > MAX_STARTS_OVER:
            text = f"{session.name} started this round's work over {MAX_STARTS_OVER} times"
            self._connections.uploads.in_vain.add(session.name)
            self._connections.uploads.fail(session, ConnectionLost(text))
            return
        downloads.send_instruction(session, instruction, is_known=is_done)
        if following is not None:
            downloads.send_instruction(session, following)
