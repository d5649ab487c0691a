"""A model as a difference: taken by the device that holds its base, or refused, and sent whole."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
import torch

from headwater.client.app import app
from headwater.client.flower.node import Node
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.transport.exchange import Exchange
from headwater.client.transport.incoming_image import ModelBroken
from headwater.common.compression.model_difference import move_towards
from headwater.common.errors import HeadwaterError, ProtocolMismatch
from headwater.common.flower.sent_model import ModelDifference
from headwater.common.settings.sources import load
from headwater.common.transport.wire_pb2 import Chunk, ClientFrame, Image, Instruction, ServerFrame
from headwater.server.transport.downloads import Downloads
from headwater.server.transport.session import DeviceInstruction, DeviceSession

TASK = "tests/tasks.py:TwoLayers"


async def no_stream(frame: ClientFrame) -> None:
    raise AssertionError("nothing is to be written")


class Device:
    """A device that holds a model, and the difference to the server's next one."""

    def __init__(self, folder: Path) -> None:
        trainer = Trainer(TASK, batch_norm=None, check_task=False)
        identity = Identity(name="pi", data=None, part=0, num_parts=1)
        settings = load(None, {"task": TASK, "check_task": False})
        self.image = trainer.image
        self.exchange = Exchange(Node(app, trainer, identity, settings, folder), no_stream)
        assert self.exchange.image_id == _id(self.image.buffer())  # as the task built it
        self.next_P = self.image.values_P.clone()
        data = move_towards(self.next_P, self.next_P + torch.randn(len(self.next_P)), "bfloat16")
        assert data is not None
        self.difference = ModelDifference(
            base_id=self.exchange.image_id,
            image_id=_id(self.next_P.numpy().data.cast("B")),
            method="bfloat16",
            data=data,
        )

    def receive(self, **changes: str | int | bytes) -> None:
        """Receive the difference as the server announces it, with some changes."""
        announced = {
            "image_id": self.difference.image_id,
            "num_bytes": len(self.difference.data),
            "sha256": bytes.fromhex(self.difference.image_id),
            "difference": self.difference.method,
            "base_id": self.difference.base_id,
        }
        image = Image(**(announced | changes))  # type: ignore[arg-type]
        asyncio.run(self.exchange.begin_image(image))
        data = bytes(self.difference.data)
        self.exchange.take_chunk(Chunk(transfer_id=image.image_id, offset=0, data=data))
        self.exchange._finish_image(image.image_id, is_frozen=False)


def _id(memory: memoryview) -> str:
    return hashlib.sha256(memory).hexdigest()


def test_a_device_that_holds_the_base_gets_the_servers_model(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.receive()
    assert torch.equal(device.image.values_P, device.next_P)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"base_id": "0" * 64}, ModelBroken),
        ({"sha256": bytes(32)}, ModelBroken),
        ({"num_bytes": 1}, ProtocolMismatch),
        ({"difference": "float8"}, ProtocolMismatch),
    ],
)
def test_a_difference_that_leads_to_no_announced_model_leaves_the_device_without_one(
    changes: dict[str, str | int | bytes], error: type[HeadwaterError], tmp_path: Path
) -> None:
    """The device tells the server so when it connects again, and is sent the model whole."""
    device = Device(tmp_path)
    with pytest.raises(error):
        device.receive(**changes)
    assert device.exchange.image_id == ""


class Written:
    """A stream that keeps the frames."""

    def __init__(self) -> None:
        self.frames: list[ServerFrame] = []

    async def write(self, data: bytes) -> None:
        self.frames.append(ServerFrame.FromString(data))


@pytest.mark.parametrize(
    ("held", "expected"), [("base", "bfloat16"), ("another", None), ("", None)]
)
async def test_the_server_sends_a_difference_to_a_device_that_holds_its_base(
    held: str, expected: str | None, tmp_path: Path
) -> None:
    device = Device(tmp_path)
    difference = device.difference
    stream = Written()
    instruction = DeviceInstruction(
        node_id=1,
        message_id="1",
        message_type="train",
        head_json="{}",
        image=device.next_P.numpy().data.cast("B"),
        difference_from=lambda held_id: difference if held_id == difference.base_id else None,
        reply_bytes=0,
    )
    session = DeviceSession(
        name="pi",
        node_id=1,
        token=b"",
        stream=stream,
        instruction=instruction,
        image_id=difference.base_id if held == "base" else held,
    )
    downloads = Downloads()
    await downloads.set_models([instruction], [])
    downloads.send_instruction(session, instruction)
    await session.outbox.get_nowait()()
    images = [frame.image for frame in stream.frames if frame.HasField("image")]
    assert [image.difference for image in images] == ([] if expected is None else [expected])
    assert session.image_id == difference.image_id
    last: Instruction = stream.frames[-1].instruction
    assert last.image_id == difference.image_id
    # A small model travels whole in the instruction's own frame.
    assert bool(stream.frames[-1].small_image) == (expected is None)
