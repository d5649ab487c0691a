"""An admitted device that stays connected and does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headwater.common.settings.sources import load
from headwater.server.enrolment.commands import SETTINGS_FILE, make_folder
from tests.attacks.raw import WAIT_SECONDS, cohort


async def test_a_device_that_delays_a_round_without_deadline_is_named_until_it_leaves() -> None:
    async with cohort("attacker", "honest", reconnect_seconds=0.2) as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        await attacker.plan()
        await honest.update(await honest.plan())
        async with asyncio.timeout(WAIT_SECONDS):
            while run.servicer.device_records.awaited()[0] != ["attacker"]:
                await asyncio.sleep(0.02)
        attacker._call.cancel()  # as `headwater-server revoke attacker` ends its stream
        await run.end()
        assert [client.name for client in run.rows[0].clients] == ["honest"]
        assert run.servicer.device_records.awaited()[0] == []


def test_a_server_set_up_by_init_ends_rounds_without_stalled_devices(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path, hosts=[], certificates_last=None)
    settings = load(tmp_path / SETTINGS_FILE, {})
    # test_strangers.py tests that a round with a deadline ends.
    assert settings.cohort.deadline_seconds is not None


@pytest.mark.slow
async def test_a_device_that_stalls_repeatedly_is_invited_once_in_ten_rounds() -> None:
    """Three rounds wait for it until the deadline; the following rounds do not."""
    rounds = 5
    async with cohort("attacker", "honest", rounds=rounds, deadline=2.0) as (run, *devices):
        attacker, honest = devices
        await attacker.describe()
        await honest.describe()
        for _ in range(rounds):
            await honest.update(await honest.plan())
        await run.end()
        assert [row.num_invited for row in run.rows] == [2, 2, 2, 1, 1]
        assert [row.num_clients for row in run.rows] == [1] * rounds
        assert run.rows[3].left_out == {"attacker": "it came too late 3 times in a row"}
