"""The exchange on a fake stream that keeps what is written, and can be broken."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.client.app import app
from headwater.client.device.bandwidth import Bandwidth
from headwater.client.flower.node import Node
from headwater.client.node_features import NodeAnswer
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.transport.exchange import Exchange
from headwater.client.transport.incoming_image import ModelBroken
from headwater.client.transport.upload import StreamBroken
from headwater.common.errors import ModelMismatch, ProtocolMismatch
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.settings.sources import load
from headwater.common.transport.limits import CHUNK_BYTES
from headwater.common.transport.wire_pb2 import Chunk, ClientFrame, Image, Instruction, Receipt
from tests.plans import plan_of

TASK = """
from torch import nn
from tests.tasks import TwoLayers

class Large(TwoLayers):
    '''32,769 parameters: 128 KiB.'''

    def new_model(self):
        return nn.Linear(32_768, 1)

    def loss_sum(self, model, batch):
        return model(batch[0].repeat(1, 10923)[:, :32_768]).sum(), len(batch[0])
"""
NAME = "large_model.py"


class Stream:
    """Keeps what is written, and can be broken."""

    def __init__(self) -> None:
        self.frames: list[ClientFrame] = []
        self.is_broken = False

    async def write(self, frame: ClientFrame) -> None:
        if self.is_broken:
            raise StreamBroken("broken by the test")
        self.frames.append(frame)

    async def first(self, kind: str) -> ClientFrame:
        for _ in range(6000):
            for frame in self.frames:
                if frame.WhichOneof("kind") == kind:
                    return frame
            await asyncio.sleep(0.01)
        raise AssertionError(f"no {kind} was written")


class Device:
    """A device that was welcomed, its work, and the model that its server has."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        (folder / NAME).write_text(TASK)
        spec = f"{folder}/{NAME}:Large"
        settings = load(None, {"task": spec, "check_task": False, **changes})
        trainer = Trainer(spec, batch_norm=None, check_task=False)
        identity = Identity(name="pi", data=None, part=0, num_parts=1)
        self.node = Node(app, trainer, identity, settings, folder)
        self.node.enter(1)
        self.stream = Stream()
        self.exchange = Exchange(self.node, self.stream.write)
        self.model = bytes(trainer.image.buffer())
        self.image = Image(
            image_id="m", num_bytes=len(self.model), sha256=hashlib.sha256(self.model).digest()
        )

    def receive(self, model: bytes) -> None:
        for offset in range(0, len(model), CHUNK_BYTES):
            data = model[offset : offset + CHUNK_BYTES]
            self.exchange.take_chunk(Chunk(transfer_id="m", offset=offset, data=data))

    async def ask(self, message_id: str = "1", **terms: Any) -> None:
        plan = plan_of(round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=2, **terms)
        instruction = Instruction(
            message_id=message_id,
            message_type="train",
            head_json=plan.model_dump_json(exclude_none=True),
            image_id="m",
        )
        await self.exchange.take_instruction(instruction, is_stopping=False)

    async def finish(self) -> None:
        """Grant the turn, take all and acknowledge it."""
        reply = (await self.stream.first("reply")).reply
        self.exchange.take_receipt(Receipt(message_id="1", next_offset=0))
        await self.stream.first("chunk")
        self.exchange.take_receipt(
            Receipt(message_id="1", next_offset=reply.num_bytes, is_done=True)
        )
        await self.exchange.finish(60)


