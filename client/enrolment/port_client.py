"""Sends one request to the server's enrolment port, and names each way in which it can fail."""

from __future__ import annotations

import datetime as dt
import json
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
from headwater.common.parsed_text import json_of
from headwater.common.transport.certificates import certificate_pem
from headwater.common.transport.join_token import JoinToken
from headwater.common.transport.proxy import ProxyRefused, connect, proxy_remedy
from headwater.common.transport.server_names import OTHER_NAME, name_remedy, names_text
from headwater.common.transport.tls import split_address

VERSION = 1
TIMEOUT_SECONDS = 20.0
MAX_ANSWER_BYTES = 32_768
# X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
NOT_YET, EXPIRED = 9, 10


def send_request(
    token: JoinToken, request: dict[str, Any], *, ca: x509.Certificate | None
) -> tuple[dict[str, Any], float]:
    """Send one line of JSON; return the answer and the server's Unix time.

    Without ``ca`` the server is not authenticated: anybody may read the request and answer it.

    Raises:
        ConnectionLost: there is no answer; also ``EnrolmentClosed`` and ``TooManyAttempts``.
        AuthorityMismatch: the server's certificate is not of this authority.
        ClockWrong, CertificateProblem: the server's certificate is not valid now, or is for
            another host.
        ProtocolMismatch: the other side is not an enrolment port.
        HeadwaterError: the server refused.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=certificate_pem(ca).decode())
    host, port = split_address(token.address)
    is_connected = False
    try:
        with connect(host, port, timeout_seconds=TIMEOUT_SECONDS) as plain:
            is_connected = True
            with context.wrap_socket(plain, server_hostname=host) as secure:
                secure.sendall(json.dumps({"version": VERSION, **request}).encode() + b"\n")
                line = _read_line(secure)
    except ssl.SSLCertVerificationError as error:
        raise _certificate_error(token, error, context) from error
    except (OSError, ValueError) as error:
        raise _connection_error(token, error, is_connected=is_connected) from error
    return _parse(line, token)


def _read_line(secure: ssl.SSLSocket) -> bytes:
    end = time.monotonic() + TIMEOUT_SECONDS
    line = b""
    while not line.endswith(b"\n"):
        piece = secure.recv(4096)
        line += piece
        if not piece or len(line) > MAX_ANSWER_BYTES or time.monotonic() > end:
            raise ConnectionResetError("the connection ended before an answer")
    return line


def _parse(line: bytes, token: JoinToken) -> tuple[dict[str, Any], float]:
    try:
        answer = json_of(line)
        now = float(answer["now"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolMismatch(f"{token.address} is not a Headwater enrolment port") from error
    if "code" in answer:
        raise error_of(str(answer["code"])[:100], str(answer.get("text"))[:1000])
    return answer, now


def _certificate_error(
    token: JoinToken, error: ssl.SSLCertVerificationError, context: ssl.SSLContext
) -> HeadwaterError:
    """Return why the server's certificate is not valid."""
    host, port = split_address(token.address)
    if error.verify_code in (NOT_YET, EXPIRED):
        state = "is not valid yet" if error.verify_code == NOT_YET else "has expired"
        return ClockWrong(
            f"by this machine's clock ({dt.datetime.now():%Y-%m-%d %H:%M}) the certificate of "
            f"{token.address} {state}",
            remedy="set this machine's clock; if it is right, the operator should run "
            "`headwater-server init` and restart the server",
        )
    if error.verify_code in OTHER_NAME:
        return CertificateProblem(names_text(host, port, context), remedy=name_remedy(host))
    return AuthorityMismatch(
        f"{token.address} has no certificate of the token's authority: {error.verify_message}"
    )


def _connection_error(token: JoinToken, error: Exception, *, is_connected: bool) -> HeadwaterError:
    if isinstance(error, ConnectionRefusedError):
        if token.expires_at < time.time():
            return JoinTokenExpired(
                f"no server listens at {token.address}, and the token expired at "
                f"{token.expiry:%Y-%m-%d %H:%M} UTC by this machine's clock"
            )
        return EnrolmentClosed(f"no server listens at {token.address}")
    if isinstance(error, ProxyRefused):
        return ConnectionLost(str(error), remedy=proxy_remedy(split_address(token.address)[0]))
    if is_connected and isinstance(
        error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError
    ):
        return TooManyAttempts(f"{token.address} closed the connection without an answer")
    if isinstance(error, ssl.SSLError):
        return ProtocolMismatch(
            f"{token.address} does not speak TLS 1.3 as an enrolment port does: {error.reason}",
            remedy="check the address in the token: it must be that of the enrolment port",
        )
    reason = getattr(error, "strerror", None) or str(error) or "no answer"
    return ConnectionLost(
        f"{token.address} cannot be reached: {reason}",
        remedy="check the network, the address and port in the token, and the server's firewall",
    )
