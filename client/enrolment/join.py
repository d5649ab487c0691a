"""``headwater-client join``: makes the device's key, and gets a certificate for a join token.

The private key never leaves the device. The device connects twice. First it reads the authority's
certificate, which is accepted only if it has the fingerprint in the token. Then, trusting only that
authority, it sends the token's secret and a signing request. So nobody in between learns the
secret, and only the operator's server can answer.
"""

from __future__ import annotations

import datetime as dt
import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from headwater.client.enrolment.port_client import send_request
from headwater.common.errors import (
    AuthorityMismatch,
    CertificateProblem,
    ClockWrong,
    ProtocolMismatch,
    TooManyAttempts,
)
from headwater.common.parsed_text import toml_of
from headwater.common.system.atomic_file import (
    OWNER_ONLY,
    READABLE,
    make_private_folder,
    write_atomically,
)
from headwater.common.transport.certificates import (
    Key,
    certificate_pem,
    common_name_in,
    fingerprint,
    key_pem,
    new_key,
    public_key_der,
    signing_request,
)
from headwater.common.transport.join_token import JoinToken
from headwater.common.transport.tls import split_address

log = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], float]
CLOCK_SECONDS = 300.0  # a larger difference to the server's clock is worth a warning
# The port takes a connection of one address every 2 s, and a join has two: in this time 45 devices.
PATIENCE_SECONDS, WAIT_SECONDS = 180.0, (2.0, 8.0)
CA_FILE, OWN_FILE, SETTINGS_FILE = "ca.pem", "device.pem", "client.toml"
KEY_FILE = ".device-key.pem"
"""The key until its certificate arrives: an interrupted join continues with the same key."""
TOKEN_FILE = ".join-token"
"""The hash of the token that the device has joined with, to know it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinResult:
    """The result of a join: the device's name, server, certificate dates and files."""

    name: str
    folder: Path
    expires_at: dt.datetime
    clock_off_seconds: float = 0.0
    """This machine's clock minus the server's."""
    files: tuple[Path, ...] = field(default=())
    is_new: bool = True
    """False if the device had joined with this token before: nothing was sent or written."""


def join(
    token: JoinToken,
    folder: Path,
    *,
    trust: str | None = None,
    wait: Callable[[float], object] = time.sleep,
) -> JoinResult:
    """Get a certificate for a token; write it to ``folder`` with the settings to start a client.

    ``trust`` is the key of the signer whose tasks the device takes from its server.

    The port lets few connections of one address in at a time, as of many devices behind one router:
    a request that it turns away is sent again, after a wait, for ``PATIENCE_SECONDS``.

    A token that this folder's certificate came with is not sent again: the server would have to
    refuse it, and to warn of a second device.

    Raises:
        CertificateProblem: the folder has another device's files, or cannot be written.
        ConnectionLost: the server cannot be reached; also ``EnrolmentClosed``, ``TooManyAttempts``.
        AuthorityMismatch: the server is not the one that the token names.
        ClockWrong: this machine's clock is wrong, or the server's certificate has expired.
        DeviceRefused, NameTaken: the server refused.
    """
    enrolled = _enrolled_certificate(folder, token)
    if enrolled is not None:
        return JoinResult(
            name=token.name, folder=folder, expires_at=enrolled.not_valid_after_utc, is_new=False
        )
    waited = _Patience(token.address, wait)
    ca = _read_authority(token, waited)
    key = _own_key(folder)
    request = {
        "want": "certificate",
        "name": token.name,
        "secret": token.secret.hex(),
        "request": signing_request(token.name, key).decode(),
    }
    answer, server_now = waited.answer_of(lambda: send_request(token, request, ca=ca))
    certificate = _read_certificate(answer, token.name, key, ca)
    host, _ = split_address(token.address)
    server = f"[{host}]:{answer['port']}" if ":" in host else f"{host}:{answer['port']}"
    files = _write_files(folder, ca, certificate, key, token, server=server, trust=trust)
    return JoinResult(
        name=token.name,
        folder=folder,
        expires_at=certificate.not_valid_after_utc,
        clock_off_seconds=time.time() - server_now,
        files=files,
    )


def _enrolled_certificate(folder: Path, token: JoinToken) -> x509.Certificate | None:
    """Return the certificate that this device has joined with by the token; None if it has not.

    Raises:
        CertificateProblem: the folder has another device's files, or cannot be written.
    """
    own, used = folder / OWN_FILE, folder / TOKEN_FILE
    try:
        make_private_folder(folder)
        if not own.exists():
            return None
        certificate = x509.load_pem_x509_certificate(own.read_bytes())
        certified_name = common_name_in(certificate.subject)
        if certified_name != token.name:
            raise CertificateProblem(
                f"{own} is the certificate of {certified_name}, and the token is for {token.name}",
                remedy="choose another --folder",
            )
        is_same = used.exists() and used.read_bytes() == token.secret_digest
        return certificate if is_same else None
    except OSError as error:
        raise CertificateProblem(
            f"{folder}: {error.strerror}", remedy="choose another --folder"
        ) from error
    except ValueError as error:
        raise CertificateProblem(
            f"{own} is not a certificate", remedy="choose another --folder"
        ) from error


