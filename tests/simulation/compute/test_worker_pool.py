"""Several processes compute what one would: the same bits, the same lines, the same errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.common.errors import EmptyUpdate, SettingsError, WorkerDied
from headwater.common.messages import Plan, Update
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.fleet import Dropout
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run import MODEL
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.compute.worker_pool import Workers
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.run import run_engine

NUM_DEVICES = 6
NOT_FINITE, RAISES = 2, 4
# What a row says of this machine's time, which no two runs have alike.
OF_THIS_MACHINE = ("seconds", "seconds_split", "updates_per_hour")


class Uneven:
    """Devices own 4 to 24 examples; of one none has a finite loss, and of one all raise."""

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


def of_workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "headwater.simulation.compute.worker" in child.cmdline()]


def test_two_workers_give_the_model_and_the_lines_of_one_process(tmp_path: Path) -> None:
    found = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        num_there: list[int] = []

        def on_round(row: RoundRow, num_there: list[int] = num_there) -> None:
            num_there.append(len(of_workers()))

        settings = settings_of(**{"out": str(out), "simulation.workers": workers})
        run_engine(settings, on_round=on_round, resume=False)
        assert num_there == [0, 0] if workers == 1 else [2, 2]
        assert not of_workers()
        rows = read_rows(out)
        found.append(
            (
                (out / MODEL).read_bytes(),
                [{key: row[key] for key in row if key not in OF_THIS_MACHINE} for row in rows],
            )
        )
    assert found[0] == found[1]
    assert len(found[0][1][0]["clients"]) == NUM_DEVICES - 2


def called(round_number: int) -> list[ClientPlan]:
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
    return [ClientPlan(str(part), part, plan) for part, plan in enumerate(plans)]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    found = Workers(Devices(settings_of()), 2)
    yield found
    found.close()


def test_answers_come_in_their_turn_with_the_vectors_of_one_process(workers: Workers) -> None:
    one_by_one = OneByOne(Devices(settings_of()))
    for round_number in (1, 2):
        image = build_model(Uneven(), seed=round_number)
        given = called(round_number)
        expected = [
            (answer.values_P.clone(), answer.report) if isinstance(answer, Update) else answer
            for answer in one_by_one.train(given, image, run_id=1, timeout_seconds=None)
        ]
        for one, answer in zip(
            expected, workers.train(given, image, run_id=1, timeout_seconds=None), strict=True
        ):
            if isinstance(answer, Update):
                assert isinstance(one, tuple)
                assert torch.equal(answer.values_P, one[0])
                assert answer.report == one[1]
            else:
                assert isinstance(one, Dropout)
                assert (answer.name, type(answer.error)) == (one.name, type(one.error))
                assert answer.error.message == one.error.message
        of_bad = expected[NOT_FINITE]
        assert isinstance(of_bad, Dropout)
        assert isinstance(of_bad.error, EmptyUpdate)


def test_round_that_is_given_up_leaves_nothing_for_the_next(workers: Workers) -> None:
    image = build_model(Uneven(), seed=3)
    given_up = workers.train(called(3), image, run_id=1, timeout_seconds=None)
    next(given_up)
    given_up.close()  # type: ignore[attr-defined]
    names = [
        answer.report.name if isinstance(answer, Update) else answer.name
        for answer in workers.train(called(4), image, run_id=1, timeout_seconds=None)
    ]
    assert names == [str(part) for part in range(NUM_DEVICES)]


def test_killed_worker_ends_the_run_by_name_and_none_is_left(workers: Workers) -> None:
    for process in of_workers()[:1]:
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"worker process \d of 2 was ended by SIGKILL at device"):
        list(
            workers.train(called(5), build_model(Uneven(), seed=3), run_id=1, timeout_seconds=None)
        )
    workers.close()
    assert not of_workers()


@pytest.mark.parametrize("chosen", [{"simulation.workers": 2}, {"simulation.compile": True}])
def test_what_computes_is_not_chosen_where_updates_are_messages(chosen: dict[str, Any]) -> None:
    settings = settings_of(**{**chosen, "simulation.wire": True})
    with pytest.raises(SettingsError, match="worker processes"):
        run_engine(settings, on_round=lambda _: None, resume=False)