def run(device: Device, story: Callable[[Device], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await story(device)

    asyncio.run(limited())


def test_transfers_of_model_and_update_measure_the_link(tmp_path: Path) -> None:
    async def story(device: Device) -> None:
        await device.exchange.begin_image(device.image)
        device.receive(device.model)
        await device.ask()
        assert device.node.link.download_bytes_per_second is not None
        assert device.node.link.upload_bytes_per_second is None
        await device.finish()

    device = Device(tmp_path)
    run(device, story)
    up, down = device.node.link.upload_bytes_per_second, device.node.link.download_bytes_per_second
    assert up is not None
    assert down is not None
    assert min(up, down) > 0


def test_a_broken_upload_is_not_timed_and_is_sent_again_on_the_next_stream(
    tmp_path: Path,
) -> None:
    async def story(device: Device) -> None:
        await device.exchange.begin_image(device.image)
        device.receive(device.model)
        await device.ask()
        await device.stream.first("reply")
        device.stream.is_broken = True
        device.exchange.take_receipt(Receipt(message_id="1", next_offset=0))
        await device.exchange.finish(60)
        device.exchange.disconnected()
        assert device.node.link.upload_bytes_per_second is None
        device.stream.is_broken = False
        device.stream.frames.clear()
        device.exchange.connected()
        await device.ask()
        await device.finish()

    device = Device(tmp_path)
    run(device, story)
    sent = [f.chunk for f in device.stream.frames if f.WhichOneof("kind") == "chunk"]
    assert sum(len(chunk.data) for chunk in sent) == 4 * 32_769
    assert device.node.link.upload_bytes_per_second is not None


@pytest.mark.parametrize("is_private", [True, False])
def test_an_update_that_takes_no_window_without_a_link_is_sent_as_it_is(
    tmp_path: Path, is_private: bool
) -> None:
    """No window is added to a private update, or where the file of the sum is damaged."""
    device = Device(tmp_path, asynchronous={"offline_windows": 5})
    privacy = PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0) if is_private else None
    terms: dict[str, Any] = {"max_windows": 5, "privacy": privacy}
    no_link = device.node.no_link

    def with_damage(plan_json: str, answer: NodeAnswer) -> Iterator[NodeAnswer]:
        further = no_link(plan_json, answer)
        assert further is not None
        yield next(further)
        files = [*tmp_path.rglob("*.offline")]
        assert len(files) == (0 if is_private else 1)
        for file in files:
            file.write_bytes(b"damaged")
        yield from further

    device.node.no_link = with_damage  # type: ignore[method-assign]

    async def story(device: Device) -> None:
        await device.exchange.begin_image(device.image)
        device.receive(device.model)
        await device.ask(**terms)
        device.exchange.disconnected()
        await device.exchange.finish(60)
        assert not device.stream.frames
        device.exchange.connected()
        await device.ask(**terms)
        await device.finish()

    run(device, story)
    assert {frame.WhichOneof("kind") for frame in device.stream.frames} == {"reply", "chunk"}
    [report] = [json.loads(f.reply.head_json) for f in device.stream.frames if f.HasField("reply")]
    assert report.get("num_windows", 1) == 1


@pytest.mark.parametrize("has_receipt", [False, True])
def test_an_answer_that_no_server_has_asked_for_takes_windows_without_a_link(
    tmp_path: Path, has_receipt: bool
) -> None:
    """The link went without a word, and the head of the reply into a dead socket."""
    device = Device(tmp_path, asynchronous={"offline_windows": 3})

    async def story(device: Device) -> None:
        await device.exchange.begin_image(device.image)
        device.receive(device.model)
        await device.ask(max_windows=3)
        await device.stream.first("reply")
        if has_receipt:
            device.exchange.take_receipt(Receipt(message_id="1", next_offset=0))
            await device.stream.first("chunk")
        device.exchange.disconnected()
        await device.exchange.finish(60)
        device.stream.frames.clear()
        device.exchange.connected()
        await device.ask(max_windows=3)
        await device.finish()

    run(device, story)
    [report] = [json.loads(f.reply.head_json) for f in device.stream.frames if f.HasField("reply")]
    assert report.get("num_windows", 1) == (1 if has_receipt else 3)
    assert report["num_examples"] == 4 * report.get("num_windows", 1)


async def a_chunk_of_nothing(device: Device) -> None:
    device.receive(device.model)


async def a_chunk_out_of_order(device: Device) -> None:
    await device.exchange.begin_image(device.image)
    device.exchange.take_chunk(Chunk(transfer_id="m", offset=1, data=b"x"))


async def more_than_was_announced(device: Device) -> None:
    await device.exchange.begin_image(device.image)
    device.receive(device.model)
    device.exchange.take_chunk(Chunk(transfer_id="m", offset=len(device.model), data=b"x"))


async def a_plan_without_its_model(device: Device) -> None:
    await device.ask()


@pytest.mark.parametrize(
    "story",
    [a_chunk_of_nothing, a_chunk_out_of_order, more_than_was_announced, a_plan_without_its_model],
)
def test_a_server_that_breaks_the_protocol_raises_protocol_mismatch(
    story: Callable[[Device], Awaitable[None]], tmp_path: Path
) -> None:
    with pytest.raises(ProtocolMismatch):
        run(Device(tmp_path), story)


def test_a_corrupt_model_is_not_trained_on(tmp_path: Path) -> None:
    async def story(device: Device) -> None:
        await device.exchange.begin_image(device.image)
        device.receive(b"\x01" + device.model[1:])
        await device.ask()

    device = Device(tmp_path)
    with pytest.raises(ModelBroken):
        run(device, story)
    assert device.node.link == Bandwidth()


def test_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    async def story(device: Device) -> None:
        await device.exchange.begin_image(Image(image_id="m", num_bytes=1, sha256=b""))

    with pytest.raises(ModelMismatch):
        run(Device(tmp_path), story)


def test_a_device_without_a_usable_example_logs_it_once_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(tmp_path)
    nan = struct.pack("<f", math.nan)
    device.model = nan * (len(device.model) // len(nan))  # no loss is finite at this model
    device.image.sha256 = hashlib.sha256(device.model).digest()

    async def story(device: Device) -> None:
        await device.exchange.begin_image(device.image)
        device.receive(device.model)
        for message_id in ("1", "2"):
            await device.ask(message_id)
            fault = (await device.stream.first("fault")).fault
            assert (fault.message_id, fault.code) == (message_id, "EmptyUpdate")
            device.stream.frames.clear()

    with caplog.at_level(logging.WARNING):
        run(device, story)
    [line] = [text for text in caplog.messages if "EmptyUpdate" in text]
    assert "look at the device's data" in line
