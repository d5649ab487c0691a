"""Masked rounds over real sockets: the simulator's model, and processes that go at each phase."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.client.enrolment.signing_identity import make_identity
from headwater.common.secagg.protocol import PHASES
from tests.processes import (
    Process,
    Processes,
    assert_tidy,
    free_port,
    model_digest,
    port_of,
    rows,
    until,
    write_task,
)

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 2, "--micro-batch-size", 8)
ADAM = ("--optimizer", "adam", "--learning-rate", 0.01)
SEMI_HONEST = ("--secure-aggregation", "semi-honest")
ACTIVE = ("--secure-aggregation", "active")

# Devices of this task find their orders in a folder. A file "kill-NAME-ACTION-ROUND": when that
# message of a secure session comes, end the process whose id is in it, or yourself if it is empty.
# In odd rounds device 1 waits for a file "open-ROUND" before it trains.
TASK = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from headwater.client.secagg.pending import PendingUpdates
from headwater.client.secagg.session import SecureSession
from headwater.common.secagg.protocol import PHASES

FOLDER = {folder!r}
ACTIONS = {{phase.request: phase.action for phase in PHASES}}
answer, start_plan = SecureSession.answer, PendingUpdates.start_plan


def answer_or_kill(self, request, *bounds):
    order = f"kill-{{self.device.name}}-{{ACTIONS[type(request)]}}-{{self.device.round}}"
    path = os.path.join(FOLDER, order)
    if os.path.exists(path):
        with open(path) as file:
            pid = int(file.read() or os.getpid())
        os.remove(path)
        os.kill(pid, signal.SIGKILL)
    return answer(self, request, *bounds)


def start_when_open(self, *, run_id, round_number, name):
    gate = os.path.join(FOLDER, f"open-{{round_number}}")
    while name == "1" and round_number % 2 and not os.path.exists(gate):
        time.sleep(0.01)
    start_plan(self, run_id=run_id, round_number=round_number, name=name)


SecureSession.answer, PendingUpdates.start_plan = answer_or_kill, start_when_open


class Task:
    def new_model(self):
        return nn.Linear(4, 2)

    def train_examples(self, *, data, part, num_parts):
        random = torch.Generator().manual_seed(part)
        inputs = torch.randint(-3, 4, (1000, 4), generator=random).float()
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def loss_sum(self, model, batch):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return loss, len(labels)
"""
SHARE = 16  # examples of one device in a round


def write_orders_task(folder: Path) -> str:
    path = folder / "orders.py"
    path.write_text(TASK.format(folder=str(folder)))
    return f"{path}:Task"


def write_settings(folder: Path, **branches: dict[str, Any]) -> Path:
    """Write what has no flag: how long the server waits."""
    path = folder / "settings.toml"
    text = ""
    for name, branch in branches.items():
        text += f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in branch.items())
    path.write_text(text)
    return path


def start_clients(
    processes: Processes, port: int, flags: Sequence[Sequence[object]], *, task: str
) -> list[Process]:
    """Start a device for each tuple of flags."""
    parts = ("--num-parts", len(flags))
    return [processes.client(port, i, *own, *parts, task=task) for i, own in enumerate(flags)]


def run(
    processes: Processes, *settings: object, task: str, flags: Sequence[Sequence[object]]
) -> Process:
    """Run a server and devices to their end; return the server."""
    server = processes.server(*settings, "--min-clients", len(flags), task=task)
    clients = start_clients(processes, port_of(server), flags, task=task)
    for process in (server, *clients):
        process.succeed()
    return server


def wait_for_connections(server: Process, count: int) -> None:
    """Wait until device 0 has connected so many times."""
    until(
        lambda: len(re.findall(r" 0 connected from", server.text())) >= count,
        what=lambda: f"connection {count} of device 0: {server.text()}",
    )


def enrolled(folder: Path, count: int) -> list[tuple[object, ...]]:
    """Return the flags of devices that have identities, and know each other's."""
    keys = [folder / f"{number}.pem" for number in range(count)]
    lines = [make_identity(key, str(number))[0].line for number, key in enumerate(keys)]
    allow_list = folder / "allow-list"
    allow_list.write_text("\n".join(lines) + "\n")
    return [(*ACTIVE, "--identity", key, "--allow-list", allow_list) for key in keys]


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_the_masked_model_is_the_simulators_byte_for_byte(mode: str, tmp_path: Path) -> None:
    """What is summed under masks are whole numbers: nothing rounds in another way."""
    task = write_task(tmp_path).spec
    own = enrolled(tmp_path, 3) if mode == "active" else [SEMI_HONEST] * 3
    flags = [(*one, "--set", "secure.order_seed=0") for one in own]  # not of each device's own
    settings = ("--rounds", 3, *PLAN, *ADAM, "--secure-aggregation", mode)
    with Processes(tmp_path) as processes:
        run(processes, *settings, task=task, flags=flags)
        out = tmp_path / "simulated"
        more = ("--clients", 3, "--threads", 1, "--out", out, "--task", task)
        processes.run("simulation", *settings, *more).succeed()
        assert model_digest(tmp_path / "out") == model_digest(out)


