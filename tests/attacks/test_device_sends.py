"""Hostile and broken updates are refused by named errors.

An honest device takes part in each round; the model equals that of a run with it alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from headwater.common.transport.limits import MAX_REPLY_HEAD_BYTES
from headwater.common.transport.wire_pb2 import Instruction, Leave
from tests.attacks.raw import (
    VECTOR,
    RawDevice,
    be_honest,
    cohort,
    head_of,
    serving,
    step,
)

UpdateAttack = Callable[[RawDevice, Instruction], Awaitable[None]]


def head(**changes: Any) -> UpdateAttack:
    async def attack(device: RawDevice, plan: Instruction) -> None:
        await device.update(plan, **changes)

    return attack


def head_text(text: str) -> UpdateAttack:
    async def attack(device: RawDevice, plan: Instruction) -> None:
        await device.reply(plan, text, VECTOR)

    return attack


def vector(values: bytes) -> UpdateAttack:
    async def attack(device: RawDevice, plan: Instruction) -> None:
        await device.reply(plan, head_of(plan, device.name), values)

    return attack


def announced(**changes: Any) -> UpdateAttack:
    async def attack(device: RawDevice, plan: Instruction) -> None:
        await device.reply(plan, head_of(plan, device.name), VECTOR, **changes)

    return attack


def chunks(*pieces: tuple[int, bytes]) -> UpdateAttack:
    async def attack(device: RawDevice, plan: Instruction) -> None:
        whole = {"num_bytes": len(VECTOR)}
        await device.reply(plan, head_of(plan, device.name), b"", **whole)
        for offset, data in pieces:
            await device.chunk(plan, offset, data)

    return attack


def vector_with(value: float) -> bytes:
    values = torch.arange(11, dtype=torch.float32)
    values[10] = value
    return values.numpy().tobytes()


UPDATES = {
    "more examples than asked for": (head(num_examples=9), "CountOutOfRange"),
    "10^18 examples": (head(num_examples=10**18), "CorruptUpdate"),
    "2^53 examples": (head(num_examples=2**53), "CountOutOfRange"),
    "no example": (head(num_examples=0), "CountOutOfRange"),
    "-1 examples": (head(num_examples=-1), "CorruptUpdate"),
    "NaN examples": (head(num_examples=float("nan")), "CorruptUpdate"),
    "more weight than examples": (head(weight=9), "CountOutOfRange"),
    "-8 weight": (head(weight=-8), "CorruptUpdate"),
    "10^18 weight": (head(weight=10**18), "CorruptUpdate"),
    "a loss of NaN": (head(loss_sum=float("nan")), "CorruptUpdate"),
    "an infinite loss": (head(loss_sum=float("-inf")), "CorruptUpdate"),
    "a loss beyond all bounds": (head(loss_sum=1.7e308), "CorruptUpdate"),
    "a metric of NaN": (head(metric_sums={"accuracy": float("nan")}), "CorruptUpdate"),
    "a metric beyond all bounds": (head(metric_sums={"accuracy": 1.7e308}), "CorruptUpdate"),
    "a norm beyond all bounds": (head(**step(gradient_norm=1e300)), "CorruptUpdate"),
    "a negative norm": (head(**step(gradient_norm=-1.0)), "CorruptUpdate"),
    "seconds without end": (head(seconds=float("inf")), "CorruptUpdate"),
    "far too many steps": (head(steps=step()["steps"] * 10), "CountOutOfRange"),
    "a reason of its own": (head(reason="because"), "CorruptUpdate"),
    "another round": (head(round=2), "UnexpectedUpdate"),
    "another's name": (head(name="honest"), "IdentityRefused"),
    "nobody's name": (head(name="nobody"), "IdentityRefused"),
    "a field too many": (head(is_admin=True), "CorruptUpdate"),
    "a head that is no JSON": (head_text("{"), "CorruptUpdate"),
    "an empty head": (head_text(""), "CorruptUpdate"),
    "a head of another shape": (head_text("[1, 2]"), "CorruptUpdate"),
    "a head that is nested too deep": (head_text("[" * 100_000), "CorruptUpdate"),
    "a head that is too long": (head_text(" " * (MAX_REPLY_HEAD_BYTES + 1)), "OversizeUpdate"),
    "a vector with a NaN": (vector(vector_with(float("nan"))), "NonFiniteUpdate"),
    "a vector with an infinity": (vector(vector_with(float("inf"))), "NonFiniteUpdate"),
    "a vector that is too long": (vector(VECTOR + b"\0" * 4), "OversizeUpdate"),
    "a vector that is too short": (vector(VECTOR[4:]), "OversizeUpdate"),
    "no vector": (vector(b""), "OversizeUpdate"),
    "2^60 bytes announced": (announced(num_bytes=2**60), "OversizeUpdate"),
    "another digest": (announced(sha256=b"\0" * 32), "CorruptUpdate"),
    "no digest": (announced(sha256=b""), "CorruptUpdate"),
    "a chunk out of order": (chunks((4, VECTOR[4:])), "CorruptUpdate"),
    "a chunk twice": (chunks((0, VECTOR[:20]), (0, VECTOR[:20])), "CorruptUpdate"),
    "a chunk beyond the end": (chunks((0, VECTOR + b"\0")), "CorruptUpdate"),
    "a chunk at 2^63": (chunks((2**63, VECTOR)), "CorruptUpdate"),
    "an empty chunk": (chunks((0, b"")), "CorruptUpdate"),
}


@pytest.mark.parametrize(("attack", "code"), UPDATES.values(), ids=UPDATES.keys())
async def test_a_hostile_update_is_refused_and_the_round_continues(
    attack: UpdateAttack, code: str, model: bytes
) -> None:
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        await attack(attacker, await attacker.plan())
        # The server has read the attack before the round can close.
        await attacker.next_of("fault", "receipt")
        await be_honest(run, honest)
        row = run.rows[0]
        assert row.refused["attacker"].startswith(code)
        assert [client.name for client in row.clients] == ["honest"]
        assert run.model() == model
        assert run.servicer.staged_bytes == 0


async def test_a_chunk_without_an_announced_reply_is_ignored(model: bytes) -> None:
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        plan = await attacker.plan()
        await attacker.chunk(Instruction(message_id="nobody's"), 0, b"data")
        await attacker.chunk(plan, 0, VECTOR)
        await attacker.update(plan, num_examples=9)
        await attacker.next_of("receipt")
        await be_honest(run, honest)
        assert run.rows[0].refused["attacker"].startswith("CountOutOfRange")
        assert run.model() == model


async def test_an_unrequested_reply_is_refused(model: bytes) -> None:
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        plan = await attacker.plan()
        unasked = Instruction(message_id="unasked", head_json=plan.head_json)
        await attacker.update(unasked)
        fault = await attacker.fault()
        assert (fault.message_id, fault.code) == ("unasked", "UnexpectedUpdate")
        await attacker.send(leave=Leave())
        await be_honest(run, honest)
        assert run.refusals == {"UnexpectedUpdate": 1}
        assert run.rows[0].refused["attacker"].startswith("ConnectionLost")
        assert run.model() == model


def test_a_replayed_update_counts_once() -> None:
    async def play(*, is_replayed: bool) -> bytes:
        async with cohort("attacker", "honest") as (run, attacker, honest):
            await attacker.describe()
            await honest.describe()
            plan = await attacker.plan()
            await attacker.update(plan)
            await attacker.next_of("receipt")
            if is_replayed:
                await attacker.update(plan)
                assert (await attacker.fault()).code == "UnexpectedUpdate"
            await be_honest(run, honest)
            assert run.rows[0].weight == 16
            model: bytes = run.model()
            return model

    once = asyncio.run(play(is_replayed=False))
    assert asyncio.run(play(is_replayed=True)) == once


async def test_an_update_of_the_last_round_does_not_count_in_the_next() -> None:
    async with cohort("attacker", "honest", rounds=2) as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        first = await attacker.plan()
        await attacker.update(first)
        await honest.update(await honest.plan())
        second = await attacker.plan()
        await attacker.update(first)
        assert (await attacker.fault()).code == "UnexpectedUpdate"
        await attacker.reply(second, head_of(first, "attacker"), VECTOR)
        await be_honest(run, honest)
        assert run.rows[1].refused["attacker"].startswith("UnexpectedUpdate")


async def test_an_update_after_the_deadline_is_refused_as_late(model: bytes) -> None:
    async with cohort("late", "honest", deadline=1.0) as (run, late, honest):
        await late.describe()
        await honest.describe()
        plan = await late.plan()
        await honest.update(await honest.plan())
        fault = await late.fault()
        assert (fault.message_id, fault.code) == (plan.message_id, "LateUpdate")
        await run.end()
        assert run.rows[0].refused["late"].startswith("LateUpdate")
        assert run.model() == model


async def test_a_stalled_upload_is_rejected(model: bytes) -> None:
    async with cohort("slow", "honest", reconnect_seconds=0.5) as (run, slow, honest):
        await slow.describe()
        await honest.describe()
        plan = await slow.plan()
        await slow.reply(plan, head_of(plan, "slow"), b"", num_bytes=len(VECTOR))
        await slow.chunk(plan, 0, VECTOR[:20])
        assert (await slow.fault()).code == "LateUpdate"
        await be_honest(run, honest)
        assert run.model() == model


async def test_a_device_that_floods_the_server_without_reading_is_disconnected(
    model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.server.transport.stream.MAX_OUTBOX_FRAMES", 50)
    async with cohort("attacker", "honest", reconnect_seconds=1.0) as (
        run,
        attacker,
        honest,
    ):
        await attacker.describe()
        await honest.describe()
        await attacker.plan()
        unasked = Instruction(message_id="u" * 100_000)

        async def flood() -> None:
            while True:
                await attacker.reply(unasked, "", b"")

        flooding = asyncio.create_task(flood())
        while not run.refusals["ProtocolMismatch"]:
            await asyncio.sleep(0.01)
        flooding.cancel()
        await be_honest(run, honest)
        assert run.model() == model


async def test_a_long_client_error_is_cut_in_the_round_log(model: bytes) -> None:
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        plan = await attacker.plan()
        fault = {"message_id": plan.message_id, "code": "c" * 100_000, "text": "t" * 100_000}
        await attacker.send(fault=fault)
        await be_honest(run, honest)
        assert len(json.dumps(run.rows[0].refused)) < 2000
        assert run.model() == model


async def test_two_losses_that_overflow_their_sum_do_not_end_the_evaluation() -> None:
    names = ("first", "second", "honest")
    async with cohort(*names, on_devices=True) as (run, *devices):
        for device in devices:
            await device.describe()
        for device in devices:
            await device.update(await device.plan())
        for device in devices:
            instruction = await device.plan()
            loss = 1.0 if device.name == "honest" else 1.7e308
            report = {"name": device.name, "weight": 2, "loss_sum": loss}
            await device.reply(instruction, json.dumps(report))
        await run.end()
        assert run.rows[0].metrics["held_out_loss"] == 0.5


async def test_a_port_scanner_changes_nothing(model: bytes) -> None:
    async with serving() as run, RawDevice(run.port, "honest") as honest:
        await honest.enter()
        run.begin()
        await honest.describe()
        plan = await honest.plan()
        for noise in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x00\xa5\x01",
            b"\0" * 4096,
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", run.port)
            writer.write(noise)
            await writer.drain()
            writer.close()
        await honest.update(plan)
        await run.end()
        assert run.model() == model


async def test_a_device_whose_answer_breaks_the_protocol_sits_out_while_others_suffice() -> None:
    async with cohort("attacker", "honest", rounds=3) as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        await head_text("{")(attacker, await attacker.plan())
        for _ in range(3):
            await honest.update(await honest.plan())
        await run.end()
        assert [row.num_invited for row in run.rows] == [2, 1, 1]
        assert "CorruptUpdate" in run.rows[1].left_out["attacker"]


async def test_a_device_without_which_no_round_can_be_stays_and_its_next_answer_counts() -> None:
    async with cohort("attacker", "honest", min_clients=2) as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        await head_text("{")(attacker, await attacker.plan())
        await honest.update(await honest.plan())
        await attacker.update(await attacker.plan())  # the aborted round's next attempt
        await honest.update(await honest.plan())
        await run.end()
        (row,) = run.rows
        assert (row.num_invited, row.num_aborted, row.weight) == (2, 1, 16)
