"""Instructions on their way to a device: what was cancelled meanwhile is not sent."""

from __future__ import annotations

import asyncio

from headwater.common.flower.sent_model import FindDifference
from headwater.server.transport.downloads import Downloads
from headwater.server.transport.session import DeviceInstruction, DeviceSession


class SentBytes:
    """A stream that notes what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.written.append(data)


def test_an_instruction_that_is_cancelled_while_its_difference_is_computed_is_not_sent() -> None:
    """Its model may be gone by then, and the device's next instructions use the same writer."""

    async def sent() -> list[bytes]:
        downloads, stream, loop = Downloads(), SentBytes(), asyncio.get_running_loop()
        session = DeviceSession(name="pi", node_id=1, token=b"", stream=stream)

        def difference_from(_: str) -> None:
            session.instruction = None
            new = downloads.set_models([instruction(bytearray(8), None)], earlier=[])
            asyncio.run_coroutine_threadsafe(new, loop).result()

        session.instruction = cancelled = instruction(bytearray(4), difference_from)
        await downloads.set_models([cancelled], earlier=[])
        downloads.send_instruction(session, cancelled)
        await session.outbox.get_nowait()()
        return stream.written

    assert asyncio.run(sent()) == []


def instruction(model: bytearray, difference_from: FindDifference | None) -> DeviceInstruction:
    return DeviceInstruction(
        node_id=1,
        message_id="plan",
        message_type="train",
        head_json="{}",
        image=memoryview(model),
        reply_bytes=4,
        difference_from=difference_from,
    )
