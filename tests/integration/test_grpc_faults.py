"""Devices, servers and connections that go in mid-round, and come back."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from headwater.server.operations import orders
from tests.chaos.proxy import Proxy
from tests.faults import FaultPlan
from tests.processes import (
    GatedTask,
    Processes,
    assert_tidy,
    free_port,
    hold_rounds,
    model_digest,
    port_of,
    release_rounds,
    rows,
    until,
    write_task,
)

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 3, "--micro-batch-size", 8)
SETTINGS = ("--rounds", 4, "--optimizer", "adam", "--learning-rate", 0.01, *PLAN)
BOTH = ("--min-clients", 2)

# Device 0 does three micro-batches in round 1, and stops in its second one of round 2.
IN_ROUND_TWO = 4


def unbroken(
    processes: Processes, task: GatedTask, *, clients: int, settings: tuple[object, ...] = SETTINGS
) -> str:
    """Return the digest of the model of a run in which nothing goes wrong."""
    task.open()
    out = processes.folder / "unbroken"
    more = ("--clients", clients, "--threads", 1, "--out", out, "--task", task.spec)
    processes.run("simulation", *settings, *more).succeed()
    return model_digest(out)


def test_a_device_that_was_killed_goes_on_at_its_place(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=IN_ROUND_TWO)
    with Processes(tmp_path) as processes:
        server = processes.server(*SETTINGS, *BOTH, task=task.spec)
        killed, other = (processes.client(port_of(server), i, task=task.spec) for i in range(2))
        task.wait_until_reached()
        killed.kill()
        killed.wait()
        again = processes.client(port_of(server), 0, task=task.spec)
        task.open()
        for process in (server, again, other):
            process.succeed()
        assert model_digest(tmp_path / "out") == unbroken(processes, task, clients=2)


def test_a_device_that_is_asked_to_stop_sends_what_it_has(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=2)
    work = ("--accumulation-steps", 6, "--micro-batch-size", 8)
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 1, *work, *BOTH, task=task.spec)
        stopped, other = (processes.client(port_of(server), i, task=task.spec) for i in range(2))
        task.wait_until_reached()
        stopped.kill(signal.SIGTERM)
        stopped.wait_for("stopping: what is summed")
        task.open()
        for process in (stopped, server, other):
            process.succeed()
        clients = {client["name"]: client for client in rows(tmp_path / "out")[0]["clients"]}
    assert clients["0"]["accumulation_steps"] == 3
    assert clients["0"]["num_examples"] == 24
    assert clients["0"]["reason"] == "asked to stop"
    assert clients["1"]["accumulation_steps"] == 6


def test_a_device_that_left_does_not_end_the_evaluation_of_the_others(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=2)
    settings = ("--rounds", 1, *PLAN, *BOTH, "--evaluate-on-devices")
    with Processes(tmp_path) as processes:
        server = processes.server(*settings, task=task.spec)
        stopped, other = (processes.client(port_of(server), i, task=task.spec) for i in range(2))
        task.wait_until_reached()
        stopped.kill(signal.SIGTERM)
        stopped.wait_for("stopping: what is summed")
        task.open()
        for process in (stopped, server, other):
            process.succeed()
        assert "held_out_loss" in rows(tmp_path / "out")[0]["metrics"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_comes_back_ends_with_the_same_model(
    number: signal.Signals, tmp_path: Path
) -> None:
    task = write_task(tmp_path, open_for=IN_ROUND_TWO)
    port = free_port()
    listen = ("--listen", f"127.0.0.1:{port}")
    with Processes(tmp_path) as processes:
        server = processes.server(*SETTINGS, *BOTH, *listen, task=task.spec)
        port_of(server)
        clients = [processes.client(port, i, task=task.spec) for i in range(2)]
        task.wait_until_reached()
        server.kill(number)
        status = server.wait()
        assert status == (-number if number == signal.SIGKILL else 130)
        assert_tidy(server)
        resumed = processes.server(*SETTINGS, *BOTH, *listen, "--resume", task=task.spec)
        port_of(resumed)
        task.open()
        for process in (resumed, *clients):
            process.succeed()
        assert [row["round"] for row in rows(tmp_path / "out")] == [1, 2, 3, 4]
        assert model_digest(tmp_path / "out") == unbroken(processes, task, clients=2)


HIDDEN = 300_000
VECTOR_BYTES = 4 * (7 * HIDDEN + 2)  # 8.4 MB


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(FaultPlan().cut(after_bytes=3_000_000, way="up"), id="in mid-upload"),
        pytest.param(FaultPlan().cut(after_bytes=3_000_000, way="down"), id="in mid-download"),
        pytest.param(
            FaultPlan()
            .cut(after_bytes=5_000_000, way="down")
            .cut(after_bytes=2_500_000, way="up", connection=1)
            .cut(after_bytes=5_000_000, way="up", connection=2),
            id="again and again",
        ),
    ],
)
def test_a_connection_that_is_cut_changes_no_bit_of_the_model(
    plan: FaultPlan, tmp_path: Path
) -> None:
    task = write_task(tmp_path, hidden=HIDDEN)
    settings = (*SETTINGS, "--rounds", 2)
    with Processes(tmp_path) as processes:
        server = processes.server(*settings, task=task.spec)
        with Proxy(port_of(server), plan) as proxy:
            client = processes.client(proxy.port, 0, task=task.spec)
            for process in (server, client):
                process.succeed()
        assert proxy.has_struck
        assert proxy.num_connections == len(plan.blows) + 1
        found = rows(tmp_path / "out")
        expected = unbroken(processes, task, clients=1, settings=settings)
        assert model_digest(tmp_path / "out") == expected
    # An upload goes on where it broke: nothing that had come is sent twice.
    for row in found:
        assert VECTOR_BYTES < row["bytes_up"] < VECTOR_BYTES + 100_000


def test_a_device_that_misses_the_deadline_is_left_out_and_comes_back(tmp_path: Path) -> None:
    task, out = write_task(tmp_path, open_for=0), tmp_path / "out"
    config = tmp_path / "settings.toml"
    config.write_text("[cohort]\nmax_aborted_rounds = 1000\n")
    settings = ("--rounds", 100_000, *PLAN, "--deadline", 2, "--config", config, "--verbose")
    with Processes(tmp_path) as processes:
        hold_rounds(out)
        server = processes.server(*settings, task=task.spec)
        late, other = (processes.client(port_of(server), i, task=task.spec) for i in range(2))
        release_rounds(out, server, joined=range(2))
        until(lambda: rows(out) != [], what=lambda: f"a round:\n{server.text()}")
        task.open()
        until(lambda: rows(out)[-1]["num_clients"] == 2, what=lambda: f"both:\n{server.text()}")
        orders.write_order(out, "drain")
        for process in (server, late, other):
            process.succeed()
        found = rows(out)
    assert found[0]["refused"]["0"].startswith("LateUpdate")
    assert [client["name"] for client in found[0]["clients"]] == ["1"]
    assert found[0]["num_clients"] == 1
    assert "LateUpdate" in late.text()


def test_a_round_with_too_few_devices_does_not_count(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=0)
    config = tmp_path / "settings.toml"
    config.write_text("[cohort]\nmax_aborted_rounds = 2\n")
    settings = (*SETTINGS, *BOTH, "--deadline", 0.5, "--config", config)
    with Processes(tmp_path) as processes:
        server = processes.server(*settings, task=task.spec)
        clients = [processes.client(port_of(server), i, task=task.spec) for i in range(2)]
        assert server.wait() == 1
        task.open()
        for client in clients:
            client.succeed()
    # On a busy machine the other device may be late as well.
    assert re.search("TooFewClients: round 1: [01] of 2 clients", server.text())
    assert rows(tmp_path / "out") == []
    assert_tidy(server)


def test_a_device_that_stays_waits_for_a_server_and_for_the_next(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    port = free_port()
    listen = ("--listen", f"127.0.0.1:{port}")
    with Processes(tmp_path) as processes:
        client = processes.client(port, 0, "--stay", task=task.spec)
        client.wait_for("trying again")
        for name in ("first", "second"):
            out = ("--out", tmp_path / name)
            processes.server(*SETTINGS, *listen, *out, task=task.spec).succeed()
        client.kill(signal.SIGTERM)
        client.succeed()
        expected = unbroken(processes, task, clients=1)
    assert model_digest(tmp_path / "first") == model_digest(tmp_path / "second") == expected
