"""An aggregator whose lists name other devices each time: a run forgets them, and bounds them."""

from __future__ import annotations

import asyncio
import json

import pytest

from headwater.common.messages import DeviceReport
from headwater.common.tree.branch_messages import Members
from headwater.server.tree import branches
from headwater.server.tree.branch_wire import members_payload
from tests.attacks.raw import NUM_EXAMPLES, RawDevice, cohort, layout_digest

NAME = "aggregator"
NUM_NAMES = 100
NUM_ROUNDS = 5


async def lie(aggregator: RawDevice, num_lists: int) -> None:
    """List new devices each time, and answer their plans with nothing; leave after the last."""
    made_up = {"num_examples": 8, "layout_digest": layout_digest()}
    await aggregator.describe(num_examples=None, is_aggregator=True)
    while num_lists:
        instruction = await aggregator.plan()
        vector = b""
        if instruction.message_type.startswith("query"):
            names = (f"made-up-{num_lists}-{number}" for number in range(NUM_NAMES))
            devices = tuple(DeviceReport.model_validate({"name": n, **made_up}) for n in names)
            _, vector = members_payload(NAME, Members(devices=devices))
            num_lists -= 1
        await aggregator.reply(instruction, json.dumps({"name": NAME}), vector)
    aggregator._call.cancel()


async def play(*, max_population: int, leaves: bool = True) -> None:
    settings = {"server.aggregators": NAME}
    how = {"rounds": NUM_ROUNDS + 3, "settings": settings, "return_seconds": 0.1}
    async with cohort("honest", NAME, **how) as (run, honest, aggregator):
        lying = asyncio.create_task(lie(aggregator, NUM_ROUNDS if leaves else 10**6))
        await honest.describe(num_examples=NUM_EXAMPLES)
        largest = 0
        for _ in range(NUM_ROUNDS + 3):
            await honest.update(await honest.plan())
            largest = max(largest, run.training.population)
        if leaves:
            await lying
        else:
            lying.cancel()
        await run.end()
        assert [row.num_clients for row in run.rows] == [1] * (NUM_ROUNDS + 3)
        assert NUM_NAMES < largest <= max_population
        assert list(run.training.planner.known) == ["honest"]


def test_devices_that_were_in_no_sum_are_forgotten_when_they_leave() -> None:
    """5,000 of them a round took rounds from 17 to 0.3 a second, and stayed in each checkpoint."""
    asyncio.run(play(max_population=1 + NUM_NAMES))


def test_an_aggregator_names_a_limited_number_of_devices_in_a_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(branches, "MAX_NAMES", 2 * NUM_NAMES)
    # The third is refused, and the next asked for later each time: to read it costs.
    asyncio.run(play(max_population=1 + NUM_NAMES, leaves=False))
    assert (
        f"AggregatorRefused: 300 names in this run, expected at most {2 * NUM_NAMES}" in caplog.text
    )
