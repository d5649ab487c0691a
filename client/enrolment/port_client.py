"""One question to the enrolment port and its answer, and a name for all that may go wrong."""

from __future__ import annotations

import datetime as dt
import json
import socket
import ssl
import time
from typing import Any

from cryptography import x509

from headwater.common.errors import (
    AuthorityMismatch,
    CertificateProblem,
    ClockWrong,
    ConnectionLost,
    EnrolmentClosed,
    HeadwaterError,
    JoinTokenExpired,
    ProtocolMismatch,
    TooManyAttempts,
    error_of,
)
from headwater.common.transport.certificates import certificate_pem
from headwater.common.transport.join_token import JoinToken
from headwater.common.transport.tls import split_address

VERSION = 1
TALK_SECONDS = 20.0
MAX_ANSWER_BYTES = 32_768
# X509_V_ERR_CERT_NOT_YET_VALID, _CERT_HAS_EXPIRED, _HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH
NOT_YET, EXPIRED, WRONG_HOST, WRONG_ADDRESS = 9, 10, 62, 64


def send_request(
    token: JoinToken, told: dict[str, Any], *, ca: x509.Certificate | None
) -> tuple[dict[str, Any], float]:
    """Send one line and return the answer, and the server's time with it.

    Without ``ca`` anybody may answer, and read what is sent.

    Raises:
        ConnectionLost: nobody answers; ``EnrolmentClosed``, ``TooManyAttempts``.
        AuthorityMismatch: the answer is not the authority's.
        ClockWrong, CertificateProblem: the server's certificate is out of date, or another host's.
        ProtocolMismatch: whatever answers is no enrolment port.
        HeadwaterError: the server's own refusal.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=certificate_pem(ca).decode())
    host, port = split_address(token.address)
    is_through = False
    try:
        with socket.create_connection((host, port), TALK_SECONDS) as plain:
            is_through = True
            with context.wrap_socket(plain, server_hostname=host) as secure:
                secure.sendall(json.dumps({"version": VERSION, **told}).encode() + b"\n")
                line = _line(secure)
    except ssl.SSLCertVerificationError as error:
        raise _distrust(token, error) from error
    except (OSError, ValueError) as error:
        raise _unreached(token, error, is_through=is_through) from error
    return _read(line, token)


def _line(secure: ssl.SSLSocket) -> bytes:
    end = time.monotonic() + TALK_SECONDS
    line = b""
    while not line.endswith(b"\n"):
        piece = secure.recv(4096)
        line += piece
        if not piece or len(line) > MAX_ANSWER_BYTES or time.monotonic() > end:
            raise ConnectionResetError("the connection ended before an answer")
    return line


def _read(line: bytes, token: JoinToken) -> tuple[dict[str, Any], float]:
    try:
        answer = json.loads(line)
        now = float(answer["now"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolMismatch(f"{token.address} is no enrolment port of ours") from error
    if "code" in answer:
        raise error_of(str(answer["code"])[:100], str(answer.get("text"))[:1000])
    return answer, now


def _distrust(token: JoinToken, error: ssl.SSLCertVerificationError) -> HeadwaterError:
    """Name why the server's certificate is not good; only the authority's holder has a good one."""
    host, _ = split_address(token.address)
    if error.verify_code in (NOT_YET, EXPIRED):
        what = "not valid yet" if error.verify_code == NOT_YET else "past its end"
        return ClockWrong(
            f"this machine's clock says {dt.datetime.now():%Y-%m-%d %H:%M}, and by that the "
            f"certificate of {token.address} is {what}",
            remedy="set this machine's clock; if it is right, the operator should run "
            "`headwater-server init` and start the server anew",
        )
    if error.verify_code in (WRONG_HOST, WRONG_ADDRESS):
        return CertificateProblem(
            f"the server's certificate is not made out for {host}",
            remedy=f"the operator should run `headwater-server init --host {host}` and start the "
            "server anew",
        )
    return AuthorityMismatch(
        f"{token.address} has no certificate of the authority in the token: {error.verify_message}"
    )


def _unreached(token: JoinToken, error: Exception, *, is_through: bool) -> HeadwaterError:
    if isinstance(error, ConnectionRefusedError):
        if token.expires_at < time.time():
            return JoinTokenExpired(
                f"nobody listens at {token.address}, and the token expired "
                f"{token.expiry:%Y-%m-%d %H:%M} UTC by this machine's clock"
            )
        return EnrolmentClosed(f"nobody listens at {token.address}")
    if is_through and isinstance(error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return TooManyAttempts(f"{token.address} closed the connection without a word")
    if isinstance(error, ssl.SSLError):
        return ProtocolMismatch(
            f"{token.address} does not speak TLS 1.3 as an enrolment port does: {error.reason}",
            remedy="check the address in the token: it must be that of the enrolment port",
        )
    why = getattr(error, "strerror", None) or str(error) or "no answer"
    return ConnectionLost(
        f"{token.address} is not to be reached: {why}",
        remedy="check the network, the address and port in the token, and the server's firewall",
    )