def test_a_ring_of_sixteen_bits_sends_half_as_much_once_a_sum_is_known(tmp_path: Path) -> None:
    task = write_task(tmp_path, hidden=30_000).spec  # 840 kB a model
    sent = {}
    for bits in (32, 16):
        settings = ("--rounds", 2, *PLAN, *SEMI_HONEST, "--ring-bits", bits)
        with Processes(tmp_path / str(bits)) as processes:
            run(processes, *settings, task=task, flags=[SEMI_HONEST] * 3)
            sent[bits] = [row["bytes_up"] for row in rows(tmp_path / str(bits) / "out")]
    vector = 4 * (7 * 30_000 + 2)
    assert sent[32][0] == pytest.approx(sent[16][0], rel=0.01)  # in the wide ring
    for full, half in zip(sent[32][1:], sent[16][1:], strict=True):
        # Heads are the same for both, but for what JSON makes of other numbers.
        assert full - half == pytest.approx(3 * vector / 2, rel=0.01)


def test_a_device_that_insists_on_masks_adds_nothing_to_a_run_in_clear(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 2, *PLAN, "--min-clients", 1, task=task)
        client = processes.client(port_of(server), 0, *SEMI_HONEST, task=task)
        assert server.wait() == 1
        assert "this device requires semi-honest secure aggregation" in server.text()
        assert "MaskingRequired" in client.text()
        assert_tidy(server)
        assert_tidy(client)
    assert rows(tmp_path / "out") == []


def test_a_device_that_is_asked_to_stop_stays_for_its_session(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=1, size=7)  # which no device measures its speed with
    with Processes(tmp_path) as processes:
        work = ("--accumulation-steps", 4, "--micro-batch-size", 7)
        settings = ("--rounds", 1, *work, *SEMI_HONEST, "--min-clients", 3)
        server = processes.server(*settings, task=task.spec)
        clients = start_clients(processes, port_of(server), [()] * 3, task=task.spec)
        task.wait_until_reached()
        clients[0].kill(signal.SIGTERM)
        clients[0].wait_for("stopping: what is summed")
        task.open()
        for process in (*clients, server):
            process.succeed()
    (row,) = rows(tmp_path / "out")
    assert row["num_clients"] == 3
    assert row["num_examples"] == 2 * 28 + 14  # it stopped behind its second micro-batch


def test_a_device_killed_at_any_phase_costs_no_more_than_its_share(tmp_path: Path) -> None:
    """Device 0 is killed in every other round, when the message of one phase reaches it.

    From the masked update on the others' shares open the sum with its update in it. It is started
    anew each time, and the round between waits until it is back.
    """
    task, actions = write_orders_task(tmp_path), [phase.action for phase in PHASES]
    config = write_settings(
        tmp_path, secure={"phase_seconds": 10.0}, cohort={"return_seconds": 20.0}
    )
    for number, action in enumerate(actions, start=1):
        (tmp_path / f"kill-0-{action}-{2 * number}").touch()
    flags = [(*own, "--num-parts", 4) for own in enrolled(tmp_path, 4)]
    settings = ("--rounds", 2 * len(actions) + 1, *PLAN, *ACTIVE, "--min-clients", 3)
    with Processes(tmp_path) as processes:
        server = processes.server(*settings, "--config", config, "--verbose", task=task)
        port = port_of(server)
        others = [processes.client(port, i, *flags[i], task=task) for i in (1, 2, 3)]
        for number in range(len(actions) + 1):
            victim = processes.client(port, 0, *flags[0], task=task)
            wait_for_connections(server, number + 1)
            (tmp_path / f"open-{2 * number + 1}").touch()
            if number < len(actions):
                assert victim.wait() == -signal.SIGKILL
        for process in (server, victim, *others):
            process.succeed()
    found = {row["round"]: row for row in rows(tmp_path / "out")}
    for number, action in enumerate(actions, start=1):
        row = found[2 * number]
        is_lost = actions.index(action) <= actions.index("masked_update")
        assert row["num_clients"] == (3 if is_lost else 4), (action, row["refused"])
    assert {row["weight"] - SHARE * row["num_clients"] for row in found.values()} == {0}


