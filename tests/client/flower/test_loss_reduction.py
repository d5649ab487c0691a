"""What autograd's graph tells about a loss, in the forms that people write."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.client.flower.loss_reduction import LossReduction, watch

N = 6
Loss = Callable[[Tensor, Tensor], Tensor]

SUMS: dict[str, Loss] = {
    "cross entropy": lambda o, y: functional.cross_entropy(o, y, reduction="sum"),
    "label smoothing": lambda o, y: functional.cross_entropy(
        o, y, reduction="sum", label_smoothing=0.1
    ),
    "losses of single examples": lambda o, y: functional.cross_entropy(
        o, y, reduction="none"
    ).sum(),
    "a mean times n": lambda o, y: functional.cross_entropy(o, y) * len(y),
    "a smoothed mean times n": lambda o, y: (
        functional.cross_entropy(o, y, label_smoothing=0.1) * len(y)
    ),
    "half a squared error": lambda o, y: 0.5 * (o**2).sum(),
    "the mean of each row, summed": lambda o, y: (o**2).mean(1).sum(),
    "a mean of each example in a loop": lambda o, y: sum(
        (functional.cross_entropy(o[i : i + 1], y[i : i + 1]) for i in range(N)), torch.zeros(())
    ),
    "stacked means of each example": lambda o, y: torch.stack(
        [functional.cross_entropy(o[i : i + 1], y[i : i + 1]) for i in range(N)]
    ).sum(),
    "two terms": lambda o, y: (
        functional.cross_entropy(o, y, reduction="sum") + 0.1 * functional.relu(o).sum()
    ),
}
MEANS: dict[str, Loss] = {
    "cross entropy": functional.cross_entropy,
    "label smoothing": lambda o, y: functional.cross_entropy(o, y, label_smoothing=0.1),
    "binary cross entropy": lambda o, y: functional.binary_cross_entropy(o[:, 0].sigmoid(), y / 4),
    "with logits": lambda o, y: functional.binary_cross_entropy_with_logits(o[:, 0], y / 4),
    "squared error": lambda o, y: functional.mse_loss(o[:, 0], y.float()),
    "absolute error": lambda o, y: functional.l1_loss(o[:, 0], y.float()),
    "a written mean": lambda o, y: (o**2).mean(),
    "a written mean with a sign": lambda o, y: -functional.log_softmax(o, 1)[:, 0].mean(),
    "a mean over dimension 0": lambda o, y: (o**2).mean(0).sum(),
    "a mean over the last dimension of a vector": lambda o, y: (o[:, 0] ** 2).mean(-1),
    "the mean of a list": lambda o, y: torch.stack(
        [functional.cross_entropy(o[i : i + 1], y[i : i + 1]) for i in range(N)]
    ).mean(),
    "a sum and a mean": lambda o, y: (
        functional.cross_entropy(o, y, reduction="sum") + 0.1 * functional.relu(o).mean()
    ),
    "a mean over accumulation steps": lambda o, y: functional.cross_entropy(o, y) / 4,
    "in another type": lambda o, y: functional.cross_entropy(o, y).double(),
}
UNSEEN: dict[str, Loss] = {
    "a norm": lambda o, y: torch.linalg.norm(o),
    "the root of a sum": lambda o, y: (o**2).sum().sqrt(),
    "one output": lambda o, y: o[0, 0] * 1,
}


def reduction_of(loss: Loss) -> LossReduction:
    torch.manual_seed(0)
    outputs = nn.Linear(4, 3)(torch.randn(N, 4))
    value = loss(outputs, torch.tensor([0, 1, 2, 0, 1, 2]))
    found = watch(value)
    value.backward()  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("form", SUMS)
def test_a_sum_is_told_from_a_mean(form: str) -> None:
    found = reduction_of(SUMS[form])
    assert found.is_seen
    assert not found.is_mean(N)


@pytest.mark.parametrize("form", MEANS)
def test_a_mean_is_recognised(form: str) -> None:
    found = reduction_of(MEANS[form])
    assert found.is_seen
    assert found.is_mean(N)


@pytest.mark.parametrize("form", UNSEEN)
def test_what_the_graph_does_not_show_is_said(form: str) -> None:
    assert not reduction_of(UNSEEN[form]).is_seen


def test_the_mean_of_one_example_is_its_sum() -> None:
    assert not reduction_of(MEANS["cross entropy"]).is_mean(1)


@pytest.mark.parametrize("divisor", [1, 3, N])
def test_the_factor_of_a_sum_is_read(divisor: int) -> None:
    found = reduction_of(lambda o, y: functional.cross_entropy(o, y, reduction="sum") / divisor)
    assert found.factor == pytest.approx(1 / divisor)
