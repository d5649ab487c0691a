"""An operator's day with real processes: scrape, pause, resume, drain, and go on exactly."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater import __version__
from headwater.server.operations.run_lock import FILE
from headwater.server.operations.status import read_status
from tests.processes import (
    Process,
    Processes,
    assert_tidy,
    model_digest,
    port_of,
    rows,
    until,
    write_task,
)

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 1, "--micro-batch-size", 8, "--min-clients", 2)
METRICS = ("--metrics", "127.0.0.1:0")
MANY = 100_000


def scrape(process: Process, side: str) -> dict[str, float]:
    """Return a process's metrics; of those with labels the sum."""
    url = process.wait_for(r"metrics at (\S+)").group(1)
    with urllib.request.urlopen(url, timeout=30) as answer:
        page = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix(f"headwater_{side}_")
            found[name] = found.get(name, 0.0) + sample.value
    return found


class Operator:
    """Gives commands about one run."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._out = processes.folder / "out"

    def say(self, command: str, *more: object) -> Process:
        said = self._processes.run("server", command, "--out", self._out, *more)
        assert_tidy(said)
        return said

    def status(self) -> dict[str, Any]:
        said = self.say("status", "--json")
        told: dict[str, Any] = json.loads(said.text())
        assert said.wait() == (0 if told["is_well"] or told["is_finished"] else 1)
        return told

    def wait_for(self, stands: str) -> dict[str, Any]:
        def seen() -> dict[str, Any]:
            is_there = (self._out / FILE).exists()
            return read_status(self._out) if is_there else {}

        until(lambda: seen().get("stands") == stands, what=lambda: str(seen()))
        return self.status()


def test_a_run_is_watched_paused_drained_and_goes_on_exactly(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=2)
    with Processes(tmp_path) as processes:
        operator = Operator(processes)
        server = processes.server("--rounds", MANY, *PLAN, *METRICS, task=task.spec)
        port = port_of(server)
        clients = [processes.client(port, i, *METRICS, task=task.spec) for i in range(2)]

        # Device 0 is in the middle of a round, which a pause does not cut off.
        task.wait_until_reached()
        assert "pausing: the round in progress ends first" in operator.say("pause").text()
        clients[0].wait_for("has paused the run")
        assert operator.status()["stands"] == "pausing"
        task.open()
        paused = operator.wait_for("paused")
        assert paused["num_connected"] == 2
        assert [device["accumulation_steps"] for device in paused["devices"]] == [1, 1]
        assert [device["version"] for device in paused["devices"]] == [__version__] * 2
        for client in clients:  # the last round's receipt may still be on its way
            until(
                lambda client=client: scrape(client, "client")["updates_total"] == paused["round"],  # type: ignore[misc]
                what=client.text,
            )
        found = scrape(server, "server")
        assert (found["is_paused"], found["connected_devices"]) == (1, 2)
        assert found["rounds_total"] == paused["round"]
        assert found["examples_total"] == 16 * paused["round"]
        # A second server does not get at the run.
        second = processes.server("--resume", task=task.spec)
        assert second.wait() == 2
        assert "another process writes here" in second.text()
        for client in clients:
            told = scrape(client, "client")
            assert told["is_connected"] == 1
            assert told["examples_total"] == 8 * paused["round"]
        own = [scrape(client, "client") for client in clients]
        assert found["received_bytes_total"] == sum(told["sent_bytes_total"] for told in own)
        assert found["sent_bytes_total"] == sum(told["received_bytes_total"] for told in own)

        assert "resumed" in operator.say("unpause").text()
        clients[0].wait_for("the run continues")
        until(
            lambda: scrape(server, "server")["rounds_total"] > paused["round"],
            what=lambda: "a round after the pause",
        )

        operator.say("drain")
        for process in (server, *clients):
            process.succeed()
        for client in clients:  # the first update's line, and the first round's
            assert "round 1: sent K 1, 8 examples" in client.text()
        assert f"round {1:>6} of {MANY}  loss" in server.text()
        drained = rows(tmp_path / "out")[-1]["round"]
        assert f"drained after round {drained} of {MANY}" in server.text()
        assert "headwater-server --resume --out" in server.text()
        assert operator.status()["stands"] == "down"

        num_rounds = drained + 2
        again = processes.server("--resume", "--rounds", num_rounds, task=task.spec)
        port = port_of(again)
        for process in [processes.client(port, i, task=task.spec) for i in range(2)]:
            process.succeed()
        again.succeed()
        ended = operator.status()
        assert (ended["stands"], ended["is_up"]) == ("finished", False)
        assert ended["round"] == ended["last_round"]["round"] == num_rounds
        kinds = [event["kind"] for event in reversed(ended["events"])]
        day = ["started", "pause", "resume", "drain", "ended", "started", "ended"]
        assert kinds == day

        out = tmp_path / "simulated"
        more = ("--clients", 2, "--threads", 1, "--out", out, "--task", task.spec)
        processes.run("simulation", "--rounds", num_rounds, *PLAN, *more).succeed()
        assert model_digest(tmp_path / "out") == model_digest(out)


def test_a_paused_server_begins_no_round_however_many_devices_come(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        operator = Operator(processes)
        server = processes.server("--rounds", 2, *PLAN, task=task)
        port = port_of(server)
        operator.wait_for("waiting")
        operator.say("pause")
        clients = [processes.client(port, i, task=task) for i in range(2)]
        for client in clients:
            client.wait_for("has paused the run")
        assert operator.status()["round"] == 0
        operator.say("resume")
        for process in (server, *clients):
            process.succeed()


def test_a_server_that_waits_for_devices_is_drained_at_once(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        operator = Operator(processes)
        server = processes.server("--rounds", 2, task=task)
        port_of(server)
        operator.wait_for("waiting")
        operator.say("drain")
        server.succeed()
        assert "drained after round 0 of 2" in server.text()


@pytest.mark.parametrize("side", ["server", "client"])
def test_metrics_beyond_this_machine_are_refused(side: str, tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    wide = ("--metrics", "0.0.0.0:0")
    with Processes(tmp_path) as processes:
        if side == "server":
            process = processes.server(*wide, task=task)
        else:
            process = processes.client(1, 0, *wide, task=task)
        assert process.wait() == 2
        assert "InsecureAddress" in process.text()
        assert "metrics are plain text" in process.text()
