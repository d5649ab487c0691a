"""Devices whose connection ends in a round: how long the round waits, and what they hear later."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from headwater.server.transport.admission import MAX_STARTS_OVER
from tests.attacks.raw import WAIT_SECONDS, RawDevice, Run, cohort
from tests.processes import (
    Processes,
    assert_tidy,
    hold_rounds,
    port_of,
    release_rounds,
    rows,
    write_task,
)

pytestmark = pytest.mark.slow

FOREVER = 86_400  # seconds, for a wait that must not happen


def test_a_client_killed_in_mid_round_does_not_hold_the_round(tmp_path: Path) -> None:
    """Enough clients have answered, so the long wait for its return must not begin."""
    task = write_task(tmp_path, open_for=1)  # the first client stops in its second micro-batch
    config = tmp_path / "settings.toml"
    config.write_text(f"[cohort]\nreconnect_seconds = {FOREVER}\n")
    work, out = ("--accumulation-steps", 3, "--micro-batch-size", 8), tmp_path / "out"
    with Processes(tmp_path) as processes:
        hold_rounds(out)
        flags = ("--rounds", 2, *work, "--min-clients", 2, "--config", config)
        server = processes.server(*flags, "--verbose", task=task.spec)
        port = port_of(server)
        parts = ("--num-parts", 3)
        killed, *others = [processes.client(port, i, *parts, task=task.spec) for i in range(3)]
        release_rounds(out, server, joined=range(3))
        task.wait_until_reached()
        killed.kill(signal.SIGKILL)
        for process in (server, *others):
            process.succeed()
        assert_tidy(server)
    first, second = rows(out)
    assert first["num_invited"] == 3
    assert sorted(client["name"] for client in first["clients"]) == ["1", "2"]
    assert first["refused"]["0"].startswith("ConnectionLost: 0 lost its connection")
    assert first["num_aborted"] == 0
    assert second["num_invited"] == 2
    lost = server.text().index("lost the connection to 0; the round waits")
    assert server.text().index("the round goes on without 0: connection lost") > lost


async def lose(run: Run, device: RawDevice) -> None:
    """End a device's stream, and wait until the server knows."""
    device._call.cancel()
    async with asyncio.timeout(WAIT_SECONDS):
        while len(run.servicer.connected()) > 1:
            await asyncio.sleep(0.01)


async def test_a_device_that_returns_while_others_work_counts() -> None:
    async with cohort("lost", "works", return_seconds=0.1, reconnect_seconds=0.5) as (
        run,
        lost,
        works,
    ):
        await lost.describe()
        await works.describe()
        await lost.plan()
        plan = await works.plan()
        await lose(run, lost)
        await asyncio.sleep(1.5)  # longer than both limits
        async with RawDevice(run.port, "lost") as back:
            await back.enter()  # a new process, without the session's token
            await back.update(await back.plan())
            await works.update(plan)
            await run.end()
        assert sorted(client.name for client in run.rows[0].clients) == ["lost", "works"]


async def test_a_device_that_returns_too_late_hears_that_the_round_closed() -> None:
    async with cohort("lost", "works", rounds=2, return_seconds=0.1) as (run, lost, works):
        await lost.describe()
        await works.describe()
        plan = await lost.plan()
        token = run.servicer._sessions[plan_node(run, "lost")].token
        await lose(run, lost)
        await works.update(await works.plan())
        second = await works.plan()
        async with RawDevice(run.port, "lost") as back:
            await back.hello(session=token)
            fault = await back.fault()
            assert (fault.message_id, fault.code) == (plan.message_id, "LateUpdate")
            assert "a later round uses its examples" in fault.text
            await works.update(second)
            await run.end()
        assert run.rows[0].refused["lost"].startswith("ConnectionLost")
        assert [row.num_clients for row in run.rows] == [1, 1]


def plan_node(run: Run, name: str) -> int:
    (node_id,) = [s.node_id for s in run.servicer._sessions.values() if s.name == name]
    return node_id


async def test_a_device_that_starts_over_again_and_again_does_not_hold_the_round() -> None:
    """As one that the kernel kills for lack of memory whenever it trains."""
    async with cohort("dies", "works") as (run, dies, works):
        await dies.describe()
        await works.describe()
        await dies.plan()
        plan = await works.plan()
        await lose(run, dies)
        for _ in range(MAX_STARTS_OVER):
            async with RawDevice(run.port, "dies") as again:
                await again.enter()
                await again.plan()
                await lose(run, again)
        async with RawDevice(run.port, "dies") as again:
            await again.enter()
            await works.update(plan)
            await run.end()
        assert "started this round's work over 5 times" in run.rows[0].refused["dies"]
