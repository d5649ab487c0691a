"""The noise scale that a run reports, against the truth from all per-example gradients.

The fleets are real devices on real digits, at a rate so small that float32 does not move: what the
rounds estimate stays the same, and so does its truth, which is computed in float64.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.data import TensorDataset

from examples.digits import Digits
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import Settings
from headwater.server.planning.noise_scale import DECAY
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

NUM_DEVICES, PER_DEVICE = 10, 128
QUOTA, MICRO_BATCH = 16, 8
ROUNDS_PER_EPOCH, EPOCHS = PER_DEVICE // QUOTA, 16
SHARE = QUOTA / PER_DEVICE
# A mean of many epochs is within this many of its own standard errors of the truth, or biased.
ERRORS = 4.0


class OneDigitEach(Digits):
    """Device d has images of the digit d alone."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        images, labels = self._train
        rows = torch.flatten(torch.nonzero(labels == part))[:PER_DEVICE]
        return TensorDataset(images[rows], labels[rows])


class AllDigitsEach(OneDigitEach):
    """The same images, partitioned so that each device has some of every digit."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        whole = [
            super(AllDigitsEach, self).train_examples(data=data, part=digit, num_parts=num_parts)
            for digit in range(num_parts)
        ]
        images, labels = (torch.cat([one.tensors[at] for one in whole]) for at in (0, 1))
        return TensorDataset(images[part::num_parts], labels[part::num_parts])


def truth(task: Digits) -> NDArray[np.float64]:
    """Return S, |G|^2 and the heterogeneity at the model's start, in float64."""
    model = build_model(task, seed=0).model.double()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(at: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, at, (image[None],))
        return functional.cross_entropy(logits, label[None], reduction="sum")

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))
    means, variances = [], []
    for part in range(NUM_DEVICES):
        data = task.train_examples(data=None, part=part, num_parts=NUM_DEVICES)
        images, labels = data.tensors
        assert len(labels) == PER_DEVICE
        found = per_example(parameters, images.double(), labels)
        gradients_NP = torch.cat([value.flatten(1) for value in found.values()], dim=1)
        mean_P = gradients_NP.mean(0)
        means.append(mean_P)
        variances.append(float((gradients_NP - mean_P).square().sum()) / (PER_DEVICE - 1))
    mean_P = torch.stack(means).mean(0)
    apart = np.mean([float((one - mean_P).square().sum()) for one in means])
    return np.array([np.mean(variances), float(mean_P @ mean_P), apart])


def rows_of(task_class: str, **changes: Any) -> list[RoundRow]:
    rows: list[RoundRow] = []
    settings = Settings.model_validate(
        {
            "task": f"tests/simulation/engines/test_noise_scale.py:{task_class}",
            "rounds": ROUNDS_PER_EPOCH * EPOCHS,
            "threads": 1,
            "simulation": {"clients": NUM_DEVICES, "compute": "vectorised"},
            "plan": {"accumulation_steps": QUOTA // MICRO_BATCH, "micro_batch_size": MICRO_BATCH},
            "optimizer": {"name": "sgd", "learning_rate": 1e-30},
            "evaluation": {"every_rounds": 10_000},
            **changes,
        }
    )
    run_engine(settings, on_round=rows.append, resume=False)
    return rows


def by_epochs(values: NDArray[np.float64]) -> tuple[Any, Any]:
    """Return the mean [n] over rounds [R, n] and its standard error.

    The rounds of an epoch share out one permutation; epochs are independent.
    """
    epochs = values.reshape(EPOCHS, ROUNDS_PER_EPOCH, -1).mean(1)
    return epochs.mean(0), epochs.std(0, ddof=1) / math.sqrt(EPOCHS)


def squared_mean(row: RoundRow) -> float:
    """Return |mean_P|^2: what was taken off it is the mean's variance."""
    assert row.squared_gradient is not None
    assert row.gradient_variance is not None
    return row.squared_gradient + row.gradient_variance * (1 - SHARE) / row.weight


@pytest.mark.parametrize("task", [OneDigitEach(), AllDigitsEach()], ids=lambda t: type(t).__name__)
@pytest.mark.slow
def test_a_run_reports_the_noise_heterogeneity_and_gradient_of_its_data(task: Digits) -> None:
    rows = rows_of(type(task).__name__)
    expected = truth(task)
    found, error = by_epochs(
        np.array([[r.gradient_variance, r.squared_gradient, r.heterogeneity] for r in rows])
    )
    assert (np.abs(found - expected) <= ERRORS * error).all(), (found, expected, error)
    assert (error[:2] < 0.1 * expected[:2]).all()
    scale = rows[-1].noise_scale
    assert scale is not None
    # Fading by d is worth (1 + d)/(1 - d) rounds: their error is larger than that of all.
    worth = (1 + DECAY) / (1 - DECAY)
    spread = math.hypot(*(error[:2] / expected[:2])) * math.sqrt(len(rows) / worth)
    assert scale == pytest.approx(expected[0] / expected[1], rel=ERRORS * spread)


@pytest.mark.slow
def test_norms_of_different_devices_would_mistake_heterogeneity_for_noise() -> None:
    rows = rows_of("OneDigitEach")
    expected = truth(OneDigitEach())
    wrong = []
    for row in rows:
        norms = np.array([client.step_gradient_norm[-1] for client in row.clients]) / QUOTA
        at_small, at_large = float((norms**2).mean()), squared_mean(row)
        wrong.append((at_small - at_large) / (1 / QUOTA - 1 / row.weight))
    found, error = by_epochs(np.array(wrong))
    assert found[0] - ERRORS * error[0] > 10 * expected[0]
