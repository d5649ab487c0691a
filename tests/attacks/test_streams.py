"""Limits of streams and pings per connection, tested with raw HTTP/2 frames.

A gRPC client respects the server's limits, so the frames are written by hand (RFC 9113; header
fields by RFC 7541, as literals).
"""

from __future__ import annotations

import asyncio
import struct
import time

import pytest

from headwater.common.transport.limits import STREAM_METHOD
from headwater.server.transport.listener import MAX_STREAMS
from tests.attacks.raw import WAIT_SECONDS, serving
from tests.attacks.socket_bytes import is_served

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING = 1, 3, 4, 6
ACKNOWLEDGED, END_HEADERS = 1, 4
MAX_CONCURRENT_STREAMS = 3
# :method POST and :scheme http are fields 3 and 6 of the static table.
POST, HTTP = b"\x83", b"\x86"


def frame(kind: int, *, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def request(stream: int) -> bytes:
    """Open a stream as a device does, and leave it open."""
    fields = {
        ":path": STREAM_METHOD,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = POST + HTTP + b"".join(literal(name, value) for name, value in fields.items())
    return frame(HEADERS, flags=END_HEADERS, stream=stream, payload=block)


async def next_of(reader: asyncio.StreamReader, kind: int) -> tuple[int, bytes]:
    """Skip frames until one of this kind comes; return its stream and payload."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            head = await reader.readexactly(9)
            length = int.from_bytes(head[:3], "big")
            payload = await reader.readexactly(length)
            if head[3] == kind:
                return int.from_bytes(head[5:], "big"), payload


async def test_a_connection_is_limited_to_its_announced_number_of_streams() -> None:
    async with serving() as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        try:
            writer.write(PREFACE + frame(SETTINGS))
            _, payload = await next_of(reader, SETTINGS)
            allowed = dict(struct.iter_unpack(">HI", payload))
            assert allowed[MAX_CONCURRENT_STREAMS] == MAX_STREAMS

            # A client's streams have odd numbers.
            streams = [2 * n + 1 for n in range(MAX_STREAMS + 1)]
            writer.write(frame(SETTINGS, flags=ACKNOWLEDGED))
            writer.write(b"".join(request(stream) for stream in streams))

            refused, _ = await next_of(reader, RST_STREAM)
            assert refused == streams[-1]
            assert await is_served(run.port)
        finally:
            writer.close()


NUM_PINGS = 4000
PINGS = frame(PING, payload=bytes(8)) * NUM_PINGS


async def test_pings_that_come_at_once_are_answered_and_end_no_connection() -> None:
    """gRPC would strike each ping, and copy the earlier strikes for it: see ``grpc_options``."""
    async with serving() as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        writer.write(PREFACE + frame(SETTINGS) + frame(SETTINGS, flags=ACKNOWLEDGED) + PINGS)
        for _ in range(NUM_PINGS):
            await next_of(reader, PING)
        writer.close()


@pytest.mark.slow
async def test_pings_whose_answers_nobody_reads_keep_no_server_busy() -> None:
    """Four such connections took rounds from 22 to 2 a second, until their keepalive ended."""

    async def flood(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(PREFACE + frame(SETTINGS) + frame(SETTINGS, flags=ACKNOWLEDGED))
        try:
            while True:
                writer.write(PINGS)
                await writer.drain()
        finally:
            writer.transport.abort()

    async with serving() as run:
        floods = [asyncio.create_task(flood(run.port)) for _ in range(4)]
        await asyncio.sleep(5)  # until the buffers are full
        before = time.process_time()
        await asyncio.sleep(2)
        assert time.process_time() - before < 1, "the server still reads pings"
        assert await is_served(run.port)
        for one in floods:
            one.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
