"""A server in this process and devices that speak its frames by hand, over real sockets.

A raw device sends only the frames that a test tells it to, so a test can violate any rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
import torch

from headwater.common.model.parameters import build_model
from headwater.common.settings.sources import load
from headwater.common.task import load_task
from headwater.common.transport.limits import CHUNK_BYTES, PROTOCOL_VERSION, STREAM_METHOD
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import (
    Chunk,
    ClientFrame,
    Fault,
    Hello,
    Instruction,
    Reply,
    ServerFrame,
)
from headwater.server.features import grid_fleet
from headwater.server.flower.grpc_grid import GrpcGrid
from headwater.server.rounds.round_loop import run as run_rounds
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_state import Training
from headwater.server.transport.admission import OfferedTask
from headwater.server.transport.peer_certificates import CertificateVerifier
from headwater.server.transport.servicer import Servicer

TASK = "tests/tasks.py:TwoLayers"
NUM_EXAMPLES = 24
RUN_ID = 7
WAIT_SECONDS = 120.0
LIMITLESS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


def layout_digest() -> str:
    """Return the digest of the task's model."""
    return build_model(load_task(TASK), seed=0).layout.digest


@dataclass(kw_only=True)
class Run:
    """A server's run in a thread of its own."""

    servicer: Servicer
    training: Training
    thread: threading.Thread
    rows: list[RoundRow] = field(default_factory=list)
    error: list[BaseException] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.servicer.port

    @property
    def refusals(self) -> Counter[str]:
        return self.servicer.refusals

    def model(self) -> bytes:
        """Return the current model."""
        return bytes(self.training.image.buffer())

    def begin(self) -> None:
        """Start the run with the connected devices."""
        self.thread.start()

    async def end(self) -> None:
        """Wait until the run has ended by itself."""
        await asyncio.wait_for(asyncio.to_thread(self.thread.join), WAIT_SECONDS)
        if self.error:
            raise self.error[0]


@contextlib.asynccontextmanager
async def serving(
    *,
    rounds: int = 1,
    min_clients: int = 1,
    reconnect_seconds: float = 30.0,
    return_seconds: float = 5.0,
    deadline: float | None = None,
    on_devices: bool = False,
    credentials: Credentials | None = None,
    verifier: CertificateVerifier | None = None,
    effective_batch_size: int | None = None,
    weighting: str = "samples",
    settings: Mapping[str, Any] = MappingProxyType({}),
    offered: OfferedTask | None = None,
) -> AsyncIterator[Run]:
    """Listen; ``begin`` serves ``rounds`` rounds of K = 1, micro-batch 8.

    With an effective batch size the planner decides instead.
    """
    k_of_one = {"plan.accumulation_steps": 1, "plan.micro_batch_size": 8}
    planned = {"plan.effective_batch_size": effective_batch_size}
    chosen = load(
        None,
        {
            "task": TASK,
            "rounds": rounds,
            "threads": 1,
            **(k_of_one if effective_batch_size is None else planned),
            "cohort.min_clients": min_clients,
            "cohort.weighting": weighting,
            "cohort.deadline_seconds": deadline,
            "evaluation.on_devices": on_devices,
            **settings,
        },
    )
    servicer = Servicer(
        "127.0.0.1:0",
        run_id=RUN_ID,
        credentials=credentials,
        verifier=verifier,
        staging_bytes=1 << 20,
        reconnect_seconds=reconnect_seconds,
        return_seconds=return_seconds,
        offered=offered,
    )
    servicer.start()
    run = Run(
        servicer=servicer, training=Training(chosen, run_id=RUN_ID), thread=threading.Thread()
    )
    run.thread = threading.Thread(target=_serve, args=(run,), daemon=True)
    try:
        yield run
    finally:
        await asyncio.to_thread(servicer.stop, say_goodbye=False)


def _serve(run: Run) -> None:
    try:
        grid = GrpcGrid(run.servicer)
        grid.enter_run(RUN_ID)
        run_rounds(run.training, grid_fleet(grid, run.training), on_round=run.rows.append)
    except BaseException as error:
        run.error.append(error)


