"""A hostile or broken server: each lie ends the device, or its instruction, with a named error."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from headwater.common.transport.limits import MAX_FRAME_BYTES, PROTOCOL_VERSION, STREAM_METHOD
from headwater.common.transport.wire_pb2 import (
    Chunk,
    ClientFrame,
    Fault,
    Goodbye,
    Image,
    Instruction,
    ServerFrame,
)
from headwater.common.transport.wire_pb2 import Welcome as WelcomeFrame
from tests.processes import Process, Processes, assert_tidy, write_task

HIDDEN = 16
IMAGE = bytes(4 * (7 * HIDDEN + 2))
DIGEST = hashlib.sha256(IMAGE).digest()

pytestmark = pytest.mark.slow


class Liar:
    """The server's end of one stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def read(self) -> ClientFrame:
        return ClientFrame.FromString(await self._stream.read())

    async def send_bytes(self, data: bytes) -> None:
        await self._stream.write(data)

    async def send(self, **frame: Any) -> None:
        await self.send_bytes(ServerFrame(**frame).SerializeToString())

    async def welcome(self, **changes: Any) -> None:
        honest: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "session": b"s" * 16,
            "run_id": 7,
        }
        await self.send(welcome=WelcomeFrame(**(honest | changes)))

    async def image(self, data: bytes = IMAGE, **changes: Any) -> None:
        honest: dict[str, Any] = {"image_id": "i", "num_bytes": len(IMAGE), "sha256": DIGEST}
        await self.send(image=Image(**(honest | changes)))
        await self.send(chunk=Chunk(transfer_id="i", offset=0, data=data))

    async def plan(self, *, small_image: bytes = b"", **changes: Any) -> None:
        honest = {"message_id": "m", "message_type": "train", "head_json": "{}", "image_id": "i"}
        instruction = Instruction(**(honest | changes))
        await self.send(instruction=instruction, small_image=small_image)


Lie = Callable[[Liar], Awaitable[None]]


async def another_version(liar: Liar) -> None:
    await liar.welcome(protocol_version=PROTOCOL_VERSION + 1)


async def no_welcome(liar: Liar) -> None:
    await liar.send(goodbye=Goodbye())


async def garbage(liar: Liar) -> None:
    await liar.send_bytes(b"\xff\xfe\x00")


async def a_frame_over_the_limit(liar: Liar) -> None:
    await liar.welcome()
    await liar.send_bytes(bytes(MAX_FRAME_BYTES + 1))


async def an_empty_frame(liar: Liar) -> None:
    await liar.welcome()
    await liar.send_bytes(b"")


async def a_second_welcome(liar: Liar) -> None:
    await liar.welcome()
    await liar.welcome()


async def an_error_of_its_own(liar: Liar) -> None:
    await liar.send(fault=Fault(code="Nonsense", text="[bold]of the future[/]"))


async def a_model_of_another_length(liar: Liar) -> None:
    await liar.welcome()
    await liar.image(num_bytes=len(IMAGE) + 4)


async def a_model_of_another_digest(liar: Liar) -> None:
    await liar.welcome()
    await liar.image(sha256=bytes(32))
    await liar.plan()


async def a_model_that_is_cut_short(liar: Liar) -> None:
    await liar.welcome()
    await liar.image(IMAGE[:-4])
    await liar.plan()


async def a_chunk_out_of_order(liar: Liar) -> None:
    await liar.welcome()
    await liar.image(IMAGE[:8])
    await liar.send(chunk=Chunk(transfer_id="i", offset=12, data=IMAGE[12:]))


async def a_chunk_beyond_the_end(liar: Liar) -> None:
    await liar.welcome()
    await liar.image(IMAGE + b"\0")


async def a_chunk_of_nothing(liar: Liar) -> None:
    await liar.welcome()
    await liar.send(chunk=Chunk(transfer_id="i", offset=0, data=IMAGE))


async def a_plan_without_its_model(liar: Liar) -> None:
    await liar.welcome()
    await liar.plan()


async def a_frozen_part_of_another_length(liar: Liar) -> None:
    """The device's model has none, which is 0 bytes."""
    await liar.welcome()
    await liar.image(is_frozen=True)


async def a_frozen_part_of_another_digest(liar: Liar) -> None:
    await liar.welcome()
    await liar.send(image=Image(image_id="i", num_bytes=0, sha256=bytes(32), is_frozen=True))
    await liar.plan(image_id="", frozen_id="i")


