"""A light device for the benchmarks: it speaks the real wire and trains nothing.

Hundreds of them fit into one process, each with a TCP connection of its own. It takes every plan
with its model, waits for as long as it is told to instead of training, and sends the same vector
each time. It notes what it got and when, so that nothing can be lost unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from dataclasses import dataclass
from typing import Any

from headwater.common.messages import DeviceReport, Plan, Step, UpdateReport
from headwater.common.transport.limits import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    STREAM_METHOD,
)
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import (
    Chunk,
    ClientFrame,
    Hello,
    Image,
    Instruction,
    Leave,
    Receipt,
    Reply,
    ServerFrame,
)

RETRY_SECONDS = 1.0
NUM_EXAMPLES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A plan that came, with all of its model, and when, by ``time.monotonic``."""

    head_json: str
    at: float

    @property
    def round(self) -> int:
        """The plan's; read when it is asked for, so that no other device waits meanwhile."""
        return Plan.model_validate_json(self.head_json).round


class FakeDevice:
    """Answers every plan with the same update; comes back when its stream breaks."""

    def __init__(
        self,
        name: str,
        layout_digest: str,
        update: bytes,
        *,
        sha256: bytes | None = None,
        weight: int = 1,
        think_seconds: float = 0.0,
        credentials: Credentials | None = None,
    ) -> None:
        """``sha256`` is that of ``update``, where many devices send the same.

        Without ``credentials`` it connects in plain text.
        """
        self.name = name
        self.layout_digest = layout_digest
        self.update = update
        self.weight = weight
        self.think_seconds = think_seconds
        self.credentials = credentials
        self.sha256 = sha256 or hashlib.sha256(update).digest()
        self.num_reconnects = 0
        self.num_refused = 0
        self.taken: list[Taken] = []
        self.acknowledged: list[int] = []
        """The rounds whose update the server said that it has, whole."""
        self._call: Any = None
        self._has_left = False
        self._read_at = 0.0
        self._session = b""
        self._image_id = ""
        self._missing_bytes = 0
        self._writing = asyncio.Lock()
        self._receipts: asyncio.Queue[Receipt] = asyncio.Queue()

    async def run(self, port: int) -> None:
        """Stay connected until the server says goodbye, or ``leave`` is called."""
        import grpc.aio

        from headwater.client.transport.lasting_connection import channel_to

        self._has_left, address = False, f"127.0.0.1:{port}"
        while not self._has_left:
            async with channel_to(address, self.credentials, has_standby=False) as channel:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    if await self._serve(channel.stream_stream(STREAM_METHOD)()):
                        return
            self.num_reconnects += 1
            await asyncio.sleep(RETRY_SECONDS)

    async def leave(self) -> None:
        """Say that it goes; what it was asked for is not answered."""
        import grpc.aio

        self._has_left = True
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._write(self._call, ClientFrame(leave=Leave()))

    async def _serve(self, call: Any) -> bool:
        """Serve one stream; return whether the server said goodbye.

        A server that has no attempts left for an address ends a stream without a word.
        """
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            name=self.name,
            layout_digest=self.layout_digest,
            session=self._session,
            image_id=self._image_id,
        )
        self._call = call
        await self._write(call, ClientFrame(hello=hello))
        self._receipts = asyncio.Queue()
        upload: asyncio.Task[None] | None = None
        try:
            while isinstance(data := await call.read(), bytes):
                self._read_at = time.monotonic()
                frame = ServerFrame.FromString(data)
                match frame.WhichOneof("kind"):
                    case "welcome":
                        self._session = frame.welcome.session
                    case "image":
                        self._begin_image(frame.image)
                    case "chunk":
                        self._missing_bytes -= len(frame.chunk.data)
                    case "instruction":
                        if frame.small_image:
                            self._missing_bytes = 0
                        self._take(frame.instruction)
                        if upload is not None:
                            upload.cancel()  # nobody waits for it any more
                        upload = asyncio.create_task(self._answer(call, frame.instruction))
                    case "receipt":
                        self._receipts.put_nowait(frame.receipt)
                    case "fault" if frame.fault.message_id:
                        self.num_refused += 1
                    case "fault":
                        raise RuntimeError(f"{self.name}: {frame.fault.code}: {frame.fault.text}")
                    case "goodbye":
                        return True
            return False
        finally:
            if upload is not None:
                upload.cancel()
                await asyncio.gather(upload, return_exceptions=True)

    def _begin_image(self, image: Image) -> None:
        self._image_id = ""
        self._missing_bytes = image.num_bytes

    def _take(self, instruction: Instruction) -> None:
        """Note a plan that is here with all of its model."""
        self._receipts = asyncio.Queue()
        if not instruction.image_id:
            return
        if instruction.image_id != self._image_id and self._missing_bytes:
            raise RuntimeError(f"{self.name}: a plan, and {self._missing_bytes} bytes are missing")
        self._image_id = instruction.image_id
        self.taken.append(Taken(head_json=instruction.head_json, at=self._read_at))

    async def _answer(self, call: Any, instruction: Instruction) -> None:
        if instruction.message_type != "train":
            await self._upload(call, instruction, self._description(), b"")
            return
        await asyncio.sleep(self.think_seconds)
        plan = Plan.model_validate_json(instruction.head_json)
        await self._upload(call, instruction, self._report(plan), self.update)
        self.acknowledged.append(plan.round)

    async def _upload(self, call: Any, instruction: Instruction, head: str, vector: bytes) -> None:
        """Send a reply, from where the server has it, and wait until the server has it whole."""
        reply = Reply(
            message_id=instruction.message_id,
            head_json=head,
            num_bytes=len(vector),
            sha256=self.sha256 if vector else hashlib.sha256().digest(),
        )
        await self._write(call, ClientFrame(reply=reply))
        receipt = await self._receipts.get()  # the server's word that it is this device's turn
        start = len(vector) if receipt.is_done else receipt.next_offset
        for offset in range(start, len(vector), CHUNK_BYTES):
            chunk = Chunk(
                transfer_id=instruction.message_id,
                offset=offset,
                data=vector[offset : offset + CHUNK_BYTES],
            )
            await self._write(call, ClientFrame(chunk=chunk))
        while not receipt.is_done:
            receipt = await self._receipts.get()

    def _description(self) -> str:
        return DeviceReport(
            name=self.name, num_examples=NUM_EXAMPLES, layout_digest=self.layout_digest
        ).model_dump_json(exclude_none=True)

    def _report(self, plan: Plan) -> str:
        seconds = max(self.think_seconds, 0.001)
        step = Step(
            num_examples=self.weight,
            weight=self.weight,
            loss=1.0,
            gradient_norm=1.0,
            seconds=seconds,
            peak_bytes=1,
        )
        return UpdateReport(
            name=self.name,
            round=plan.round,
            num_examples=self.weight,
            weight=self.weight,
            loss_sum=float(self.weight),
            micro_batch_size=self.weight,
            seconds=seconds,
            steps=(step,),
            reason="quota",
        ).model_dump_json(exclude_none=True)

    async def _write(self, call: Any, frame: ClientFrame) -> None:
        async with self._writing:
            await call.write(frame.SerializeToString())
