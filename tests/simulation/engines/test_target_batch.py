"""The target batch in whole runs: following the noise scale, in tokens, and the learning rate."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine

PER_DEVICE, MOST_TOKENS = 60, 8


class Ragged:
    """Examples of 1 to 8 tokens, each a number to be met by one parameter."""

    max_weight_per_example = MOST_TOKENS

    def new_model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(part)
        lengths = torch.randint(1, MOST_TOKENS + 1, (PER_DEVICE,), generator=generator)
        return [torch.randn(int(length), 1, generator=generator) for length in lengths]

    def collate(self, examples: list[Tensor]) -> Tensor:
        return torch.cat(examples)

    def loss_sum(self, model: nn.Module, tokens_T1: Tensor) -> tuple[Tensor, int]:
        return 0.5 * (model(tokens_T1) - 1).square().sum(), len(tokens_T1)


def chosen(task: str, rounds: int, **changes: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": task,
            "rounds": rounds,
            "threads": 1,
            "simulation": {"clients": 6},
            "evaluation": {"every_rounds": 10_000},
            **changes,
        }
    )


def rows_of(settings: Settings, *, resume: bool = False) -> list[RoundRow]:
    rows: list[RoundRow] = []
    run_engine(settings, on_round=rows.append, resume=resume)
    return rows


DIGITS, RAGGED = "examples/digits.py:Digits", "tests/simulation/engines/test_target_batch.py:Ragged"
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "followed": (
        DIGITS,
        {
            "plan": {"follow_noise_scale": True, "effective_batch_size": 64},
            "schedule": {"batch_scaling": "sqrt", "warmup_rounds": 3},
            "optimizer": {"name": "adam", "learning_rate": 0.003},
        },
    ),
    "tokens": (
        RAGGED,
        {
            "plan": {"tokens_per_update": 200},
            "schedule": {
                "batch_scaling": "linear",
                "name": "StepLR",
                "arguments": {"step_size": 2},
            },
        },
    ),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.slow
def test_a_run_resumed_after_every_round_has_the_targets_of_the_uninterrupted_one(
    tmp_path: Path, run: str
) -> None:
    task, changes = RUNS[run]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    rows_of(chosen(task, 6, out=whole, **changes))
    for rounds in range(1, 7):
        rows_of(chosen(task, rounds, out=broken, **changes), resume=rounds > 1)
    assert (whole / MODEL).read_bytes() == (broken / MODEL).read_bytes()
    targets = [
        [
            [row[name] for name in ("target", "weight", "learning_rate", "noise_scale")]
            for row in read_rows(folder)
        ]
        for folder in (whole, broken)
    ]
    assert targets[0] == targets[1]
    assert len({row[0] for row in targets[0]}) > 1


def test_a_followed_target_changes_at_most_twofold_and_finished_devices_measure() -> None:
    rows = rows_of(chosen(DIGITS, 12, plan={"follow_noise_scale": True}))
    targets = [row.target for row in rows]
    assert targets[0] == 512
    for last, now in itertools.pairwise(targets):
        assert last is not None
        assert now is not None
        assert last / 2 <= now <= 2 * last
    assert all(row.target_by == "noise scale" for row in rows)
    for row in rows:
        measuring = [c for c in row.clients if c.num_examples >= 2 and c.reason == "quota"]
        assert all(client.accumulation_steps >= 2 for client in measuring)
        is_measured = any(client.accumulation_steps >= 2 for client in row.clients)
        assert (row.gradient_variance is not None) == is_measured
    assert sum(row.gradient_variance is not None for row in rows) > len(rows) / 2


def test_summed_tokens_match_the_target_within_one_example_s_tokens() -> None:
    rows = rows_of(chosen(RAGGED, 4, plan={"tokens_per_update": 200}))
    assert rows[0].target == 200 // MOST_TOKENS
    # From the second round on the mean is that of 25 examples or more. An example's tokens are 1 to
    # 8, evenly: 2.3 about 4.5. So 45 examples hold 200 tokens to 4 sqrt(45 x (1 + 45/25)) x 2.3.
    for row in rows[1:]:
        assert row.target_by == "tokens"
        assert abs(row.weight - 200) <= 4 * math.sqrt(45 * (1 + 45 / 25)) * 2.3


class Halves:
    """120 examples a device; two devices learn which of two inputs is larger."""

    def new_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        inputs_E2 = torch.randn(120, 2, generator=torch.Generator().manual_seed(part))
        return TensorDataset(inputs_E2, inputs_E2.argmax(1))

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        inputs_B2, labels_B = batch
        return nn.functional.cross_entropy(model(inputs_B2), labels_B, reduction="sum"), len(
            labels_B
        )


FLEET = """
[[device]]
examples_per_second = 100
memory_bytes = 1_000_000_000
upload_bytes_per_second = 1_000_000_000
[[device]]
examples_per_second = {speed}
memory_bytes = 1_000_000_000
upload_bytes_per_second = {upload}
jitter = {jitter}
"""


@pytest.mark.parametrize("target", [64, 160, 240])
@pytest.mark.parametrize(
    ("speed", "upload", "jitter"),
    [
        pytest.param(100, 10**9, 0, id="alike"),
        pytest.param(10, 10**9, 0, id="ten times as slow"),
        pytest.param(100, 100, 0, id="a slow link"),
        pytest.param(60, 10**9, 0.2, id="an unsteady pace"),
    ],
)
def test_every_planned_round_is_within_a_fifth_of_its_target(
    tmp_path: Path, target: int, speed: float, upload: float, jitter: float
) -> None:
    """The ends of epochs, 120 examples each, fall into many of the rounds."""
    path = tmp_path / "two.toml"
    path.write_text(FLEET.format(speed=speed, upload=upload, jitter=jitter))
    task = "tests/simulation/engines/test_target_batch.py:Halves"
    changes: dict[str, Any] = {"simulation": {"fleet": path}}
    settings = chosen(task, 8, plan={"effective_batch_size": target}, **changes)
    rows = rows_of(with_fleet(settings))
    assert [row.target for row in rows] == [target] * 8
    assert all(abs(row.num_examples - target) <= target / 5 for row in rows)
    # Neither device idles: the slower one has a tenth of the other's work, or an eighth of all.
    shares = [min(client.num_examples for client in row.clients) for row in rows]
    assert min(shares) >= target // 15


@pytest.mark.parametrize(("scaling", "power"), [("none", 0.0), ("linear", 1.0), ("sqrt", 0.5)])
def test_the_learning_rate_scales_with_the_summed_weight_and_not_with_the_target(
    scaling: str, power: float
) -> None:
    """252 examples in each round, where 504 are set."""
    rows = rows_of(
        chosen(
            RAGGED,
            5,
            plan={"accumulation_steps": 7, "micro_batch_size": 6, "effective_batch_size": 504},
            schedule={
                "batch_scaling": scaling,
                "name": "ExponentialLR",
                "arguments": {"gamma": 0.5},
            },
            optimizer={"name": "sgd", "learning_rate": 0.1},
        )
    )
    assert [row.num_examples for row in rows] == [252] * 5
    for number, row in enumerate(rows):
        expected = 0.1 * 0.5**number * (252 / 504) ** power
        assert row.learning_rate == pytest.approx(expected, rel=8 * 2.0**-52)


def test_where_tokens_are_set_the_learning_rate_scales_with_the_tokens() -> None:
    rows = rows_of(
        chosen(
            RAGGED,
            2,
            plan={"tokens_per_update": 200},
            schedule={"batch_scaling": "linear"},
            optimizer={"name": "sgd", "learning_rate": 0.1},
        )
    )
    assert [row.learning_rate for row in rows] == pytest.approx(
        [0.1 * row.weight / 200 for row in rows]
    )
    assert rows[0].weight != rows[0].num_examples


def test_with_k_set_rows_contain_the_noise_and_no_target() -> None:
    (row,) = rows_of(
        chosen(
            DIGITS,
            1,
            plan={"accumulation_steps": 2, "micro_batch_size": 4},
            simulation={"clients": 6, "compute": "vectorised"},
        )
    )
    assert row.target is None
    assert row.target_by is None
    assert row.gradient_variance is not None


def test_rows_of_local_steps_contain_no_noise() -> None:
    plan = {"accumulation_steps": 2, "micro_batch_size": 4}
    (row,) = rows_of(chosen(DIGITS, 1, plan=plan, local={"steps": 2}))
    assert (row.gradient_variance, row.squared_gradient, row.noise_scale) == (None, None, None)
