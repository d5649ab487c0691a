"""What a hostile or broken device may send, and how the server refuses it.

In each case an honest device takes part in the same round, and the model is the one that the honest
device alone would have made.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from common.wire import MAX_FRAME_BYTES, MAX_REPLY_HEAD_BYTES
from common.wire_pb2 import Instruction, Leave
from server.attendance import MOST_REASON
from tests.attacks.raw import (
    NUM_EXAMPLES,
    VECTOR,
    RawDevice,
    Run,
    cohort,
    head_of,
    honest_model,
    serving,
)

Attack = Callable[[RawDevice], Awaitable[None]]
UpdateAttack = Callable[[RawDevice, Instruction], Awaitable[None]]


@pytest.fixture(scope="module")
def model() -> bytes:
    return honest_model()


async def be_honest(run: Run, device: RawDevice) -> None:
    """Let the honest device do its one round."""
    await device.update(await device.plan())
    await run.end()


# Before it is let in.


async def another_version(device: RawDevice) -> None:
    await device.hello(protocol_version=2)


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
def test_a_device_that_may_not_enter_is_told_why_and_counted(
    attack: Attack, code: str, model: bytes
) -> None:
    async def play() -> None:
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

    asyncio.run(play())


def test_a_device_that_says_nothing_is_sent_away(
    model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.intake.HELLO_SECONDS", 0.1)

    async def play() -> None:
        async with cohort("honest") as (run, honest), RawDevice(run.port) as silent:
            await honest.describe()
            assert await silent.refused() == "ProtocolMismatch"
            await be_honest(run, honest)
            assert run.model() == model

    asyncio.run(play())


def test_a_frame_over_the_limit_ends_the_stream(model: bytes) -> None:
    async def play() -> None:
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

    asyncio.run(play())


# What it says of itself.


@pytest.mark.parametrize(
    "lie",
    [
        {"num_examples": 0},
        {"num_examples": -1},
        {"num_examples": 10**18},
        {"num_examples": 1.5},
        {"num_examples": "many"},
        {"name": "honest"},
        {"name": "somebody"},
        {"layout_digest": None},
        {"vitals": {"memory_limit_bytes": -1}},
        {"vitals": {"memory_limit_bytes": 10**18}},
        {"vitals": {"bytes_per_example": float("nan")}},
        {"vitals": {"share": 0.0}},
        {"vitals": {"share": 1.5}},
        {"vitals": {"upload_bytes_per_second": 0.0}},
        {"vitals": {"temperature_celsius": float("inf")}},
        {"cores": 0.0},
        {"cores": 10**6},
        {"fastest_micro_batch_size": 0},
        {"seconds_per_example": 3.2e9},
        {"seconds_per_example": -1e-3},
        {"seconds_per_example": float("nan")},
        {"seconds_per_example": float("inf")},
        {"seconds_per_micro_batch": -1.0},
        {"unheard": "of"},
    ],
    ids=str,
)
def test_a_device_that_lies_about_itself_is_turned_away(lie: dict[str, Any], model: bytes) -> None:
    async def play() -> None:
        async with cohort("attacker", "honest") as (run, attacker, honest):
            await attacker.describe(**lie)
            await honest.describe()
            code = (await attacker.fault()).code
            assert code in ("CorruptUpdate", "IdentityRefused")
            assert run.refusals == {code: 1}
            await be_honest(run, honest)
            assert run.model() == model

    asyncio.run(play())


PACE = {"seconds_per_micro_batch": 0.0, "seconds_per_example": 1e-3}
# 34 parts of ten examples: two honest devices, and one that is believed to be 32 times as fast.
PARTS, TARGET = 10, 340

BELIEVED = {
    "instant, with 2^40 examples": ({"num_examples": 2**40, "seconds_per_example": 0.0}, 1),
    "instant, with few examples": ({"num_examples": 8, "seconds_per_example": 0.0}, 1),
    "thirty years an example": ({"seconds_per_example": 1e9}, 0),
    "thirty years a micro-batch": ({"seconds_per_micro_batch": 1e9}, 0),
    "8 petabytes of memory": ({"vitals": {"memory_limit_bytes": 2**53, "bytes_per_example": 1}}, 0),
    "no memory": ({"vitals": {"memory_limit_bytes": 0, "bytes_per_example": 1e99}}, 0),
    "a link of years": ({"vitals": {"upload_bytes_per_second": 5e-324}}, 0),
    "next to none of its time": ({"vitals": {"share": 5e-324}}, 0),
    "a thousand cores": ({"cores": 1000}, 0),
}


def quota_of(plan: Instruction) -> int:
    return int(json.loads(plan.head_json)["quota"])


@pytest.mark.parametrize(("claim", "num_bounded"), BELIEVED.values(), ids=BELIEVED.keys())
def test_an_absurd_claim_that_is_possible_neither_starves_nor_stalls_the_others(
    claim: dict[str, Any], num_bounded: int
) -> None:
    """Whatever one device claims of itself, each honest one keeps its part of ten examples."""

    async def play() -> None:
        names = ("attacker", "first", "second")
        async with cohort(*names, effective_batch_size=TARGET) as (run, attacker, *honest):
            await attacker.describe(**(PACE | claim))
            for device in honest:
                await device.describe(**PACE)
            await attacker.plan()
            await attacker.send(leave=Leave())
            for device in honest:
                plan = await device.plan()
                assert PARTS <= quota_of(plan) <= NUM_EXAMPLES
                await device.update(plan)
            await run.end()
            assert [client.name for client in run.rows[0].clients] == ["first", "second"]
            assert run.rows[0].num_bounded == num_bounded

    asyncio.run(play())


def test_who_is_left_out_and_never_answers_does_not_hold_up_the_others() -> None:
    async def play() -> None:
        options: dict[str, Any] = {"effective_batch_size": 16, "deadline": 10.0, "rounds": 3}
        async with cohort("slow", "honest", **options) as (run, slow, honest):
            await slow.describe(seconds_per_micro_batch=0.0, seconds_per_example=60.0)
            await honest.describe(**PACE)
            asked = (await slow.next_of("instruction")).instruction
            why = "one example takes 60.0 s of its 9.0 s"
            assert asked.message_type == "query.describe"
            assert json.loads(asked.head_json)["left_out"] == why
            for _ in range(3):
                await honest.update(await honest.plan())
            await run.end()
            assert [row.left_out for row in run.rows] == [{"slow": why}] * 3
            assert run.refusals == {}

    asyncio.run(play())


def test_who_is_left_out_and_says_that_it_is_fast_now_takes_part_in_the_next_round() -> None:
    async def play() -> None:
        options: dict[str, Any] = {"effective_batch_size": 16, "deadline": 10.0, "rounds": 2}
        async with cohort("slow", "honest", **options) as (run, slow, honest):
            await slow.describe(seconds_per_micro_batch=0.0, seconds_per_example=60.0)
            await honest.describe(**PACE)
            await slow.describe(**PACE)
            await slow.next_of("receipt")  # the server has it before the round can end
            await honest.update(await honest.plan())
            plans = [await device.plan() for device in (slow, honest)]
            assert sum(map(quota_of, plans)) == 16
            for device, plan in zip((slow, honest), plans, strict=True):
                await device.update(plan, num_examples=1, weight=1)
            await run.end()
            assert [len(row.clients) for row in run.rows] == [1, 2]
            assert run.rows[1].left_out == {}

    asyncio.run(play())


def test_vitals_that_lie_in_an_update_leave_the_others_their_quotas() -> None:
    async def play() -> None:
        async with cohort("attacker", "honest", effective_batch_size=16, rounds=2) as (
            run,
            attacker,
            honest,
        ):
            for device in (attacker, honest):
                await device.describe(**PACE)
            lie = {"share": 5e-324, "memory_limit_bytes": 0, "bytes_per_example": 1e99}
            steps = step(seconds=0.008)
            await attacker.update(await attacker.plan(), vitals=lie, num_left=2**53, **steps)
            await honest.update(await honest.plan(), **steps)
            assert quota_of(await attacker.plan()) == 1
            await attacker.send(leave=Leave())
            plan = await honest.plan()
            assert quota_of(plan) == 15
            await honest.update(plan)
            await run.end()

    asyncio.run(play())


def test_who_claims_to_own_everything_weighs_a_thousand_median_devices_and_no_other_weight() -> (
    None
):
    async def play() -> None:
        names = ("attacker", "first", "second")
        async with cohort(*names, weighting="dataset") as (run, attacker, *honest):
            await attacker.describe(num_examples=2**40)
            for device in honest:
                await device.describe()
            plan = await attacker.plan()
            assert json.loads(plan.head_json)["weigh_as"] == 1000 * NUM_EXAMPLES
            await attacker.update(plan, weight=2**40)
            for device in honest:
                plan = await device.plan()
                assert json.loads(plan.head_json)["weigh_as"] == NUM_EXAMPLES
                await device.update(plan, weight=NUM_EXAMPLES)
            await run.end()
            assert run.rows[0].refused["attacker"].startswith("CountOutOfRange")
            assert run.rows[0].weight == 2 * NUM_EXAMPLES
            assert run.rows[0].num_bounded == 1

    asyncio.run(play())


def test_a_device_that_never_says_what_it_is_does_not_hold_up_the_others(model: bytes) -> None:
    async def play() -> None:
        async with cohort("silent", "honest", silent_seconds=0.5) as (
            run,
            silent,
            honest,
        ):
            await honest.describe()
            assert (await silent.next_of("instruction")).instruction.message_type
            await be_honest(run, honest)
            assert run.refusals["LateUpdate"] == 1
            assert run.model() == model

    asyncio.run(play())


def test_a_device_that_leaves_before_it_is_known_may_come_back() -> None:
    async def play() -> None:
        async with cohort("honest") as (run, first):
            await first.next_of("instruction")
            await first.send(leave=Leave())
            with pytest.raises(EOFError):
                await first.next()
            async with RawDevice(run.port, "honest") as again:
                await again.enter()
                await again.describe()
                await be_honest(run, again)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("code", "noted"),
    [("WorkingHours", "WorkingHours"), ("x" * 100_000, "HeadwaterError"), ("\0", "HeadwaterError")],
)
def test_a_device_may_say_why_it_leaves_for_a_while_and_no_more(code: str, noted: str) -> None:
    async def play() -> None:
        async with cohort("away", "honest") as (run, away, honest):
            await away.describe()
            await honest.describe()
            await away.plan()
            await away.send(leave=Leave(code=code, text="y" * 100_000))
            await away.end()
            await be_honest(run, honest)
            assert run.refusals == {noted: 1}
            told = run.rows[0].refused["away"]
            assert told.startswith(f"{noted}: ")
            assert len(told) < 1200
            (device,) = (one for one in run.intake.attendance.devices() if one.name == "away")
            assert device.refusal_code == noted
            assert len(device.refusal_text or "") <= MOST_REASON

    asyncio.run(play())


# What it sends as its update.


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


def step(**changes: Any) -> dict[str, Any]:
    honest = {
        "num_examples": 8,
        "weight": 8,
        "loss": 0.5,
        "gradient_norm": 1.0,
        "seconds": 0.1,
        "peak_bytes": 1,
    }
    return {"steps": [honest | changes]}


UPDATES = {
    "more examples than asked for": (head(num_examples=9), "CountOutOfRange"),
    "10^18 examples": (head(num_examples=10**18), "CorruptUpdate"),
    "2^53 examples": (head(num_examples=2**53), "CountOutOfRange"),
    "no example": (head(num_examples=0), "CountOutOfRange"),
    "-1 examples": (head(num_examples=-1), "CorruptUpdate"),
    "NaN examples": (head(num_examples=float("nan")), "CorruptUpdate"),
    "more weight than examples": (head(weight=9), "CountOutOfRange"),
    "no weight": (head(weight=0), "CountOutOfRange"),
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
def test_a_hostile_update_is_refused_and_the_round_goes_on(
    attack: UpdateAttack, code: str, model: bytes
) -> None:
    async def play() -> None:
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
            assert run.intake.staged_bytes == 0

    asyncio.run(play())


def test_a_chunk_of_nothing_announced_is_left_aside(model: bytes) -> None:
    async def play() -> None:
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

    asyncio.run(play())


def test_a_reply_that_nobody_asked_for_is_refused(model: bytes) -> None:
    async def play() -> None:
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

    asyncio.run(play())


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


def test_an_update_of_the_last_round_does_not_count_in_the_next() -> None:
    async def play() -> None:
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

    asyncio.run(play())


def test_an_update_behind_the_deadline_is_told_so(model: bytes) -> None:
    async def play() -> None:
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

    asyncio.run(play())


def test_an_upload_that_stands_still_is_given_up(model: bytes) -> None:
    async def play() -> None:
        async with cohort("slow", "honest", reconnect_seconds=0.5) as (run, slow, honest):
            await slow.describe()
            await honest.describe()
            plan = await slow.plan()
            await slow.reply(plan, head_of(plan, "slow"), b"", num_bytes=len(VECTOR))
            await slow.chunk(plan, 0, VECTOR[:20])
            assert (await slow.fault()).code == "LateUpdate"
            await be_honest(run, honest)
            assert run.model() == model

    asyncio.run(play())


def test_a_device_that_floods_the_server_and_does_not_read_is_sent_away(
    model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.intake.MAX_OUTBOX_FRAMES", 50)

    async def play() -> None:
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

    asyncio.run(play())


def test_a_device_that_fails_in_its_own_words_cannot_fill_the_journal(model: bytes) -> None:
    async def play() -> None:
        async with cohort("attacker", "honest") as (run, attacker, honest):
            await attacker.describe()
            await honest.describe()
            plan = await attacker.plan()
            fault = {"message_id": plan.message_id, "code": "c" * 100_000, "text": "t" * 100_000}
            await attacker.send(fault=fault)
            await be_honest(run, honest)
            assert len(json.dumps(run.rows[0].refused)) < 2000
            assert run.model() == model

    asyncio.run(play())


def test_two_losses_that_overflow_their_sum_do_not_end_the_evaluation() -> None:
    async def play() -> None:
        names = ("first", "second", "honest")
        async with cohort(*names, on_devices=True) as (run, *devices):
            for device in devices:
                await device.describe()
            for device in devices:
                await device.update(await device.plan())
            for device in devices:
                asked = await device.plan()
                loss = 1.0 if device.name == "honest" else 1.7e308
                report = {"name": device.name, "weight": 2, "loss_sum": loss}
                await device.reply(asked, json.dumps(report))
            await run.end()
            assert run.rows[0].metrics["held_out_loss"] == 0.5

    asyncio.run(play())


def test_a_port_scanner_changes_nothing(model: bytes) -> None:
    async def play() -> None:
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

    asyncio.run(play())
