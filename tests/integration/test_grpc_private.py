"""Private rounds over real sockets: a budget that ends, and masks with noise."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import rho_of
from tests.processes import (
    Process,
    Processes,
    free_port,
    hold_rounds,
    port_of,
    release_rounds,
    rows,
    until,
    write_task,
)

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 2, "--micro-batch-size", 8)
MASKS = ("--secure-aggregation", "semi-honest")
Z = 2.0
ROUNDS = 8


@pytest.mark.parametrize("masks", [(), MASKS], ids=["plain", "masked"])
def test_server_and_devices_count_the_same_rounds(tmp_path: Path, masks: tuple[str, ...]) -> None:
    task = write_task(tmp_path).spec
    noise = ("--privacy-noise-multiplier", Z, "--privacy-clip-quantile", 0.5)
    with Processes(tmp_path) as processes:
        server = processes.server(
            "--rounds", 3, *PLAN, *masks, *noise, "--min-clients", 3, task=task
        )
        state = [tmp_path / f"state-{part}" for part in range(3)]
        own = [("--num-parts", 3, "--state", folder, *masks) for folder in state]
        clients = [
            processes.client(port_of(server), part, *flags, "--privacy-budget", 50, task=task)
            for part, flags in enumerate(own)
        ]
        for process in (server, *clients):
            process.succeed()
    written = rows(tmp_path / "out")
    assert [row["loss"] for row in written] == [None] * 3
    norms = [row["clip_norm"] for row in written]
    # It follows the devices' bits; their noise may take a step back.
    assert norms[0] != norms[1] != norms[2]
    rho = 3 * rho_of(Z)  # which the rounds' noise pays for
    assert written[-1]["epsilon"] <= epsilon_of(rho, delta=1e-5) * 1.01
    for part, folder in enumerate(state):
        file = folder / f"{part}.privacy.json"
        for path in (folder, *folder.rglob("*")):  # nobody but the owner reads any of it
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        spent = json.loads(file.read_text())
        assert spent["num_updates"] == 3
        assert spent["rho"] <= rho * (1 + 1e-9)


def wait_for_rounds(out: Path, number: int) -> None:
    """Wait until a server has committed so many more rounds."""
    before = len(rows(out))
    until(lambda: len(rows(out)) >= before + number, what=lambda: f"{number} rounds in {out}")


@pytest.mark.parametrize("masks", [(), MASKS], ids=["plain", "masked"])
def test_a_takeover_forgets_no_spending_of_the_server_s_and_the_devices(
    tmp_path: Path, masks: tuple[str, ...]
) -> None:
    """The server is killed again and again: what was opened and not committed is paid for too."""
    task, share = write_task(tmp_path).spec, tmp_path / "share"
    flags = ("--rounds", ROUNDS, *PLAN, *masks, "--privacy-noise-multiplier", Z, "--min-clients", 3)
    shared = ("--shared-state", share, "--term-seconds", 1)
    ports = free_port(), free_port()
    both = ",".join(f"127.0.0.1:{port}" for port in ports)
    with Processes(tmp_path) as processes:

        def start(number: int, *more: object) -> Process:
            out, listen = tmp_path / f"out{number}", f"127.0.0.1:{ports[number % 2]}"
            return processes.server(
                *(*flags, *shared, *more, "--listen", listen, "--out", out), task=task
            )

        serving = start(0)
        own = ("--server", both, "--num-parts", 3, *masks, "--privacy-budget", 50)
        clients = [
            processes.client(ports[0], part, *own, "--state", tmp_path / f"state-{part}", task=task)
            for part in range(3)
        ]
        for number in (1, 2):
            standby = start(number, "--standby")
            standby.wait_for("serves it with term")
            wait_for_rounds(tmp_path / f"out{number - 1}", 2)
            serving.kill()
            standby.wait_for("takes over from")
            serving = standby
        for process in (serving, *clients):
            process.succeed()
    out = tmp_path / "out2"
    written = rows(out)
    assert [row["round"] for row in written] == list(range(1, ROUNDS + 1))
    epsilons = [row["epsilon"] for row in written]
    assert epsilons == sorted(epsilons)
    least = 0.0 if masks else ROUNDS * rho_of(Z)  # under masks more noise than planned costs less
    assert epsilons[-1] >= epsilon_of(least, delta=1e-5) * 0.99
    for part in range(3):
        spent = json.loads((tmp_path / f"state-{part}" / f"{part}.privacy.json").read_text())
        assert spent["num_updates"] >= ROUNDS
        assert spent["rho"] >= least * (1 - 1e-9)
        # A server that is killed repeats the one round that it had not committed.
        assert spent["num_updates"] <= ROUNDS + 2


def test_server_and_devices_count_one_epoch_of_examples_as_one_round(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    noise = ("--privacy-noise-multiplier", Z, "--privacy-unit", "example")
    budget = epsilon_of(1.5 * rho_of(Z), delta=1e-5)  # one epoch, and no second
    own = ("--num-parts", 2, "--privacy-unit", "example", "--privacy-budget", budget)
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 3, *PLAN, *noise, "--min-clients", 2, task=task)
        clients = [
            processes.client(
                port_of(server), part, *own, "--state", tmp_path / f"state-{part}", task=task
            )
            for part in range(2)
        ]
        for process in (server, *clients):
            process.succeed()
    written = rows(tmp_path / "out")
    one_round = epsilon_of(rho_of(Z), delta=1e-5)
    assert [row["epsilon"] for row in written] == pytest.approx([one_round] * 3, rel=0.01)
    for part in range(2):
        file = tmp_path / f"state-{part}" / f"{part}.privacy.json"
        spent = json.loads(file.read_text())
        assert spent["num_updates"] == 3
        assert spent["examples"]["cost"]["rho"] == pytest.approx(rho_of(Z))


def test_a_device_whose_budget_is_spent_adds_nothing_more(tmp_path: Path) -> None:
    task, out = write_task(tmp_path).spec, tmp_path / "out"
    budget = epsilon_of(1.5 * rho_of(Z), delta=1e-5)  # one update, and no second
    flags = ("--rounds", 3, *PLAN, "--privacy-noise-multiplier", Z, "--min-clients", 2, "--verbose")
    with Processes(tmp_path) as processes:
        hold_rounds(out)
        server = processes.server(*flags, task=task)
        port, parts = port_of(server), ("--num-parts", 3)
        poor = processes.client(port, 0, *parts, "--privacy-budget", budget, task=task)
        others = [processes.client(port, part, *parts, task=task) for part in (1, 2)]
        release_rounds(out, server, joined=range(3))
        for process in (server, poor, *others):
            process.succeed()
        assert poor.text().count("WARNING PrivacyBudgetSpent") == 1
        assert f"its owner allows {budget:g}" not in server.text()  # that is the device's own
    written = rows(out)
    taken = [name for row in written for name in [c["name"] for c in row["masked_clients"]]]
    assert taken.count("0") == 1
    assert taken.count("1") == 3


def test_a_device_with_a_budget_adds_nothing_to_a_run_without_noise(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 2, *PLAN, "--min-clients", 1, task=task)
        client = processes.client(port_of(server), 0, "--privacy-budget", 8, task=task)
        assert server.wait() == 1
        assert "TooFewPermitted" in server.text()
        assert "PrivacyRequired" in client.text()
    assert rows(tmp_path / "out") == []


def test_a_run_ends_by_name_when_too_few_devices_have_a_budget_left(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    budget = epsilon_of(1.5 * rho_of(Z), delta=1e-5)  # one update, and no second
    with Processes(tmp_path) as processes:
        server = processes.server(
            *("--rounds", 3, *PLAN, "--privacy-noise-multiplier", Z, "--min-clients", 2), task=task
        )
        port, parts = port_of(server), ("--num-parts", 2)
        poor = processes.client(port, 0, *parts, "--privacy-budget", budget, task=task)
        rich = processes.client(port, 1, *parts, task=task)
        assert server.wait() == 1
        said = " ".join(server.text().split())
        assert "round 2 needs 2 clients, and 1 of 2 may still take part" in said
        assert "0: PrivacyBudgetSpent" in said
        assert "--privacy-budget, and go on with --resume" in said
        for client in (poor, rich):
            client.succeed()
    assert len(rows(tmp_path / "out")) == 1
    assert (tmp_path / "out" / "model.safetensors").exists()
