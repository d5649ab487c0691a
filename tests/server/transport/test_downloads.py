"""Instructions on their way to a device: what was cancelled meanwhile is not sent."""

from __future__ import annotations

import asyncio

import pytest

from headwater.common.flower.sent_model import FindDifference
from headwater.common.transport.limits import CHUNK_BYTES, SMALL_IMAGE_BYTES
from headwater.server.transport import downloads as module
from headwater.server.transport.downloads import MAX_CHUNKS_IN_FLIGHT, Downloads
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


class ReadsNothing(SentBytes):
    """A stream whose device reads the announcement, and no chunk."""

    async def write(self, data: bytes) -> None:
        await super().write(data)
        if len(data) > SMALL_IMAGE_BYTES:
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("more", [0, 1])
def test_devices_that_read_nothing_hold_no_other_device_up(
    monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """As many as there is memory for; with one more the others wait, and memory is bounded."""
    monkeypatch.setattr(module, "SLOW_AFTER_SECONDS", 0.001)
    monkeypatch.setattr(module, "MAX_SLOW_CHUNKS", 40)

    async def is_sent() -> bool:
        downloads, model = Downloads(), bytearray(3 * CHUNK_BYTES)
        plan = instruction(model, None)
        await downloads.set_models([plan], earlier=[])
        slow = [ReadsNothing() for _ in range(40 + more * MAX_CHUNKS_IN_FLIGHT)]
        fast = SentBytes()
        tasks = []
        for number, stream in enumerate([*slow, fast]):
            session = DeviceSession(name=str(number), node_id=number, token=b"", stream=stream)
            session.instruction = plan
            downloads.send_instruction(session, plan)
            tasks.append(asyncio.create_task(session.outbox.get_nowait()()))
            if stream is not fast:
                await asyncio.sleep(0)
        done, left = await asyncio.wait({tasks[-1]}, timeout=1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(left) + len(done) == 1
        return sum(map(len, fast.written)) > len(model)

    assert asyncio.run(is_sent()) is not bool(more)


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
