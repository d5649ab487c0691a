"""The exchange where a plan follows on one whose update is not through yet."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import ProtocolMismatch
from headwater.common.overlap.terms import OverlapTerms
from headwater.common.transport.wire_pb2 import Chunk, Fault, Image, Instruction, Receipt
from tests.client.transport.test_exchange import Device, run
from tests.plans import plan_of


async def ask(device: Device, number: int, *, after: int | None, image_id: str = "m") -> None:
    """Send a plan of a round, whose id is its number."""
    plan = plan_of(
        round=number, run_seed=0, model_version=number, quota=4, micro_batch_size=2
    ).asking(OverlapTerms(after=after))
    instruction = Instruction(
        message_id=str(number),
        message_type="train",
        head_json=plan.model_dump_json(exclude_none=True),
        image_id=image_id,
    )
    await device.exchange.take_instruction(instruction, is_stopping=False)


async def begin(device: Device) -> None:
    """Send the model and the first plan, and wait until its update is announced."""
    await device.exchange.begin_image(device.image)
    device.receive(device.model)
    await ask(device, 1, after=None)
    await device.stream.first("reply")


def replies(device: Device) -> list[dict[str, Any]]:
    found = [frame.reply for frame in device.stream.frames if frame.HasField("reply")]
    return [json.loads(one.head_json) | {"id": one.message_id} for one in found]


async def acknowledge(device: Device, number: int) -> None:
    """Let an update be sent, take it, and wait until the device has noted that."""
    for is_done in (False, True):
        offset = 4 * 32_769 if is_done else 0
        device.exchange.take_receipt(
            Receipt(message_id=str(number), next_offset=offset, is_done=is_done)
        )
    while device.exchange._jobs.find(str(number)) is not None:
        await asyncio.sleep(0.01)


def test_a_following_plan_is_trained_before_and_sent_after_the_update_of_the_first(
    tmp_path: Path,
) -> None:
    other = bytes(4 * 32_769)

    async def story(device: Device) -> None:
        await begin(device)
        sha256 = hashlib.sha256(other).digest()
        image = Image(image_id="n", num_bytes=len(other), sha256=sha256)
        await device.exchange.begin_image(image)
        for offset in range(0, len(other), 1 << 16):
            part = other[offset : offset + (1 << 16)]
            device.exchange.take_chunk(Chunk(transfer_id="n", offset=offset, data=part))
        await ask(device, 2, after=1, image_id="n")
        while device.exchange._jobs.running is not None:
            await asyncio.sleep(0.01)
        assert device.exchange.image_id == "n"
        assert [one["id"] for one in replies(device)] == ["1"]
        await acknowledge(device, 1)
        while len(replies(device)) < 2:
            await asyncio.sleep(0.01)
        assert [one["round"] for one in replies(device)] == [1, 2]
        await acknowledge(device, 2)
        assert device.exchange.is_idle

    device = Device(tmp_path)
    run(device, story)
    chunks = [f.chunk for f in device.stream.frames if f.HasField("chunk")]
    sent = {name: b"".join(one.data for one in chunks if one.transfer_id == name) for name in "12"}
    for frame in device.stream.frames:
        if frame.HasField("reply"):
            found = hashlib.sha256(sent[frame.reply.message_id]).digest()
            assert found == frame.reply.sha256


def test_the_refusal_of_the_first_update_ends_the_plan_that_follows_on_it(tmp_path: Path) -> None:
    async def story(device: Device) -> None:
        await begin(device)
        await ask(device, 2, after=1)
        device.exchange.take_fault(Fault(message_id="1", code="CorruptUpdate", text="damaged"))
        assert device.exchange.is_idle
        await ask(device, 3, after=None)
        while len(replies(device)) < 2:
            await asyncio.sleep(0.01)
        await device.exchange.end()

    device = Device(tmp_path)
    run(device, story)
    assert [one["id"] for one in replies(device)] == ["1", "3"]


def test_a_third_plan_before_the_first_was_answered_ends_the_stream(tmp_path: Path) -> None:
    async def story(device: Device) -> None:
        await begin(device)
        await ask(device, 2, after=1)
        try:
            await ask(device, 3, after=2)
        finally:
            await device.exchange.end()

    with pytest.raises(ProtocolMismatch, match="third plan"):
        run(Device(tmp_path), story)


@pytest.mark.parametrize("has_next", [True, False])
def test_an_update_whose_last_receipt_is_lost_does_not_hold_up_the_next_one(
    has_next: bool, tmp_path: Path
) -> None:
    """The stream breaks after the server has all of it; on the next one it asks for the second."""

    async def story(device: Device) -> None:
        await begin(device)
        if has_next:
            await ask(device, 2, after=1)
        device.exchange.take_receipt(Receipt(message_id="1", next_offset=0))
        await device.stream.first("chunk")
        device.exchange.disconnected()
        device.exchange.connected()
        await ask(device, 2, after=1)
        while len(replies(device)) < 2:
            await asyncio.sleep(0.01)
        await device.exchange.end()

    device = Device(tmp_path)
    run(device, story)
    assert [one["round"] for one in replies(device)] == [1, 2]
