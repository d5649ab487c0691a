"""Asynchronous rounds over gRPC: no device waits, and a late update counts by its staleness."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.common.model.trained_model import MODEL
from headwater.server.asynchronous.staleness import TIMES_OF_FRESH, times_of
from headwater.server.operations import orders
from tests.processes import (
    Processes,
    free_port,
    port_of,
    rows,
    until,
    write_task,
)

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 3, "--micro-batch-size", 8)
SETTINGS = (*PLAN, "--asynchronous", "--max-staleness", 1_000_000)


def test_a_step_waits_for_no_slow_device_and_its_late_update_still_counts(tmp_path: Path) -> None:
    task, out = write_task(tmp_path, open_for=0), tmp_path / "out"

    def has_answered(name: str, *, times: int) -> bool:
        return sum(name in row["model_versions"] for row in rows(out)) >= times

    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 100_000, "--buffer", 1, *SETTINGS, task=task.spec)
        slow = processes.client(port_of(server), 0, task=task.spec)
        task.wait_until_reached()
        fast = processes.client(port_of(server), 1, task=task.spec)
        until(lambda: has_answered("1", times=3), what=lambda: f"three steps: {server.text()}")
        assert not has_answered("0", times=1)
        task.open()
        until(lambda: has_answered("0", times=2), what=lambda: f"the late one: {server.text()}")
        orders.write_order(out, "drain")
        for process in (server, slow, fast):
            process.succeed()
    late = next(row for row in rows(out) if "0" in row["model_versions"])
    staleness = late["round"] - 1 - late["model_versions"]["0"]
    assert late["staleness_max"] == staleness >= 3
    assert late["clients"][0]["num_examples"] == 24
    assert all(row["refused"] == {} for row in rows(out))


def test_a_buffer_of_all_devices_makes_the_model_of_synchronous_rounds(tmp_path: Path) -> None:
    task, out = write_task(tmp_path), tmp_path / "simulated"
    rounds = ("--rounds", 4, "--min-clients", 2, *PLAN)
    with Processes(tmp_path) as processes:
        server = processes.server(*rounds, "--asynchronous", "--buffer", 2, task=task.spec)
        clients = [processes.client(port_of(server), part, task=task.spec) for part in range(2)]
        for process in (server, *clients):
            process.succeed()
        more = ("--clients", 2, "--threads", 1, "--out", out, "--task", task.spec)
        processes.run("simulation", *rounds, *more).succeed()
    # The files differ in the settings that they record.
    found, expected = (load_file(folder / MODEL) for folder in (tmp_path / "out", out))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_device_that_is_killed_at_work_uses_its_examples_again(tmp_path: Path) -> None:
    task, out = write_task(tmp_path, open_for=0), tmp_path / "out"
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 100_000, "--buffer", 1, *SETTINGS, task=task.spec)
        killed = processes.client(port_of(server), 0, task=task.spec)
        task.wait_until_reached()
        killed.kill(signal.SIGKILL)
        killed.wait()
        again = processes.client(port_of(server), 0, task=task.spec)
        task.open()
        until(lambda: len(rows(out)) >= 2, what=lambda: f"two steps: {server.text()}")
        orders.write_order(out, "drain")
        server.succeed()
        again.succeed()
    assert rows(out)[0]["model_versions"] == {"0": 0}


def test_a_device_that_returns_with_several_windows_counts_for_what_it_is(tmp_path: Path) -> None:
    """Its server goes in its second plan, other servers take steps without it, then it returns."""
    task, out = write_task(tmp_path, open_for=3), tmp_path / "out"
    offline = ("--offline-windows", 5)
    settings = ("--rounds", 100_000, "--buffer", 1, *SETTINGS, *offline, "--resume")
    port = free_port()

    def has_steps(number: int) -> bool:
        return len(rows(out)) >= number

    with Processes(tmp_path) as processes:
        server = processes.server(*settings, "--listen", f"127.0.0.1:{port}", task=task.spec)
        device = processes.client(port, 0, *offline, "--verbose", task=task.spec)
        task.wait_until_reached()
        until(lambda: has_steps(1), what=lambda: f"a step: {server.text()}")
        server.kill(signal.SIGKILL)
        server.wait()
        device.wait_for("trying again")
        task.open()
        device.wait_for("5 windows are summed without a link")

        server = processes.server(*settings, task=task.spec)
        other = processes.client(port_of(server), 1, task=task.spec)
        until(lambda: has_steps(4), what=lambda: f"three more: {server.text()}")
        orders.write_order(out, "drain")
        server.succeed()
        other.succeed()
        (out / orders.FILE).unlink(missing_ok=True)
        num_before = len(rows(out))

        server = processes.server(*settings, "--listen", f"127.0.0.1:{port}", task=task.spec)
        device.wait_for("delivers 5 windows")
        until(lambda: has_steps(num_before + 2), what=lambda: f"its return: {server.text()}")
        orders.write_order(out, "drain")
        server.succeed()
        device.succeed()
    found = rows(out)
    late = found[num_before]
    staleness = num_before - 1
    assert late["num_windows"] == {"0": 5}
    assert late["model_versions"] == {"0": 1}
    assert (late["num_examples"], late["weight"]) == (5 * 24, 5 * 24)
    assert late["staleness_max"] == staleness >= 3
    assert late["discounted_weight"] == 5 * 24 * times_of(staleness, 0.5) / TIMES_OF_FRESH
    # Each of its examples is used once: its place in its data is that after all that was counted.
    counted = [row for row in found if "0" in row["model_versions"]]
    state = json.loads(next((tmp_path / "state").glob("0-*.json")).read_text())["walk"]
    last = counted[-1]["model_versions"]["0"] + 1
    place = state["pending_place" if state["pending_round"] == last else "place"]
    num_used = 50 * place["epoch"] + place["offset"] - len(place.get("skipped", ()))
    assert num_used == sum(row["num_examples"] for row in counted)


def test_masked_updates_of_one_model_are_summed_and_a_lone_late_one_is_computed_again(
    tmp_path: Path,
) -> None:
    """Device 0 is stopped in its first plan; device 3 joins later and fills the buffer."""
    size = 7  # no size that a device measures its speed with
    task, out = write_task(tmp_path, open_for=0, size=size), tmp_path / "out"
    masks = ("--secure-aggregation", "semi-honest", "--num-parts", 4)
    work = ("--accumulation-steps", 2, "--micro-batch-size", size, "--max-staleness", 1_000_000)
    rounds = ("--rounds", 100_000, "--min-clients", 3, "--asynchronous", "--buffer", 3)

    def summed(row: dict[str, Any]) -> set[str]:
        return {client["name"] for client in row["masked_clients"]}

    with Processes(tmp_path) as processes:
        server = processes.server(*rounds, *work, *masks[:2], task=task.spec)
        port = port_of(server)
        clients = [processes.client(port, part, *masks, task=task.spec) for part in range(3)]
        task.wait_until_reached()
        clients += [processes.client(port, 3, *masks, task=task.spec)]
        until(lambda: len(rows(out)) >= 3, what=lambda: f"three steps: {server.text()}")
        assert all(summed(row) == {"1", "2", "3"} for row in rows(out)[:3])
        task.open()
        until(
            lambda: any("0" in summed(row) for row in rows(out)),
            what=lambda: f"the late one: {server.text()}",
        )
        orders.write_order(out, "drain")
        for process in (server, *clients):
            assert process.wait() == 0, process.text()
    refusing = next(row for row in rows(out) if "0" in row["refused"])
    assert refusing["refused"]["0"].startswith("TooFewOfModel: 0: fewer than 3 masked updates")
    assert refusing["model_versions"]["0"] == 0
    for row in rows(out):
        assert len({row["model_versions"][name] for name in summed(row)}) == 1
        assert 0 < row["num_examples"] == row["weight"] <= 2 * size * len(summed(row))
