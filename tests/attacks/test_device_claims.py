"""False claims of an admitted device about itself cost other devices little or nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.common.transport.wire_pb2 import Instruction, Leave
from headwater.server.flower import registration
from headwater.server.transport.device_records import MAX_REASON_CHARACTERS
from tests.attacks.raw import (
    NUM_EXAMPLES,
    RawDevice,
    be_honest,
    cohort,
    step,
)


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
async def test_a_false_device_report_is_refused(lie: dict[str, Any], model: bytes) -> None:
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await attacker.describe(**lie)
        await honest.describe()
        code = (await attacker.fault()).code
        assert code in ("CorruptUpdate", "IdentityRefused")
        assert run.refusals == {code: 1}
        await be_honest(run, honest)
        assert run.model() == model


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
async def test_an_implausible_claim_neither_starves_nor_delays_other_devices(
    claim: dict[str, Any], num_bounded: int
) -> None:
    """For any claim of one device, each honest device keeps its quota of ten examples."""
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


async def test_a_left_out_device_that_never_answers_does_not_delay_the_round() -> None:
    options: dict[str, Any] = {"effective_batch_size": 16, "deadline": 10.0, "rounds": 3}
    async with cohort("slow", "honest", **options) as (run, slow, honest):
        await slow.describe(seconds_per_micro_batch=0.0, seconds_per_example=60.0)
        await honest.describe(**PACE)
        instruction = (await slow.next_of("instruction")).instruction
        why = "one example takes 60.0 s of its 9.0 s"
        assert instruction.message_type == "query.describe"
        assert json.loads(instruction.head_json)["left_out"] == why
        for _ in range(3):
            await honest.update(await honest.plan())
        await run.end()
        assert [row.left_out for row in run.rows] == [{"slow": why}] * 3
        assert run.refusals == {}


async def test_a_left_out_device_that_reports_higher_speed_joins_the_next_round() -> None:
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


async def test_false_vitals_in_an_update_do_not_change_other_devices_quotas() -> None:
    async with cohort("attacker", "honest", effective_batch_size=16, rounds=2) as (
        run,
        attacker,
        honest,
    ):
        for device in (attacker, honest):
            await device.describe(**PACE)
        lie = {"share": 5e-324, "memory_limit_bytes": 0, "bytes_per_example": 1e99}
        steps = step(seconds=0.008)
        await attacker.update(await attacker.plan(), vitals=lie, **steps)
        await honest.update(await honest.plan(), **steps)
        assert quota_of(await attacker.plan()) == 1
        await attacker.send(leave=Leave())
        plan = await honest.plan()
        assert quota_of(plan) == 15
        await honest.update(plan)
        await run.end()


async def test_a_claimed_dataset_size_is_capped_at_a_thousand_medians() -> None:
    names = ("attacker", "first", "second")
    async with cohort(*names, weighting="dataset") as (run, attacker, *honest):
        await attacker.describe(num_examples=2**39)
        for device in honest:
            await device.describe()
        plan = await attacker.plan()
        assert json.loads(plan.head_json)["weigh_as"] == 1000 * NUM_EXAMPLES
        await attacker.update(plan, weight=2**39)
        for device in honest:
            plan = await device.plan()
            assert json.loads(plan.head_json)["weigh_as"] == NUM_EXAMPLES
            await device.update(plan, weight=NUM_EXAMPLES)
        await run.end()
        assert run.rows[0].refused["attacker"].startswith("CountOutOfRange")
        assert run.rows[0].weight == 2 * NUM_EXAMPLES
        assert run.rows[0].num_bounded == 1


async def test_a_device_that_never_describes_itself_delays_the_first_round_by_seconds_alone(
    model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "PATIENCE_SECONDS", 0.5)
    async with cohort("silent", "honest") as (run, silent, honest):
        await honest.describe()
        assert (await silent.next_of("instruction")).instruction.message_type
        await be_honest(run, honest)
        assert run.model() == model


async def test_a_device_that_disconnects_before_its_description_may_return() -> None:
    async with cohort("honest") as (run, first):
        await first.next_of("instruction")
        await first.send(leave=Leave())
        with pytest.raises(EOFError):
            await first.next()
        async with RawDevice(run.port, "honest") as again:
            await again.enter()
            await again.describe()
            await be_honest(run, again)


@pytest.mark.parametrize(
    ("sent", "recorded"),
    [
        ("OutsideActiveHours", "OutsideActiveHours"),
        ("x" * 100_000, "HeadwaterError"),
        ("\0", "HeadwaterError"),
    ],
)
async def test_a_leaving_device_may_send_a_bounded_reason(sent: str, recorded: str) -> None:
    async with cohort("away", "honest") as (run, away, honest):
        await away.describe()
        await honest.describe()
        await away.plan()
        await away.send(leave=Leave(code=sent, text="y" * 100_000))
        await away.end()
        await be_honest(run, honest)
        assert run.refusals == {recorded: 1}
        reason = run.rows[0].refused["away"]
        assert reason.startswith(f"{recorded}: ")
        assert len(reason) < 1200
        (device,) = (one for one in run.servicer.device_records.devices() if one.name == "away")
        assert device.refusal_code == recorded
        assert len(device.refusal_text or "") <= MAX_REASON_CHARACTERS
