"""Several processes give what one process gives: the same bits, log lines and errors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.client.training.sampler import SamplerPosition, SamplerState
from headwater.common.errors import EmptyUpdate, SettingsError, WorkerDied
from headwater.common.messages import Plan
from headwater.common.model.parameters import build_model
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.compute import batched
from headwater.simulation.compute.local_workers import RUN_WORKER, local_pool
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.compute.worker_pool import WorkerPool
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.run import run_engine
from tests.processes import WAIT_SECONDS
from tests.simulation.compute.series import assert_same, singles

pytestmark = pytest.mark.slow
NUM_DEVICES = 6
NOT_FINITE, RAISES = 2, 4
# A row's fields about this machine's time, which differ in each run.
WALL_CLOCK = ("seconds", "seconds_split", "updates_per_hour", "ended_at")


class Uneven:
    """Devices own 4 to 24 examples; one has no finite loss, and one raises for each example."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        number = 4 * (1 + part)
        inputs = torch.randn(number, 5, generator=random)
        if part == NOT_FINITE:
            inputs[:] = torch.nan
        labels = torch.full((number,), 7 if part == RAISES else part % 3)
        return TensorDataset(inputs, labels)

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


class Together(Uneven):
    """The same without random numbers, so that examples of many devices go through it together."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


class ManySteps:
    """Each device owns so many examples that its plan, state and report can be large."""

    def new_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.linspace(0, 1, 80_000).unsqueeze(1))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        (inputs,) = batch
        return model(inputs).square().sum(), len(inputs)


def settings_of(**chosen: Any) -> Settings:
    return load(
        None,
        {
            "task": f"{__file__}:Uneven",
            "rounds": 2,
            "threads": 1,
            "simulation.clients": NUM_DEVICES,
            "simulation.compute": "one-by-one",
            "plan.accumulation_steps": 3,
            "plan.micro_batch_size": 5,
            "cohort.min_clients": 2,
            **chosen,
        },
    )


def worker_processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended since
            if RUN_WORKER in child.cmdline():
                found.append(child)
    return found


@pytest.mark.parametrize(
    ("mode", "chosen"),
    [
        ("one-by-one", {}),
        ("fused", {}),
        ("vectorised", {}),
        ("vectorised", {"local.steps": 2, "local.learning_rate": 0.1}),
    ],
)
def test_two_workers_give_the_model_and_the_lines_of_one_process(
    mode: str, chosen: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks, a device of each is not finite, or raises: it is computed by itself, as always."""
    monkeypatch.setattr(batched, "MAX_ROWS", 30)
    task, num = ("Uneven", NUM_DEVICES) if mode == "one-by-one" else ("Together", 2 * NUM_DEVICES)
    found = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        settings = settings_of(
            **{
                "task": f"{__file__}:{task}",
                "out": str(out),
                "simulation.compute": mode,
                "simulation.clients": num,
                "simulation.workers": workers,
                **chosen,
            }
        )
        running: list[int] = []

        def on_round(row: RoundRow, running: list[int] = running) -> None:
            running.append(len(worker_processes()))

        run_engine(settings, on_round=on_round, resume=False)
        assert running == ([0, 0] if workers == 1 else [2, 2])
        assert not worker_processes()
        rows = read_rows(out)
        kept = [{key: row[key] for key in row if key not in WALL_CLOCK} for row in rows]
        found.append(((out / MODEL).read_bytes(), kept))
    assert found[0] == found[1]
    assert len(found[0][1][0]["clients"]) == num - 2


def clients_of(round_number: int) -> list[ClientPlan]:
    plans = (
        Plan(
            round=round_number,
            run_seed=0,
            model_version=round_number,
            quota=15,
            micro_batch_size=5,
            counted_round=round_number - 1 or None,
        )
        for _ in range(NUM_DEVICES)
    )
    return [ClientPlan(str(part), part, {str(part): plan}) for part, plan in enumerate(plans)]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = local_pool(Devices(settings_of()), 2)
    yield pool
    pool.close()


def test_replies_come_in_order_with_the_vectors_of_one_process(pool: WorkerPool) -> None:
    one_by_one = OneByOne(Devices(settings_of()))
    for round_number in (1, 2):
        image = build_model(Uneven(), seed=round_number)
        clients = clients_of(round_number)
        expected = list(singles(one_by_one.train(clients, image, run_id=1, timeout_seconds=None)))
        found = list(singles(pool.train(clients, image, run_id=1, timeout_seconds=None)))
        assert_same(found, expected)
        not_finite = expected[NOT_FINITE]
        assert isinstance(not_finite.error, EmptyUpdate)


def test_an_aborted_round_leaves_nothing_for_the_next(pool: WorkerPool) -> None:
    image = build_model(Uneven(), seed=3)
    aborted = pool.train(clients_of(3), image, run_id=1, timeout_seconds=None)
    next(aborted)
    aborted.close()  # type: ignore[attr-defined]
    answers = pool.train(clients_of(4), image, run_id=1, timeout_seconds=None)
    names = [one.name for one in singles(answers)]
    assert names == [str(part) for part in range(NUM_DEVICES)]


def test_an_order_and_a_result_that_exceed_the_pipe_do_not_wait_for_each_other() -> None:
    devices = Devices(settings_of(task=f"{__file__}:ManySteps"))
    place = SamplerPosition(offset=60_000, skipped=tuple(range(0, 60_000, 2)))
    devices.positions[2] = SamplerState(place=place)
    clients = [  # a worker has a piece of two devices, and one that waits
        ClientPlan(
            str(part),
            part,
            {str(part): Plan(round=1, run_seed=0, model_version=0, quota=4000, micro_batch_size=1)},
        )
        for part in range(3)
    ]
    pool = local_pool(devices, 1)
    image = build_model(ManySteps(), seed=1)
    try:
        answers = list(singles(pool.train(clients, image, run_id=1, timeout_seconds=None)))
    finally:
        pool.close()
    assert [len(one.report["steps"]) for one in answers if one.report] == [4000] * 3


def test_a_killed_worker_ends_the_run_and_the_error_names_worker_and_device(
    pool: WorkerPool,
) -> None:
    for process in worker_processes()[:1]:
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"worker process \d of 2 was ended by SIGKILL at device"):
        list(
            pool.train(clients_of(5), build_model(Uneven(), seed=3), run_id=1, timeout_seconds=None)
        )
    pool.close()
    assert not worker_processes()


def test_workers_end_when_the_simulator_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from tests.simulation.compute.test_worker_pool import *\n"
        "pool = local_pool(Devices(settings_of()), 2)\n"
        "list(pool.train(clients_of(1), build_model(Uneven(), seed=1), run_id=1, "
        "timeout_seconds=None))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    path = [sys.executable, "-c", code]
    with subprocess.Popen(path, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as simulator:
        assert simulator.stdout is not None
        assert b"ready" in simulator.stdout.readline()
        workers = psutil.Process(simulator.pid).children(recursive=True)
        assert len(workers) == 2
        simulator.kill()
    _, running = psutil.wait_procs(workers, timeout=WAIT_SECONDS)
    assert not running


def test_masked_updates_refuse_workers() -> None:
    with pytest.raises(SettingsError, match="worker processes"):
        settings_of(**{"simulation.workers": 2, "secure.aggregation": "semi-honest"})
