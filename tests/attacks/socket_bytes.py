"""A real connection's bytes including HTTP/2: recorded, and sent over a socket."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from headwater.common.transport.wire_pb2 import Chunk, Leave
from tests.attacks.fuzz_inputs import MESSAGE_ID, honest_reply
from tests.attacks.raw import VECTOR, WAIT_SECONDS, RawDevice

ATTEMPT_SECONDS = 5.0


async def record(port: int) -> bytes:
    """Return the bytes of a device's socket: HTTP/2's preface, a hello, a reply, a chunk."""
    received, is_over = bytearray(), asyncio.Event()
    near: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near.append(writer)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

        async def back() -> None:
            while data := await far_reader.read(65536):
                writer.write(data)

        answering = asyncio.create_task(back())
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                received.extend(data)
                far_writer.write(data)
        answering.cancel()
        for end in (far_writer, writer):
            await _close(end)
        is_over.set()

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with proxy:
        async with RawDevice(proxy.sockets[0].getsockname()[1], "recorded") as device:
            await device.enter()
            await device.send(reply=honest_reply())
            await device.fault()  # nobody asked
            await device.send(chunk=Chunk(transfer_id=MESSAGE_ID, data=VECTOR))
            await device.send(leave=Leave())
            await device.end()
        near[0].close()  # gRPC may keep its end for another channel
        await is_over.wait()
    return bytes(received)


async def send_bytes(port: int, data: bytes) -> None:
    """Send bytes to the port, and read until the server is silent or closes."""
    reader, writer = await _connect(port)
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                while await reader.read(65536):
                    pass
    await _close(writer)


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and wait if the port is being reopened."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def is_served(port: int) -> bool:
    """Return whether an honest device is still admitted, now or after a short wait.

    As a device does, it tries again where nothing is said for a while: gRPC's server may lose a
    stream that comes at the same time as those that it refuses ("Failed execute_batch").
    """
    attempt_seconds = ATTEMPT_SECONDS
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError, EOFError):
                    try:
                        async with asyncio.timeout(attempt_seconds):
                            await _come_and_go(port)
                            return True
                    except TimeoutError:
                        attempt_seconds *= 2  # a busy machine may need longer
                await asyncio.sleep(0.1)
    return False


async def _come_and_go(port: int) -> None:
    async with RawDevice(port, "honest-too") as device:
        await device.enter()
        await device.send(leave=Leave())
        await device.end()
