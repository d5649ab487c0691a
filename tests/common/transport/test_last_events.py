"""The end of a loop with gRPC calls, beside another loop of the process that goes on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import grpc
import pytest

from headwater.common.transport.last_events import last_events

NUM_LOOPS = 200  # without the wait, one in 17 leaves an event behind


@pytest.fixture
def port() -> Iterator[int]:
    """A server in a loop and thread of its own, which answers and does not end the stream."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def answer(_: object, stream: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await stream.read()
        await stream.write(b"goodbye")
        await asyncio.sleep(60)

    async def serve() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        method = grpc.stream_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    async def stop() -> None:
        await server.stop(grace=None)
        await last_events()

    server, port = asyncio.run_coroutine_threadsafe(serve(), loop).result()
    yield port
    asyncio.run_coroutine_threadsafe(stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_loop_that_ends_leaves_no_event_to_the_others(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def call_and_leave() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/s/m")()
            await call.write(b"hello")
            assert await call.read() == b"goodbye"
            call.cancel()
        await last_events()

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        for _ in range(NUM_LOOPS):
            asyncio.run(call_and_leave())
    assert not caplog.records
