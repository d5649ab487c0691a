"""A server that changes a model's frozen part while a device trains on it.

A session's digest shows each member the model that all others trained at. If a server could change
the frozen part after the digest was taken, it could make all other members' gradients zero.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path

import pytest
import torch

from headwater.client.app import app
from headwater.client.flower.node import Node
from headwater.client.secagg.pending import pending_in
from headwater.client.trainer.run_trainer import run_trainer
from headwater.client.training.context import Identity
from headwater.client.transport.exchange import Exchange
from headwater.common.errors import ProtocolMismatch
from headwater.common.settings.sources import load
from headwater.common.transport.limits import CHUNK_BYTES
from headwater.common.transport.wire_pb2 import Chunk, ClientFrame, Image, Instruction
from tests.masked import plan

TASK = """
import threading
from tests.adapted import Adapted

class Waiting(Adapted):
    '''Waits in its first micro-batch until the test goes on.'''

    def __init__(self):
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def loss_sum(self, model, batch):
        self.has_begun.set()
        self.may_go_on.wait(60)
        return super().loss_sum(model, batch)
"""


class Device:
    """A masking device in one process, with the frames that its server sends it."""

    def __init__(self, folder: Path) -> None:
        (folder / "waiting.py").write_text(TASK)
        spec = f"{folder}/waiting.py:Waiting"
        secure = {"aggregation": "semi-honest", "min_quota": 1}
        settings = load(None, {"task": spec, "check_task": False, "secure": secure})
        self.trainer = run_trainer(settings)
        identity = Identity(name="pi", data=None, part=0, num_parts=1)
        self.node = Node(app, self.trainer, identity, settings, folder)
        self.node.enter(1)
        self.exchange = Exchange(self.node, self.write)
        self.has_begun: threading.Event = self.trainer.task.has_begun  # type: ignore[attr-defined]
        self.may_go_on: threading.Event = self.trainer.task.may_go_on  # type: ignore[attr-defined]

    async def write(self, frame: ClientFrame) -> None:
        pass

    async def begin_frozen(self, data: bytes) -> None:
        sha256 = hashlib.sha256(data).digest()
        image = Image(image_id="f", num_bytes=len(data), sha256=sha256, is_frozen=True)
        await self.exchange.begin_image(image)

    def send_frozen(self, data: bytes) -> None:
        for offset in range(0, len(data), CHUNK_BYTES):
            part = data[offset : offset + CHUNK_BYTES]
            self.exchange.take_chunk(Chunk(transfer_id="f", offset=offset, data=part))

    async def instruct(self, kind: str, head_json: str, image_id: str) -> None:
        instruction = Instruction(
            message_id=kind, message_type=kind, head_json=head_json, image_id=image_id
        )
        await self.exchange.take_instruction(instruction, is_stopping=False)

    async def train(self) -> None:
        """Send a model, announce another frozen part, and send a plan for the model."""
        image = self.trainer.image
        model = bytes(image.buffer())
        digest = hashlib.sha256(model).hexdigest()
        await self.exchange.take_small_image(digest, model)
        await self.instruct("query.describe", "{}", digest)
        await self.begin_frozen(zeros_like_frozen(self))
        wanted = plan(frozen=image.frozen_digest, answer_seconds=0.5)
        await self.instruct("train", wanted.model_dump_json(), digest)
        await asyncio.to_thread(self.has_begun.wait, 20)


def zeros_like_frozen(device: Device) -> bytes:
    return bytes(len(device.trainer.image.frozen_U8))


async def test_no_chunk_changes_the_model_that_a_device_trains_on(tmp_path: Path) -> None:
    device = Device(tmp_path)
    frozen_U8 = device.trainer.image.frozen_U8.clone()
    async with asyncio.timeout(60):
        await device.train()
        try:
            with pytest.raises(ProtocolMismatch):
                device.send_frozen(zeros_like_frozen(device))
        finally:
            device.may_go_on.set()
            await device.exchange.end()
    assert torch.equal(device.trainer.image.frozen_U8, frozen_U8)
    assert pending_in(device.trainer.accumulator).get(1, "pi").update.weight
