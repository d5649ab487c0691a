"""What the grid of our own stream measures of the rounds that use it."""

from __future__ import annotations

import asyncio
import time

from headwater.server.app import GridFleet
from headwater.server.flower.grpc_grid import TURN_WEIGHT, GrpcGrid
from tests.attacks.raw import RUN_ID, RawDevice, Run, serving

FOLD_SECONDS = 0.05


def one_round(run: Run, fleet: GridFleet, *, fold_seconds: float) -> None:
    """Ask whoever is there for an update, and take so long over each."""
    planning = run.training.planning
    reports = fleet.describe(planning.describe_request(), min_clients=1)
    planned = planning.plan(reports, round_number=1, counted={}, turn_seconds=0.0)
    for _ in fleet.train(planned.plans, run.training.image, timeout_seconds=None):
        time.sleep(fold_seconds)


def test_a_turn_is_what_the_rounds_take_over_one_update() -> None:
    async def play() -> None:
        async with serving() as run, RawDevice(run.port, "device") as device:
            await device.enter()
            grid = GrpcGrid(run.intake)
            grid.enter_run(RUN_ID)
            fleet = GridFleet(grid)
            assert fleet.turn_seconds() == 0.0
            seen: list[float] = []
            for fold_seconds in (FOLD_SECONDS, 0.0):
                work = asyncio.create_task(
                    asyncio.to_thread(one_round, run, fleet, fold_seconds=fold_seconds)
                )
                if not seen:
                    await device.describe()
                await device.update(await device.plan())
                await work
                seen.append(fleet.turn_seconds())
            assert seen[0] >= FOLD_SECONDS
            # A running mean: a turn of no time at all takes off its weight, and one more does less.
            assert seen[1] >= seen[0] * (1 - TURN_WEIGHT)

    asyncio.run(play())
