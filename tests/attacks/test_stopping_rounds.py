"""Devices that try to stop the rounds: hello and silence, flapping, and frames without a request.

Each costs its sender its turn, and the other devices nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from headwater.common.transport.limits import MAX_REPLY_HEAD_BYTES
from headwater.common.transport.wire_pb2 import Instruction
from headwater.server.transport.admission import MAX_STARTS_OVER
from headwater.server.transport.rate_limit import BURST, UNASKED_BYTES
from tests.attacks.raw import WAIT_SECONDS, RawDevice, Run, cohort

FOREVER = 1000.0


async def until_lost(run: Run, *, connected: int) -> None:
    """Wait until the server has seen that streams ended."""
    while len(run.servicer.connected()) != connected:
        await asyncio.sleep(0.01)


async def train(device: RawDevice, *, rounds: int) -> None:
    for _ in range(rounds):
        await device.update(await device.plan())


async def flood(run: Run, device: RawDevice, unasked: Instruction, head: str) -> None:
    """Announce replies without reading until the server has ended the stream."""

    async def announce() -> None:
        while True:
            await device.reply(unasked, head, b"")

    flooding = asyncio.create_task(announce())
    async with asyncio.timeout(WAIT_SECONDS):
        while not run.refusals["ProtocolMismatch"]:
            await asyncio.sleep(0.01)
    flooding.cancel()


async def test_a_newcomer_that_says_hello_and_is_silent_holds_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater.server.flower.registration.PATIENCE_SECONDS", FOREVER)
    async with cohort("honest", rounds=4) as (run, honest):
        await honest.describe()
        await train(honest, rounds=1)
        for number in range(2):  # hello, silence, leave, again
            async with RawDevice(run.port, f"silent-{number}") as silent:
                await silent.enter()
                await train(honest, rounds=1)
        async with RawDevice(run.port, "stays") as silent:
            await silent.enter()
            await train(honest, rounds=1)
            await run.end()
        assert [row.num_invited for row in run.rows] == [1] * 4


async def test_a_device_that_connects_during_a_round_is_asked_at_once_and_is_in_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with cohort("honest", rounds=2) as (run, honest):
        await honest.describe()
        plan = await honest.plan()
        async with RawDevice(run.port, "newcomer") as newcomer:
            await newcomer.enter()
            await newcomer.describe()  # while the first round waits for the other device
            async with asyncio.timeout(WAIT_SECONDS):
                while "newcomer joined" not in caplog.text:
                    await asyncio.sleep(0.01)
            await honest.update(plan)
            await asyncio.gather(train(honest, rounds=1), train(newcomer, rounds=1))
            await run.end()
        assert [row.num_invited for row in run.rows] == [1, 2]


async def test_a_stream_of_unasked_announcements_ends_before_it_costs_memory(model: bytes) -> None:
    """Each announcement was answered with its own id, a megabyte long, in the device's outbox."""
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        await attacker.plan()
        plan = await honest.plan()
        unasked = Instruction(message_id="u" * (MAX_REPLY_HEAD_BYTES - 100))
        await flood(run, attacker, unasked, "")
        await honest.update(plan)
        await run.end()
        assert run.refusals["ProtocolMismatch"] == 1
        assert run.servicer.bytes_up < 2 * UNASKED_BYTES
        assert run.rows[0].refused["attacker"].startswith("ProtocolMismatch")
        assert run.model() == model


@pytest.mark.parametrize("head", ["", "h" * (MAX_REPLY_HEAD_BYTES - 100)])
async def test_unasked_heads_end_their_stream_and_the_round_goes_on_without_it(
    head: str, model: bytes
) -> None:
    async with cohort("attacker", "honest", return_seconds=FOREVER) as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        await attacker.plan()
        plan = await honest.plan()
        unasked = Instruction(message_id="unasked")
        await flood(run, attacker, unasked, head)
        await honest.update(plan)
        await run.end()  # without waiting for the attacker's return
        assert run.refusals["ProtocolMismatch"] == 1
        assert run.refusals["UnexpectedUpdate"] <= 20
        assert run.servicer.bytes_up < 2 * UNASKED_BYTES
        assert run.model() == model


async def test_streams_that_end_without_an_answer_are_limited_like_refused_ones(
    model: bytes,
) -> None:
    async with cohort("honest") as (run, honest):
        await honest.describe()
        plan = await honest.plan()
        for number in range(int(BURST)):
            async with RawDevice(run.port, f"flaps-{number}") as flaps:
                await flaps.enter()
            await until_lost(run, connected=1)
        async with RawDevice(run.port, "again") as again:
            with contextlib.suppress(Exception):
                await again.hello()
            await again.end()
        assert run.refusals == {"TooManyAttempts": 1}
        await honest.update(plan)
        await run.end()
        assert run.model() == model


async def test_a_device_that_starts_over_to_the_last_shortens_its_next_wait() -> None:
    """In round after round, 0.7 s away each time, it took rounds from 170 to 0.3 a second."""
    async with cohort("attacker", "honest", return_seconds=5.0) as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        await attacker.plan()
        for _ in range(MAX_STARTS_OVER + 1):
            await attacker.__aexit__()
            await until_lost(run, connected=1)
            attacker = RawDevice(run.port, "attacker")
            await attacker.enter()
        await honest.update(await honest.plan())
        await run.end()
        await attacker.__aexit__()
        waits = run.servicer._watchdog._lost_devices._waits
        async with asyncio.timeout(WAIT_SECONDS):
            while waits.seconds("attacker") != 2.5:
                await asyncio.sleep(0.01)
