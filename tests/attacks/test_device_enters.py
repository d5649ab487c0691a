"""Hostile and broken first messages of a device are refused by named errors.

An honest device takes part at the same time; the model equals that of a run with it alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headwater.common.transport.limits import MAX_FRAME_BYTES, PROTOCOL_VERSION
from headwater.common.transport.wire_pb2 import Leave, Progress
from headwater.server.transport.admission import OfferedTask
from tests.attacks.raw import (
    RawDevice,
    be_honest,
    cohort,
    serving,
)

Attack = Callable[[RawDevice], Awaitable[None]]


async def another_version(device: RawDevice) -> None:
    await device.hello(protocol_version=PROTOCOL_VERSION + 1)


async def no_version(device: RawDevice) -> None:
    await device.hello(protocol_version=0)


async def no_hello(device: RawDevice) -> None:
    await device.send(leave=Leave())


async def an_empty_frame(device: RawDevice) -> None:
    await device.send_bytes(b"")


async def garbage(device: RawDevice) -> None:
    await device.send_bytes(b"\xff\xfe\x00GET / HTTP/1.1\r\n\r\n")


async def a_model_of_another_layout(device: RawDevice) -> None:
    await device.hello(layout_digest="0" * 64)


async def a_model_of_no_layout(device: RawDevice) -> None:
    await device.hello(layout_digest="")


async def a_name_that_is_taken(device: RawDevice) -> None:
    await device.hello(name="honest")


async def a_name_that_is_taken_and_a_guessed_session(device: RawDevice) -> None:
    await device.hello(name="honest", session=b"\0" * 16)


def the_name(name: str) -> Attack:
    async def attack(device: RawDevice) -> None:
        await device.hello(name=name)

    return attack


@pytest.mark.parametrize(
    ("attack", "code"),
    [
        (another_version, "ProtocolMismatch"),
        (no_version, "ProtocolMismatch"),
        (no_hello, "ProtocolMismatch"),
        (an_empty_frame, "ProtocolMismatch"),
        (garbage, "ProtocolMismatch"),
        (a_model_of_another_layout, "ModelMismatch"),
        (a_model_of_no_layout, "ModelMismatch"),
        (a_name_that_is_taken, "IdentityRefused"),
        (a_name_that_is_taken_and_a_guessed_session, "IdentityRefused"),
        (the_name(""), "IdentityRefused"),
        (the_name("../../etc/passwd"), "IdentityRefused"),
        (the_name("a\nb"), "IdentityRefused"),
        (the_name("honest\n"), "IdentityRefused"),
        (the_name("x" * 129), "IdentityRefused"),
        (the_name("\N{LATIN SMALL LETTER E WITH ACUTE}"), "IdentityRefused"),
    ],
)
async def test_a_refused_device_gets_the_reason_and_is_counted(
    attack: Attack, code: str, model: bytes
) -> None:
    async with cohort("honest") as (run, honest):
        await honest.describe()
        plan = await honest.plan()
        async with RawDevice(run.port) as attacker:
            await attack(attacker)
            assert await attacker.refused() == code
        assert run.refusals == {code: 1}
        await honest.update(plan)
        await run.end()
        assert run.model() == model


async def test_a_silent_device_is_refused(model: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.server.transport.stream.HELLO_SECONDS", 0.1)
    async with cohort("honest") as (run, honest), RawDevice(run.port) as silent:
        await honest.describe()
        assert await silent.refused() == "ProtocolMismatch"
        await be_honest(run, honest)
        assert run.model() == model


async def test_a_frame_over_the_limit_ends_the_stream(model: bytes) -> None:
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await honest.describe()
        await attacker.describe()
        await attacker.plan()
        await attacker.send_bytes(b"\0" * (MAX_FRAME_BYTES + 1))
        await attacker.end()
        async with RawDevice(run.port) as again:
            await again.enter()
            await again.send(leave=Leave())
            await be_honest(run, honest)
        assert run.model() == model


async def test_a_device_says_of_a_task_that_it_is_offered_only_that_it_refuses_it() -> None:
    offered = OfferedTask(name="Parity", digest="0" * 64, data=b"a bundle")
    async with serving(offered=offered) as run:
        answers: list[dict[str, Any]] = [
            {"leave": Leave(code="CertificateRevoked", text="of another device")},
            {"leave": Leave(code="", text="")},
            {"progress": Progress(num_steps=1)},
            {"leave": Leave(code="TaskBundleRefused", text="\x1b[2J" + "a" * 100_000)},
        ]
        for answer in answers:
            async with RawDevice(run.port, "pi") as device:
                await device.hello(bundle="none")
                await device.next_of("other_task")
                await device.send(**answer)
                with pytest.raises(EOFError):
                    await device.next()
        assert set(run.refusals) == {"TaskBundleRefused"}
        assert run.refusals["TaskBundleRefused"] == 1
        (record,) = run.servicer.device_records.devices()
        assert (record.name, record.refusal_code) == ("pi", "TaskBundleRefused")
        assert len(record.refusal_text or "") <= 1_000
