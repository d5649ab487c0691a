"""Rows with NaN in the evaluation are left out and counted, on every way of computing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.messages import Plan
from headwater.common.settings.sources import load
from headwater.server.operations.progress import print_result
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

HERE = "tests/simulation/test_evaluation_gaps.py"
SIZE = 40


class Gaps:
    """A linear regression; device 0 has NaN in four of 40 rows."""

    def new_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        inputs = torch.arange(2.0 * SIZE).reshape(SIZE, 2) / SIZE
        if part == 0:
            inputs[::10] = torch.nan
        return TensorDataset(inputs, inputs.nan_to_num().sum(1))

    def loss_sum(
        self, model: nn.Module, batch: list[torch.Tensor]
    ) -> tuple[torch.Tensor, int, dict[str, torch.Tensor]]:
        errors = model(batch[0]).squeeze(1) - batch[1]
        return errors.square().sum(), len(errors), {"mae": errors.abs().sum()}


class AllGaps(Gaps):
    """Device 1 has nothing but NaN."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        inputs = torch.full((SIZE, 2), torch.nan if part else 1.0)
        return TensorDataset(inputs, torch.ones(SIZE))


class WithTest(Gaps):
    """Its test examples have a NaN among three."""

    @staticmethod
    def test_examples() -> TensorDataset:
        inputs = torch.tensor([[torch.nan, 1.0], [1.0, 2.0], [0.0, 1.0]])
        return TensorDataset(inputs, torch.tensor([1.0, 3.0, 1.0]))


def run(task: str, **changes: Any) -> list[RoundRow]:
    rows: list[RoundRow] = []
    overrides = {
        "task": f"{HERE}:{task}",
        "rounds": 2,
        "threads": 1,
        "simulation.clients": 2,
        "plan.accumulation_steps": 1,
        "optimizer.learning_rate": 1e-3,
        "check_task": False,
        "evaluation.held_out_fraction": 0.5,
        **changes,
    }
    run_engine(load(None, overrides), on_round=rows.append, resume=False)
    return rows


def num_held_out_nan() -> int:
    """Return how many of device 0's NaN rows are among those that it holds out."""
    trainer = Trainer(f"{HERE}:Gaps", batch_norm=None, check_task=False)
    one = Identity(name="0", data=None, part=0, num_parts=2)
    chosen = Plan(
        round=1,
        run_seed=0,
        model_version=0,
        quota=1,
        micro_batch_size=1,
        held_out_fraction=0.5,
    )
    _, held_out = trainer.split(one, chosen)
    return sum(bool(held_out[at][0].isnan().any()) for at in range(len(held_out)))


@pytest.mark.parametrize("compute", ["one-by-one", "vectorised", "fused"])
def test_a_device_with_nan_rows_stays_in_the_held_out_evaluation(
    compute: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = num_held_out_nan()
    assert 0 < expected < SIZE // 2
    caplog.set_level(logging.WARNING)
    changes = {"evaluation.on_devices": True, "simulation.compute": compute}
    for row in run("Gaps", **changes):
        assert row.num_held_out_clients == 2
        assert row.num_held_out_left_out == expected
        assert not row.not_evaluated
        assert row.metrics["held_out_loss"] == row.metrics["held_out_loss"]
        assert "held_out_clients" not in row.metrics
    text = f"{expected} of 20 held-out examples cannot be evaluated and are left out"
    assert [text in one.message for one in caplog.records].count(True) == 1
    assert (
        f"{expected} held-out examples cannot be evaluated and were left out on 1 of 2"
        in caplog.text
    )


def test_a_device_whose_held_out_part_has_nothing_finite_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (row,) = run("AllGaps", rounds=1, **{"evaluation.on_devices": True})
    why = "none of its 20 held-out examples can be evaluated"
    assert row.not_evaluated == {"1": why}
    assert (row.num_held_out_clients, row.num_held_out_left_out) == (1, 20)
    assert f"round 1: the evaluation is without 1 of 2 devices (1: {why})" in caplog.text


def test_test_examples_with_nan_are_left_out_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run("WithTest", out=tmp_path)
    assert [row.num_test_left_out for row in rows] == [1, 1]
    assert all(row.metrics["test_loss"] < 100 for row in rows)
    text = "1 of 3 test examples cannot be evaluated and are left out"
    assert [text in one.message for one in caplog.records].count(True) == 1
    assert read_rows(tmp_path)[-1]["num_test_left_out"] == 1
    print_result(load(None, {"out": tmp_path}))
    assert "1 left out of the tests" in capsys.readouterr().out


def test_the_held_out_devices_are_a_count_and_no_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("Gaps", out=tmp_path, **{"evaluation.on_devices": True})
    print_result(load(None, {"out": tmp_path}))
    shown = capsys.readouterr().out
    assert "tested on 2 of 2 devices" in shown
    assert "clients 2.0000" not in shown
