"""Masks clip nothing in silence: a masked round of any scale gives the step of plain PyTorch.

Regressions on unscaled targets have gradients and losses of 10^6 to 10^13.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater

NUM_CLIENTS, NUM_EACH, NUM_ROUNDS = 4, 8, 3


class Prices:
    """A regression on targets of about 10^5 to 10^6, with a metric of their size."""

    factor = 1e6

    def new_model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        inputs = torch.rand(NUM_EACH, 3, generator=random)
        noise = torch.rand(NUM_EACH, 1, generator=random)
        return TensorDataset(inputs, self.factor * (inputs.sum(1, keepdim=True) + noise))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Any]]:
        inputs, targets = batch
        errors = model(inputs) - targets
        squares = errors.square().sum()
        return squares, len(inputs), {"squared_error": squares.detach()}


class Hundreds(Prices):
    """Losses of a few millions, little beyond the fine bound of 2^20."""

    factor = 1.5e3


class Beyond(Prices):
    """Gradients beyond 2^36, the bound of the first sum."""

    factor = 1e12


class Tiny(Prices):
    """The same of 10^-6."""

    factor = 1e-6


def whole(task: Prices) -> tuple[Tensor, Tensor]:
    parts = [task.train_examples(data=None, part=n, num_parts=4) for n in range(NUM_CLIENTS)]
    inputs, targets = zip(*(part.tensors for part in parts), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def plain(task: Prices, rate: float) -> tuple[nn.Module, list[float]]:
    """Train on all examples; return the model, and the mean loss before each step."""
    torch.manual_seed(1)
    model, losses = task.new_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(NUM_ROUNDS):
        optimizer.zero_grad()
        loss, weight, _ = task.loss_sum(model, whole(task))
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item() / weight)
    return model, losses


def masked(task: type[Prices], rate: float, **secure: Any) -> headwater.Run:
    settings = {"secure.min_quota": 1, **{f"secure.{key}": value for key, value in secure.items()}}
    return headwater.simulate(
        task,
        clients=NUM_CLIENTS,
        rounds=NUM_ROUNDS,
        accumulation_steps=2,
        micro_batch_size=4,
        optimizer="SGD",
        learning_rate=rate,
        secure_aggregation="semi-honest",
        seed=1,
        threads=1,
        progress=False,
        settings=settings,
    )


@pytest.mark.parametrize(("ring_bits", "tolerance"), [(32, 1e-5), (16, 2e-3)])
@pytest.mark.parametrize("task", [Prices, Hundreds, Tiny])
def test_a_masked_run_on_unscaled_targets_takes_the_steps_of_plain_pytorch(
    task: type[Prices], ring_bits: int, tolerance: float
) -> None:
    run = masked(task, 0.2, ring_bits=ring_bits)
    expected, losses = plain(task(), 0.2)
    for found, other in zip(run.model.parameters(), expected.parameters(), strict=True):
        scale = float(other.detach().abs().max())
        assert (found - other).abs().max().item() <= tolerance * scale
    for row, loss in zip(run.history, losses, strict=True):
        assert row.loss == pytest.approx(loss, rel=3 * tolerance, abs=1e-7)
        assert row.metrics["train_squared_error"] == pytest.approx(row.loss, rel=1e-6, abs=1e-7)
        assert row.num_clipped == 0


def test_clipped_numbers_are_in_the_round_s_line_and_row(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate that diverges makes each gradient many times larger than the last one's bound."""
    caplog.set_level("WARNING")
    run = masked(Prices, 5e4)
    clipped = [row for row in run.history if row.num_clipped]
    assert clipped
    assert "masked numbers were clipped" in caplog.text


def test_a_first_sum_beyond_the_widest_bound_takes_a_step_that_is_said_to_be_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To repeat it would ask devices of few examples to mask most of them twice at one model."""
    caplog.set_level("WARNING")
    run = masked(Beyond, 1e-3)
    assert [row.round for row in run.history] == [1, 2, 3]
    assert run.history[0].num_clipped
    assert "the sum is off by what was beyond their bounds" in caplog.text
    assert all(bool(values.isfinite().all()) for values in run.model.parameters())