def test_a_server_killed_in_mid_session_opens_another_and_no_example_is_masked_twice(
    tmp_path: Path,
) -> None:
    task, port = write_orders_task(tmp_path), free_port()
    for number in (1, 3):
        (tmp_path / f"open-{number}").touch()
    settings = ("--rounds", 3, *PLAN, *SEMI_HONEST, "--min-clients", 3)
    listen = ("--listen", f"127.0.0.1:{port}")
    with Processes(tmp_path) as processes:
        server = processes.server(*settings, *listen, task=task)
        order = tmp_path / "kill-1-masked_update-2"
        order.with_suffix(".part").write_text(str(server.pid))
        order.with_suffix(".part").rename(order)
        clients = start_clients(processes, port, [SEMI_HONEST] * 3, task=task)
        assert server.wait() == -signal.SIGKILL
        again = processes.server(*listen, "--resume", task=task)
        for process in (again, *clients):
            process.succeed()
    found = rows(tmp_path / "out")
    assert [row["round"] for row in found] == [1, 2, 3]
    assert {row["weight"] for row in found} == {3 * SHARE}
    offsets = []
    for name in range(3):
        (path,) = (tmp_path / "state").glob(f"{name}-*.json")
        kept = json.loads(path.read_text())
        assert (kept["secure"]["highest"]["round"], kept["secure"]["highest"]["attempt"]) == (3, 1)
        offsets.append(kept["walk"]["place"]["offset"])
    # Three rounds, and for device 1 and whoever else had masked by then the one that was lost.
    assert offsets[1] == 4 * SHARE
    assert set(offsets) <= {3 * SHARE, 4 * SHARE}


def test_a_run_whose_devices_masked_their_examples_at_its_first_model_ends_and_says_why(
    tmp_path: Path,
) -> None:
    """The same command again, into another folder: its first model is that of the run before."""
    task = write_orders_task(tmp_path)
    (tmp_path / "open-1").touch()
    work = ("--accumulation-steps", 75, "--micro-batch-size", 8)  # 600 of a device's 1,000 examples
    settings = ("--rounds", 1, *work, *SEMI_HONEST)
    with Processes(tmp_path) as processes:
        run(processes, *settings, task=task, flags=[SEMI_HONEST] * 3)
        out = ("--out", tmp_path / "again", "--min-clients", 3)
        again = processes.server(*settings, *out, task=task)
        start_clients(processes, port_of(again), [SEMI_HONEST] * 3, task=task)
        assert again.wait() == 1
        assert "UpdateAlreadyMasked: round 1: 3 clients masked most of" in again.text()
        assert "take another --seed" in again.text()


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        (("--learning-rate", 1e-30), "the run ends after round 1 of 4: its last step changed no"),
        (
            ("--schedule", "PolynomialLR", "--schedule-argument", "total_iters=1"),
            "round 2 is left out, as its learning rate is 0",
        ),
    ],
)
def test_a_run_whose_model_no_longer_changes_ends_in_order_with_its_model(
    rates: tuple[object, ...], words: str, tmp_path: Path
) -> None:
    """Each device masks 600 of its 1,000 examples at the first model, and no more at it."""
    task = write_orders_task(tmp_path)
    (tmp_path / "open-1").touch()
    work = ("--accumulation-steps", 75, "--micro-batch-size", 8, "--optimizer", "sgd")
    settings = ("--rounds", 4, *work, *rates, *SEMI_HONEST)
    with Processes(tmp_path) as processes:
        server = run(processes, *settings, task=task, flags=[SEMI_HONEST] * 3)
        assert words in server.text()
    assert [row["round"] for row in rows(tmp_path / "out")] == [1]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_round_goes_on_with_others_when_its_devices_masked_all_they_give_at_its_model(
    tmp_path: Path,
) -> None:
    """Device 0 dies as it masks: no session of two opens, and a plan asks for most of the data."""
    task = write_orders_task(tmp_path)
    (tmp_path / "open-1").touch()
    (tmp_path / "kill-0-masked_update-1").touch()
    waits = {"return_seconds": 0.5, "reconnect_seconds": 0.5}
    config = write_settings(tmp_path, cohort=waits)
    work = ("--accumulation-steps", 75, "--micro-batch-size", 8)  # 600 of a device's 1,000 examples
    settings = ("--rounds", 2, *work, *SEMI_HONEST, "--min-clients", 3, "--config", config)
    parts = ("--num-parts", 6)
    with Processes(tmp_path) as processes:
        server = processes.server(*settings, task=task)
        port = port_of(server)
        victim, *others = start_clients(processes, port, [(*SEMI_HONEST, *parts)] * 3, task=task)
        assert victim.wait() == -signal.SIGKILL
        server.wait_for("TooFewSurvivors")
        others.append(processes.client(port, 3, *SEMI_HONEST, *parts, task=task))
        server.wait_for("2 clients left out until the model changes")
        others += [processes.client(port, i, *SEMI_HONEST, *parts, task=task) for i in (4, 5)]
        for process in (server, *others):
            process.succeed()
    first, second = rows(tmp_path / "out")
    assert {one["name"] for one in first["masked_clients"]} == {"3", "4", "5"}
    assert second["num_clients"] == 5
