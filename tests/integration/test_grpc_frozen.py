"""The frozen part over real sockets: it is sent once, or not at all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.common.model.layout import layout_of
from headwater.common.model.parameters import build_model
from headwater.common.model.trained_model import MODEL
from tests.adapted import TASK, Adapted
from tests.processes import Process, Processes, model_digest, port_of, rows

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 3, "--micro-batch-size", 8)
SETTINGS = ("--rounds", 3, "--min-clients", 2, *PLAN)
OTHER_SEED = ("--seed", 5)  # the devices' own tasks build the frozen part of seed 0
IS_SENT = "is sent the frozen part"


def run(
    processes: Processes, *settings: object, out: Path, devices: Sequence[object] = ()
) -> list[Process]:
    """Run a server and two devices, each with a state folder of its own, to their end."""
    server = processes.server(*SETTINGS, *settings, "--verbose", "--out", out, task=TASK)
    port = port_of(server)
    folders = [processes.folder / f"state{part}" for part in range(2)]
    clients = [
        processes.client(port, part, "--state", folder, "--verbose", *devices, task=TASK)
        for part, folder in enumerate(folders)
    ]
    for process in (server, *clients):
        process.succeed()
    return [server, *clients]


def num_sent(server: Process) -> int:
    return len(re.findall(IS_SENT, server.text()))


def test_each_round_sends_the_trained_part_and_the_rest_once_in_all_runs(tmp_path: Path) -> None:
    layout = layout_of(Adapted().new_model())
    with Processes(tmp_path) as processes:
        server, *_ = run(processes, *OTHER_SEED, out=tmp_path / "first")
        assert num_sent(server) == 2
        # The models of both devices, plans, receipts and frames; the frozen part alone is more.
        limit = 2 * (layout.num_bytes + 4096)
        assert limit < layout.num_frozen_bytes
        assert all(row["bytes_down"] < limit for row in rows(tmp_path / "first"))
        again, *_ = run(processes, *OTHER_SEED, out=tmp_path / "second")
        assert num_sent(again) == 0
        out = tmp_path / "simulated"
        more = (*PLAN, *OTHER_SEED, "--rounds", 3, "--clients", 2, "--threads", 1, "--task", TASK)
        processes.run("simulation", *more, "--out", out).succeed()
        digests = {model_digest(tmp_path / one) for one in ("first", "second", "simulated")}
        assert len(digests) == 1


def test_four_bits_are_sent_once_and_train_the_model_of_the_simulation(tmp_path: Path) -> None:
    nf4 = ("--frozen-dtype", "nf4")
    with Processes(tmp_path) as processes:
        server, *devices = run(processes, *OTHER_SEED, *nf4, out=tmp_path / "out", devices=nf4)
        assert num_sent(server) == 2
        layout = build_model(Adapted(), seed=5, frozen_dtype="nf4").layout
        sent = f"{layout.num_frozen_bytes / 1_000_000:.1f} MB"
        assert all(f"frozen part of the model, {sent}" in one.text() for one in devices)
        out = tmp_path / "simulated"
        more = (*PLAN, *OTHER_SEED, *nf4, "--rounds", 3, "--clients", 2, "--threads", 1)
        processes.run("simulation", *more, "--task", TASK, "--out", out).succeed()
        assert model_digest(out) == model_digest(tmp_path / "out")


def test_devices_whose_task_builds_the_same_frozen_part_are_sent_nothing(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server, *_ = run(processes, out=tmp_path / "out")
        assert num_sent(server) == 0
        assert not list(tmp_path.glob("state*/frozen"))


def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        run(processes, *OTHER_SEED, out=tmp_path / "first")
        (file,) = (tmp_path / "state0" / "frozen").glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        server, damaged, whole = run(processes, *OTHER_SEED, out=tmp_path / "second")
        assert num_sent(server) == 1
        assert "is damaged and is deleted" in damaged.text()
        assert "damaged" not in whole.text()
        models = [(tmp_path / one / MODEL).read_bytes() for one in ("first", "second")]
        assert models[0] == models[1]


def test_masks_hide_updates_on_a_frozen_part_that_was_sent(tmp_path: Path) -> None:
    masked = ("--secure-aggregation", "semi-honest", *OTHER_SEED)
    with Processes(tmp_path) as processes:
        server = processes.server(*SETTINGS, *masked, "--verbose", task=TASK)
        port = port_of(server)
        clients = [
            processes.client(port, part, "--num-parts", 3, *masked[:2], "--verbose", task=TASK)
            for part in range(3)
        ]
        for process in (server, *clients):
            process.succeed()
        assert len(rows(tmp_path / "out")) == 3
