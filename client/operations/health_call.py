"""Asks a server for its health over an open TLS connection, in the few frames of HTTP/2 it takes.

The server counts a connection that makes no call among those of strangers. gRPC's own client would
not say which part of a handshake failed, and its threads would outlast the call.
"""

from __future__ import annotations

import ssl

DATA, HEADERS, SETTINGS = 0, 1, 4  # RFC 9113, section 6
END_STREAM, END_HEADERS = 1, 4
STREAM = 1
HEAD_BYTES = 9
MAX_FRAMES = 16
"""A server answers after its settings and their acknowledgement."""
FIELDS = {
    ":method": "POST",
    ":scheme": "https",
    ":path": "/grpc.health.v1.Health/Check",
    ":authority": "headwater",
    "content-type": "application/grpc",
    "te": "trailers",
}
NO_MESSAGE = bytes(5)
"""gRPC's prefix of a message without bytes: the health of the whole server."""


def is_answered(secure: ssl.SSLSocket) -> bool:
    """Call the server, and return whether it answers; False if it closes the connection first.

    Raises:
        OSError: the connection broke, or the server was silent for the socket's timeout.
    """
    secure.sendall(_request())
    with secure.makefile("rb") as frames:
        for _ in range(MAX_FRAMES):
            head = frames.read(HEAD_BYTES)
            if len(head) < HEAD_BYTES:
                return False
            if head[3] == HEADERS:
                return True
            frames.read(int.from_bytes(head[:3]))
    return False


def _request() -> bytes:
    # RFC 7541, section 6.2.2: a literal field that no table keeps.
    fields = b"".join(b"\0" + _literal(key) + _literal(value) for key, value in FIELDS.items())
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(SETTINGS, 0, 0, b"")
        + _frame(HEADERS, END_HEADERS, STREAM, fields)
        + _frame(DATA, END_STREAM, STREAM, NO_MESSAGE)
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def _literal(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()