async def a_frozen_part_that_never_came(liar: Liar) -> None:
    await liar.welcome()
    await liar.plan(image_id="", frozen_id="i")


async def a_model_in_place_of_a_frozen_part(liar: Liar) -> None:
    await liar.welcome()
    await liar.image()
    await liar.plan(image_id="", frozen_id="i")


async def a_small_model_of_another_length(liar: Liar) -> None:
    await liar.welcome()
    await liar.plan(image_id=DIGEST.hex(), small_image=IMAGE + b"\0")


async def a_small_model_of_another_digest(liar: Liar) -> None:
    await liar.welcome()
    await liar.plan(image_id=bytes(32).hex(), small_image=IMAGE)


async def a_small_model_without_a_digest(liar: Liar) -> None:
    await liar.welcome()
    await liar.plan(small_image=IMAGE)


def run(lie: Lie, processes: Processes, task: str) -> Process:
    """Let a device meet a lying server, and wait for the device's end."""

    async def serve(_: Any, stream: Any) -> None:
        liar = Liar(stream)
        assert (await liar.read()).hello.name == "0"
        await lie(liar)
        await asyncio.Event().wait()  # the device is to end by itself

    async def play() -> Process:
        server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
        service, method = STREAM_METHOD.lstrip("/").split("/")
        handlers = {method: grpc.stream_stream_rpc_method_handler(serve)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            device = processes.client(port, 0, "--patience", 5, task=task)
            await asyncio.to_thread(device.wait)
        finally:
            await server.stop(None)
        return device

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        (another_version, "ProtocolMismatch"),
        (no_welcome, "ProtocolMismatch"),
        (garbage, "ProtocolMismatch"),
        (a_frame_over_the_limit, "ProtocolMismatch"),
        (an_empty_frame, "ProtocolMismatch"),
        (a_second_welcome, "ProtocolMismatch"),
        (an_error_of_its_own, "HeadwaterError: Nonsense"),
        (a_model_of_another_length, "ModelMismatch"),
        (a_model_of_another_digest, "CorruptUpdate"),
        (a_model_that_is_cut_short, "CorruptUpdate"),
        (a_chunk_out_of_order, "ProtocolMismatch"),
        (a_chunk_beyond_the_end, "ProtocolMismatch"),
        (a_chunk_of_nothing, "ProtocolMismatch"),
        (a_plan_without_its_model, "ProtocolMismatch"),
        (a_frozen_part_of_another_length, "ModelMismatch"),
        (a_frozen_part_of_another_digest, "CorruptUpdate"),
        (a_frozen_part_that_never_came, "ProtocolMismatch"),
        (a_model_in_place_of_a_frozen_part, "ProtocolMismatch"),
        (a_small_model_of_another_length, "ModelMismatch"),
        (a_small_model_of_another_digest, "CorruptUpdate"),
        (a_small_model_without_a_digest, "ProtocolMismatch"),
    ],
)
def test_a_device_ends_with_a_named_error(lie: Lie, code: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        device = run(lie, processes, write_task(tmp_path, hidden=HIDDEN).spec)
        assert device.wait() == 1
        assert f"\n{code}: " in device.text()
        assert_tidy(device)


@pytest.mark.parametrize(
    ("instruction", "code"),
    [
        ({"message_type": "nonsense"}, "ValueError"),
        ({"message_type": "query.password"}, "ValueError"),
        ({"message_type": "query.describe", "head_json": "{"}, "CorruptUpdate"),
        ({"message_type": "train", "head_json": "{}"}, "CorruptUpdate"),
        ({"message_type": "evaluate", "head_json": "[]"}, "CorruptUpdate"),
    ],
    ids=str,
)
def test_a_device_reports_an_error_and_continues(
    instruction: dict[str, Any], code: str, tmp_path: Path
) -> None:
    answers: list[Fault] = []

    async def lie(liar: Liar) -> None:
        await liar.welcome()
        await liar.plan(image_id="", **instruction)
        answers.append((await liar.read()).fault)
        await liar.send(goodbye=Goodbye())

    with Processes(tmp_path) as processes:
        device = run(lie, processes, write_task(tmp_path, hidden=HIDDEN).spec)
        assert device.wait() == 0, device.text()
    assert answers[0].message_id == "m"
    assert code in (answers[0].code, answers[0].text.partition(":")[0])
