"""The gRPC grid measures the server's seconds for one update."""

from __future__ import annotations

import asyncio
import time

import pytest

from headwater.common.errors import TermEnded
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.flower.grpc_grid import TURN_WEIGHT, GrpcGrid
from tests.attacks.raw import RUN_ID, RawDevice, Run, serving

pytestmark = pytest.mark.slow  # sockets

FOLD_SECONDS = 0.05


def one_round(run: Run, fleet: GridFleet, *, fold_seconds: float) -> None:
    """Request an update from each connected device, and spend ``fold_seconds`` on each."""
    planner = run.training.planner
    clients = fleet.describe(planner.describe_request(), min_clients=1)
    planned = planner.plan(clients, round_number=1, counted={}, turn_seconds=0.0)
    for _ in fleet.train(planned.plans, run.training.image, timeout_seconds=None):
        time.sleep(fold_seconds)


async def test_a_turn_is_the_time_between_an_update_and_the_next_request() -> None:
    async with serving() as run, RawDevice(run.port, "device") as device:
        await device.enter()
        grid = GrpcGrid(run.servicer)
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
        # A moving average: a turn of zero seconds reduces it by its weight at most.
        assert seen[1] >= seen[0] * (1 - TURN_WEIGHT)


async def test_a_server_whose_term_has_ended_waits_for_no_answer_of_asynchronous_rounds() -> None:
    def end_term() -> None:
        raise TermEnded("another server has the run")

    async with serving() as run:
        grid = GrpcGrid(run.servicer)
        grid.enter_run(RUN_ID)
        grid.check_term = end_term
        with pytest.raises(TermEnded):
            await asyncio.to_thread(grid.next_reply, timeout=0.0)