class RawDevice:
    """One stream whose frames the test writes."""

    def __init__(
        self, port: int, name: str = "attacker", *, credentials: Credentials | None = None
    ) -> None:
        self.name = name
        self.image = b""
        address = f"127.0.0.1:{port}"
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=LIMITLESS)
        else:
            keys = grpc.ssl_channel_credentials(
                credentials.ca, credentials.key, credentials.certificate
            )
            self._channel = grpc.aio.secure_channel(address, keys, options=LIMITLESS)
        self._call = self._channel.stream_stream(STREAM_METHOD)()

    async def __aenter__(self) -> RawDevice:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await self._channel.close()

    async def send_bytes(self, data: bytes) -> None:
        await self._call.write(data)

    async def send(self, **frame: Any) -> None:
        await self.send_bytes(ClientFrame(**frame).SerializeToString())

    async def next(self) -> ServerFrame:
        """Return the next frame; EOFError if the server ended the stream."""
        try:
            data = await asyncio.wait_for(self._call.read(), WAIT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise EOFError(str(error.code())) from error
        if data is grpc.aio.EOF:
            raise EOFError
        return ServerFrame.FromString(data)

    async def next_of(self, *kinds: str) -> ServerFrame:
        """Return the next frame of these kinds; keep skipped models in ``image``."""
        while True:
            frame = await self.next()
            if frame.WhichOneof("kind") == "image":
                self.image = b""
            if frame.WhichOneof("kind") == "chunk":
                self.image += frame.chunk.data
            if frame.small_image:
                self.image = frame.small_image
            if frame.WhichOneof("kind") in kinds:
                return frame

    async def fault(self) -> Fault:
        """Return the next fault."""
        return (await self.next_of("fault")).fault

    async def hello(self, **changes: Any) -> None:
        """Send an honest device's hello with ``changes``."""
        honest: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "name": self.name,
            "layout_digest": layout_digest(),
        }
        await self.send(hello=Hello(**(honest | changes)))

    async def enter(self) -> None:
        """Send a hello and wait for the welcome."""
        await self.hello()
        await self.next_of("welcome")

    async def describe(self, **changes: Any) -> None:
        """Send an honest description with ``changes``."""
        instruction = (await self.next_of("instruction")).instruction
        report = {
            "name": self.name,
            "num_examples": NUM_EXAMPLES,
            "layout_digest": layout_digest(),
        }
        await self.reply(instruction, json.dumps(report | changes))

    async def plan(self) -> Instruction:
        """Wait for the next plan."""
        return (await self.next_of("instruction")).instruction

    async def reply(
        self, instruction: Instruction, head: str, vector: bytes = b"", **changes: Any
    ) -> None:
        """Send a reply's head with ``changes``, and its vector."""
        honest: dict[str, Any] = {
            "message_id": instruction.message_id,
            "head_json": head,
            "num_bytes": len(vector),
            "sha256": hashlib.sha256(vector).digest(),
        }
        await self.send(reply=Reply(**(honest | changes)))
        for offset in range(0, len(vector), CHUNK_BYTES):
            await self.chunk(instruction, offset, vector[offset : offset + CHUNK_BYTES])

    async def chunk(self, instruction: Instruction, offset: int, data: bytes) -> None:
        await self.send(chunk=Chunk(transfer_id=instruction.message_id, offset=offset, data=data))

    async def update(self, instruction: Instruction, **changes: Any) -> None:
        """Send an honest update with ``changes`` in its head."""
        await self.reply(instruction, head_of(instruction, self.name, **changes), VECTOR)

    async def refused(self) -> str:
        """Return the code of the fault with which the server ends the stream."""
        fault = await self.fault()
        await self.end()
        return fault.code

    async def end(self) -> None:
        """Wait until the server has ended the stream."""
        with contextlib.suppress(EOFError):
            while True:
                await self.next()


VECTOR = torch.arange(11, dtype=torch.float32).numpy().tobytes()


def head_of(instruction: Instruction, name: str, /, **changes: Any) -> str:
    """Return the head of an honest update with ``changes``."""
    plan = json.loads(instruction.head_json)
    honest = {
        "name": name,
        "round": plan["round"],
        "num_examples": 8,
        "weight": 8,
        "loss_sum": 4.0,
        "micro_batch_size": 8,
        "seconds": 0.1,
        **step(),
        "reason": "quota",
    }
    return json.dumps(honest | changes)


def step(**changes: Any) -> dict[str, Any]:
    """Return the only step of an honest update with ``changes``."""
    honest = {
        "num_examples": 8,
        "weight": 8,
        "loss": 0.5,
        "gradient_norm": 1.0,
        "seconds": 0.1,
        "peak_bytes": 1,
    }
    return {"steps": [honest | changes]}


@contextlib.asynccontextmanager
async def cohort(*names: str, **how: Any) -> AsyncIterator[tuple[Any, ...]]:
    """Serve a run that starts with devices of these names; yield the run and the devices."""
    async with contextlib.AsyncExitStack() as stack:
        run = await stack.enter_async_context(serving(**how))
        devices = [await stack.enter_async_context(RawDevice(run.port, name)) for name in names]
        for device in devices:
            await device.enter()
        run.begin()
        yield run, *devices


async def be_honest(run: Run, device: RawDevice) -> None:
    """Take the honest device through its only round."""
    await device.update(await device.plan())
    await run.end()


def honest_model() -> bytes:
    """Return the model of a run with only the honest device."""

    async def train() -> bytes:
        async with cohort("honest") as (run, device):
            await device.describe()
            await device.update(await device.plan())
            await run.end()
            model: bytes = run.model()
            return model

    return asyncio.run(train())