class _Patience:
    """Sends requests again that the port turned away, until they have waited for long enough."""

    def __init__(self, address: str, wait: Callable[[float], object]) -> None:
        self._address, self._wait = address, wait
        self._left_seconds = PATIENCE_SECONDS

    def answer_of(self, send: Callable[[], Answer]) -> Answer:
        """Return the answer to a request.

        Raises:
            TooManyAttempts: the patience is at its end.
        """
        while True:
            try:
                return send()
            except TooManyAttempts:
                if self._left_seconds <= 0:
                    raise
            if self._left_seconds == PATIENCE_SECONDS:
                log.warning(
                    "%s lets few connections of one address in at a time: trying again for %g s",
                    self._address,
                    PATIENCE_SECONDS,
                )
            seconds = random.uniform(*WAIT_SECONDS)  # or all devices would come back at once
            self._left_seconds -= seconds
            self._wait(seconds)


def _read_authority(token: JoinToken, waited: _Patience) -> x509.Certificate:
    """Read the authority's certificate, over a connection that carries no secret."""
    answer, _ = waited.answer_of(lambda: send_request(token, {"want": "authority"}, ca=None))
    try:
        ca = x509.load_pem_x509_certificate(str(answer["authority"]).encode())
    except (KeyError, ValueError) as error:
        raise ProtocolMismatch(
            f"{token.address} did not send an authority's certificate"
        ) from error
    if not secrets.compare_digest(fingerprint(ca), token.fingerprint):
        raise AuthorityMismatch(
            f"{token.address} has an authority with the fingerprint "
            f"{fingerprint(ca).hex()[:16]}..., the token names {token.fingerprint.hex()[:16]}..."
        )
    return ca


def _own_key(folder: Path) -> Key:
    path = folder / KEY_FILE
    try:
        if path.exists():
            saved = load_pem_private_key(path.read_bytes(), password=None)
            if isinstance(saved, ec.EllipticCurvePrivateKey):
                return saved
        key = new_key()
        write_atomically(path, key_pem(key), mode=OWNER_ONLY)
    except (OSError, ValueError) as error:
        raise CertificateProblem(
            f"{path}: {error}", remedy="remove the file, or choose another --folder"
        ) from error
    return key


def _read_certificate(
    answer: dict[str, Any], name: str, key: Key, ca: x509.Certificate
) -> x509.Certificate:
    """Return the answer's certificate, after checking its authority, key, name and dates."""
    try:
        certificate = x509.load_pem_x509_certificate(str(answer["certificate"]).encode())
        certificate.verify_directly_issued_by(ca)
        is_own = public_key_der(certificate.public_key()) == public_key_der(key.public_key())
        is_port = type(answer["port"]) is int and 0 < answer["port"] < 65_536
    except (KeyError, ValueError, TypeError, InvalidSignature) as error:
        raise ProtocolMismatch("the answer is not a certificate of the authority") from error
    if not is_own or not is_port or common_name_in(certificate.subject) != name:
        raise ProtocolMismatch("the server's certificate is not for this device's name and key")
    now = dt.datetime.now(dt.UTC)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        raise ClockWrong(
            f"the certificate is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and this machine's clock shows "
            f"{now:%Y-%m-%d %H:%M} UTC"
        )
    return certificate


def _write_files(
    folder: Path,
    ca: x509.Certificate,
    certificate: x509.Certificate,
    key: Key,
    token: JoinToken,
    *,
    server: str,
    trust: str | None,
) -> tuple[Path, ...]:
    ca_path, own, settings = (folder / file for file in (CA_FILE, OWN_FILE, SETTINGS_FILE))
    changes: dict[str, dict[str, Any]] = {
        "client": {
            "server": server,
            "name": token.name,
            **({} if trust is None else {"trust": trust}),
        },
        "tls": {
            "ca": str(ca_path.resolve()),
            "certificate": str(own.resolve()),
            "key": str(own.resolve()),
        },
    }
    try:
        tree: dict[str, Any] = {}
        if settings.exists():
            tree = toml_of(settings.read_text(encoding="utf-8"))
        for branch, values in changes.items():
            tree[branch] = {**tree.get(branch, {}), **values}
        write_atomically(ca_path, certificate_pem(ca), mode=READABLE)
        write_atomically(own, certificate_pem(certificate) + key_pem(key), mode=OWNER_ONLY)
        write_atomically(settings, tomli_w.dumps(tree).encode(), mode=READABLE)
        write_atomically(folder / TOKEN_FILE, token.secret_digest, mode=OWNER_ONLY)
        (folder / KEY_FILE).unlink()
    except (OSError, ValueError, TypeError) as error:
        raise CertificateProblem(
            f"{folder}: {error}", remedy="free disk space or repair the folder, and join again"
        ) from error
    return ca_path, own, settings
