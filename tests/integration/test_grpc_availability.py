"""Devices that their owners' settings keep away: they disconnect, report why, and return."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headwater.client.app import app as own_app
from headwater.client.energy.availability import LEAD_SECONDS, ROUND_SLACK_BYTES, Availability
from headwater.client.flower.node import Node
from headwater.client.trainer.run_trainer import run_trainer
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.transport import leaving as departure
from headwater.client.transport.lasting_connection import Connection
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.server.operations.status import read_status
from tests.processes import GatedTask, Processes, port_of, rows, until, write_task

pytestmark = pytest.mark.slow

PLAN = ("--micro-batch-size", 8, "--min-clients", 1)
NOON = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)
MIDDAY = ClientSettings(active_hours="11:00-13:00")


def move_west(hours: int) -> None:
    """Let the clock on the wall of this process be so many hours behind UTC."""
    os.environ["TZ"] = f"XXX{hours:+d}"
    time.tzset()


# Where it is about noon.
HOURS_BEHIND = time.gmtime().tm_hour - 12
be_at_noon = partial(move_west, HOURS_BEHIND)
ABOUT_NOON = dt.timezone(dt.timedelta(hours=-HOURS_BEHIND))


class WallClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.shows = NOON

    def now(self) -> dt.datetime:
        return self.shows


def trainer_in_use(task: GatedTask) -> Trainer:
    return run_trainer(Settings(task=task.spec))


def device(
    task: GatedTask, port: int, clock: WallClock, chosen: ClientSettings, folder: Path
) -> Connection:
    """Return device 0, in this process, with a clock of its own."""
    settings = Settings(task=task.spec, threads=1, client=chosen)
    trainer = trainer_in_use(task)
    identity = Identity(name="0", data=None, part=0, num_parts=2)
    trainer.examples(identity)
    layout = trainer.image.layout
    absence = Availability(
        chosen,
        name="0",
        image_bytes=layout.num_bytes,
        vector_bytes=4 * layout.num_parameters,
        now=clock.now,
        zone=dt.UTC,
    )
    return Connection(
        Node(own_app, trainer, identity, settings, folder),
        [f"127.0.0.1:{port}"],
        certificate=None,
        limits=absence,
        patience_seconds=60,
    )


def seen(out: Path) -> dict[str, Any]:
    """Return what the server knows of device 0."""
    devices: list[dict[str, Any]] = read_status(out)["devices"]
    return devices[0] if devices else {"refusal_code": None}


def test_a_device_sends_a_partial_update_before_its_hours_end_and_returns_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departure, "MAX_WAIT_SECONDS", 0.05)
    task, out, clock = write_task(tmp_path, open_for=2), tmp_path / "out", WallClock()
    with Processes(tmp_path) as processes:
        six = ("--rounds", 2, "--accumulation-steps", 6, *PLAN)
        server = processes.server(*six, "--verbose", task=task.spec)
        uplink = device(task, port_of(server), clock, MIDDAY, tmp_path / "state")

        def play() -> None:
            task.wait_until_reached()
            clock.shows = NOON + dt.timedelta(seconds=3600 - LEAD_SECONDS)
            until(
                trainer_in_use(task).stop_requested.is_set,
                what=lambda: "the device to stop summing",
            )
            task.open()
            server.wait_for("0 left for a while: OutsideActiveHours")
            until(lambda: seen(out)["refusal_code"] is not None, what=lambda: "it to be noted")
            clock.shows = NOON + dt.timedelta(hours=22, minutes=59, seconds=59)
            told = seen(out)
            assert told["refusal_code"] == "OutsideActiveHours"
            assert "until 2026-11-22T11:00+00:00" in told["refusal_text"]
            assert not told["is_connected"]
            assert len(rows(out)) == 1
            clock.shows = NOON + dt.timedelta(hours=23)

        async def both() -> None:
            running = asyncio.create_task(uplink.run())
            await asyncio.to_thread(play)
            await running

        asyncio.run(both())
        server.succeed()
    first, second = (row["clients"][0] for row in rows(out))
    assert (first["num_examples"], first["reason"]) == (24, "asked to stop")
    assert second["num_examples"] == 48  # the other 26 of its 50, and 22 of the next epoch


def test_a_device_outside_its_hours_does_not_connect(tmp_path: Path) -> None:
    task, out = write_task(tmp_path).spec, tmp_path / "out"
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 2, "--accumulation-steps", 1, *PLAN, task=task)
        port = port_of(server)
        away = processes.client(
            port, 0, "--active-hours", "18:00-06:00", task=task, prepare=be_at_noon
        )
        away.wait_for("OutsideActiveHours: outside its active hours until .*T18:00")
        here = processes.client(
            port, 1, "--active-hours", "06:00-18:00", task=task, prepare=be_at_noon
        )
        for process in (here, server):
            process.succeed()
        assert [device["name"] for device in read_status(out)["devices"]] == ["1"]
        away.kill(signal.SIGTERM)
        away.succeed()


def test_a_device_without_bytes_left_stays_away_until_midnight_even_after_a_restart(
    tmp_path: Path,
) -> None:
    task, out = write_task(tmp_path, hidden=4000).spec, tmp_path / "out"
    vector = 4 * (7 * 4000 + 2)
    # Two rounds, of which the first needs no model, and not a third.
    bytes_per_day = 4 * vector + ROUND_SLACK_BYTES
    limit = ("--bytes-per-day", bytes_per_day)
    with Processes(tmp_path) as processes:
        rounds = ("--rounds", 1000, "--accumulation-steps", 1)
        server = processes.server(*rounds, *PLAN, "--verbose", task=task)
        port = port_of(server)
        first = processes.client(port, 0, *limit, task=task, prepare=be_at_noon)
        server.wait_for("0 left for a while: BytesUsedUp: .* bytes are used")
        until(lambda: seen(out)["refusal_code"] == "BytesUsedUp", what=lambda: "it to be noted")
        assert [row["num_clients"] for row in rows(out)] == [1, 1]
        first.kill(signal.SIGTERM)
        first.succeed()
        (used,) = json.loads((tmp_path / "state" / "0.bytes.json").read_text()).values()
        assert 3 * vector < used <= bytes_per_day
        assert used >= seen(out)["bytes_up"] + seen(out)["bytes_down"]  # which lack the hello
        again = processes.client(port, 0, *limit, task=task, prepare=be_at_noon)
        again.wait_for(f"BytesUsedUp: {used:,} of today's {bytes_per_day:,} bytes")
        again.kill(signal.SIGTERM)
        again.succeed()
        assert server.text().count("0 connected from") == 1
        assert len(rows(out)) == 2


def test_a_device_connects_when_its_hours_begin(tmp_path: Path) -> None:
    task, out = write_task(tmp_path).spec, tmp_path / "out"
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 1, "--accumulation-steps", 1, *PLAN, task=task)
        port = port_of(server)
        soon = dt.datetime.now(ABOUT_NOON).replace(microsecond=0) + dt.timedelta(seconds=4)
        window = ("--active-hours", f"{soon:%H:%M:%S}-22:00")
        client = processes.client(port, 0, *window, task=task, prepare=be_at_noon)
        for process in (client, server):
            process.succeed()
    assert dt.datetime.fromisoformat(seen(out)["first_seen"]) >= soon
