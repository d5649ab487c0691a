"""A server and two devices in processes of their own, held against the simulator's model."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.common.data.client_datasets import ClientDatasets
from headwater.common.data.partition_spec import parse_rule
from headwater.common.task import load_task
from headwater.server.planning.cohort import candidates_in_turn
from tests.processes import (
    Process,
    Processes,
    hold_rounds,
    model_digest,
    port_of,
    release_rounds,
    rows,
    write_task,
)

ROUNDS = ("--rounds", 4, "--min-clients", 2)
PLAN = ("--accumulation-steps", 3, "--micro-batch-size", 8)
ADAM = ("--optimizer", "adam", "--learning-rate", 0.01)

pytestmark = pytest.mark.slow


def run(processes: Processes, *settings: object, task: str, as_command: bool = False) -> None:
    """Run a server and two devices to their end."""
    server = processes.server(*settings, task=task, as_command=as_command)
    port = port_of(server)
    clients = [processes.client(port, i, task=task, as_command=as_command) for i in range(2)]
    for process in (server, *clients):
        process.succeed()


def simulated(processes: Processes, *settings: object, task: str, clients: int = 2) -> str:
    """Return the digest of the model that the simulator makes of the same settings."""
    out = processes.folder / "simulated"
    more = ("--clients", clients, "--threads", 1, "--out", out, "--task", task)
    ended: Process = processes.run("simulation", *settings, *more)
    ended.succeed()
    return model_digest(out)


def test_the_commands_make_the_simulators_model_byte_for_byte(tmp_path: Path) -> None:
    settings = (*ROUNDS, *PLAN, *ADAM)
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        run(processes, *settings, task=task, as_command=True)
        assert model_digest(tmp_path / "out") == simulated(processes, *settings, task=task)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            (*PLAN, "--local-steps", 3, "--optimizer", "sgd", "--learning-rate", 1.0),
            id="local steps",
        ),
        pytest.param((*PLAN, *ADAM, "--evaluate-on-devices"), id="held-out examples"),
        pytest.param((*PLAN, "--precision", "bfloat16"), id="bfloat16"),
    ],
)
def test_the_model_is_the_simulators_byte_for_byte(
    settings: tuple[object, ...], tmp_path: Path
) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        run(processes, *ROUNDS, *settings, task=task)
        assert model_digest(tmp_path / "out") == simulated(processes, *ROUNDS, *settings, task=task)


def test_a_cohort_of_one_makes_the_simulators_model_byte_for_byte(tmp_path: Path) -> None:
    seed = next(
        seed
        for seed in range(99)
        if next(candidates_in_turn(["0", "1"], size=1, seed=seed, round_number=1)) == "0"
    )
    settings = ("--rounds", 6, "--seed", seed, "--cohort-size", 1, *PLAN, *ADAM)
    task, out = write_task(tmp_path), tmp_path / "out"
    with Processes(tmp_path) as processes:
        hold_rounds(out)
        server = processes.server(*settings, "--verbose", task=task.spec)
        devices = [processes.client(port_of(server), part, task=task.spec) for part in range(2)]
        release_rounds(out, server, joined=range(2))  # both are there to be chosen
        for process in (server, *devices):
            process.succeed()
        chosen = {row["clients"][0]["name"] for row in rows(out)}
        assert chosen == {"0", "1"}
        assert model_digest(out) == simulated(processes, *settings, task=task.spec)


def test_uploads_through_the_spool_file_change_no_bit(tmp_path: Path) -> None:
    settings = (*ROUNDS, *PLAN, *ADAM)
    config = tmp_path / "settings.toml"
    config.write_text("[server]\nstaging_bytes = 1\n")
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        run(processes, *settings, "--config", config, task=task)
        assert model_digest(tmp_path / "out") == simulated(processes, *settings, task=task)


def test_the_planner_finishes_its_rounds_with_the_batch_it_was_asked_for(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        run(processes, *ROUNDS, "--effective-batch-size", 40, task=task)
        found = rows(tmp_path / "out")
    assert [row["num_clients"] for row in found] == [2, 2, 2, 2]
    assert found[0]["num_examples"] >= 40


def test_a_round_is_told_in_full(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        run(processes, *ROUNDS, *PLAN, *ADAM, "--evaluate-on-devices", task=task)
        found = rows(tmp_path / "out")
    assert [row["round"] for row in found] == [1, 2, 3, 4]
    row = found[0]
    assert row["num_examples"] == row["weight"] == 48
    assert row["num_clients"] == row["num_invited"] == 2
    assert row["learning_rate"] == 0.01
    assert row["refused"] == {}
    assert {"train_correct", "held_out_loss", "held_out_correct"} <= row["metrics"].keys()
    assert {"plan", "train", "fold", "step", "evaluate"} <= row["seconds_split"].keys()
    assert sum(row["seconds_split"].values()) == pytest.approx(row["seconds"])
    working = row["seconds"] - row["seconds_split"]["wait"]  # for clients to come
    assert row["updates_per_hour"] == pytest.approx(2 * 3600 / working)
    vector_bytes = 4 * (7 * 16 + 2)
    assert row["bytes_up"] > 2 * vector_bytes
    assert found[1]["bytes_down"] > 2 * vector_bytes  # the first model is not sent
    for client in row["clients"]:
        assert client["accumulation_steps"] == 3
        assert client["micro_batch_size"] == 8
        assert client["num_examples"] == client["weight"] == 24
        assert len(client["step_seconds"]) == len(client["gradient_variance"]) == 3
        assert client["seconds"] >= sum(client["step_seconds"]) > 0
        assert client["peak_bytes"] > 0
        assert client["reason"] == "quota"
    assert sorted(client["name"] for client in row["clients"]) == ["0", "1"]


def test_devices_that_a_partition_deals_to_make_the_simulators_model(tmp_path: Path) -> None:
    settings = (*ROUNDS, *PLAN, *ADAM, "--seed", 3)
    dealt = ("--partition", "dirichlet:0.5", "--seed", 3)
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        server = processes.server(*settings, task=task)
        port = port_of(server)
        clients = [processes.client(port, part, *dealt, task=task) for part in range(2)]
        for process in (server, *clients):
            process.succeed()
        found = simulated(processes, *settings, *dealt[:2], task=task)
        assert model_digest(tmp_path / "out") == found
    rule = parse_rule("dirichlet:0.5", examples_per_device=None, seed=3)
    shares = ClientDatasets(load_task(task))
    sizes = [len(shares.of(rule, data=None, part=part, num_parts=2)) for part in range(2)]
    first = {
        client["name"]: client["num_examples"] for client in rows(tmp_path / "out")[0]["clients"]
    }
    # By themselves they would have 50 and 57 examples: here they share the 50 of one.
    assert sum(sizes) == 50
    # The smaller share is less than the quota, and no example of it counts twice.
    assert min(sizes) < 24 < max(sizes)
    assert first == {str(part): min(size, 24) for part, size in enumerate(sizes)}
