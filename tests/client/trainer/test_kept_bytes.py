"""What a text keeps in memory is counted at three lengths, and foreseen at any other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.client.trainer.kept_bytes import MAX_GROWTH, count_by_length, kept_bytes
from headwater.client.training.context import TrainingContext
from tests.laws.architectures import Ragged
from tests.training_contexts import training_context

WIDTH, USUAL = 8, 12


class Attention(nn.Module):
    """Attention whose T x T weights exist; without it, a perceptron."""

    def __init__(self, *, is_quadratic: bool) -> None:
        super().__init__()
        self.is_quadratic = is_quadratic
        self.words, self.inner = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words_BT: Tensor) -> Tensor:
        hidden_BTD: Tensor = self.inner(self.words(words_BT)).tanh()
        if not self.is_quadratic:
            return hidden_BTD
        weights_BTT = (hidden_BTD @ hidden_BTD.transpose(1, 2)).softmax(-1)
        mixed_BTD: Tensor = weights_BTT @ hidden_BTD
        return mixed_BTD


@dataclass(frozen=True)
class Texts(Ragged):
    """Texts of which the lengths are given; one with the word 19 cannot be read."""

    is_quadratic: bool = False

    def new_model(self) -> nn.Module:
        return Attention(is_quadratic=self.is_quadratic)

    def loss_sum(self, model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, int]:
        if bool((tokens_BT == 19).any()):
            raise ValueError("nineteen")
        return functional.relu(model(tokens_BT)).sum(), tokens_BT.shape[1]


def context_of(lengths: list[int], *, is_quadratic: bool, word: int = 1) -> TrainingContext:
    texts = [torch.full((length,), word) for length in lengths]
    return training_context(Texts(is_quadratic=is_quadratic), texts)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_quadratic", [True, False])
@pytest.mark.parametrize("lengths", [[6, 12, 24, 600], [12, 13, 24, 600], [4, 12, 12, 600]])
def test_a_text_fifty_times_as_long_is_foreseen(lengths: list[int], is_quadratic: bool) -> None:
    known = [length for length in lengths if length < 600]
    cost = count_by_length(
        context_of(known, is_quadratic=is_quadratic), limit_bytes=None, rest_bytes=0
    )
    found = float(kept_bytes(context_of([600], is_quadratic=is_quadratic), [0]))
    assert cost is not None
    assert found <= cost.at(600) * 1.01
    if len(set(known)) == 3:
        assert cost.at(600) <= 1.05 * found


class Linked(Texts):
    """Multiplies with a sparse matrix, which autograd saves, as a task on graphs does."""

    def loss_sum(self, model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, int]:
        links = torch.eye(tokens_BT.shape[1]).to_sparse()
        rows_ID = model(tokens_BT)[0]
        return torch.sparse.mm(links, rows_ID).square().sum(), tokens_BT.shape[1]


def test_a_sparse_tensor_that_is_kept_is_no_failure() -> None:
    dense, sparse = (training_context(task(), [torch.ones(6).long()]) for task in (Texts, Linked))  # type: ignore[arg-type]
    assert 0 < kept_bytes(sparse, [0]) <= 2 * kept_bytes(dense, [0])


def test_a_longer_text_is_counted_only_if_it_fits_whatever_its_square() -> None:
    context = context_of([6, 12, 12, 24], is_quadratic=True)
    usual = kept_bytes(context, [1])
    low = count_by_length(context, limit_bytes=10 * usual, rest_bytes=usual)
    high = count_by_length(context, limit_bytes=11 * usual, rest_bytes=usual // 4)
    assert low is not None
    assert high is not None
    assert (low.longest, high.longest) == (12, 24)


def test_a_text_beyond_four_times_the_usual_length_is_not_counted() -> None:
    context = context_of([12, 12, 12, 12, 12, 12, 12, 80], is_quadratic=False)
    assert context.lengths is not None
    assert MAX_GROWTH * context.lengths.usual < 80
    cost = count_by_length(context, limit_bytes=None, rest_bytes=0)
    assert cost is not None
    assert cost.longest == 12


def test_texts_that_fail_give_no_curve() -> None:
    context = context_of([6, 12, 24], is_quadratic=True, word=19)
    assert count_by_length(context, limit_bytes=None, rest_bytes=0) is None


class Penalised(Texts):
    """Adds a term whose gradients ``torch.func`` takes, where it is to."""

    takes_gradients = False

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def loss_sum(self, model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, int]:
        values = model(tokens_BT.float()[..., None])
        if self.takes_gradients:
            torch.func.grad(lambda factor: factor.sum())(torch.ones(2))
        return values.square().sum(), tokens_BT.shape[1]


class PenalisedMore(Penalised):
    takes_gradients = True


def test_a_loss_that_calls_torch_func_counts_as_much_as_without() -> None:
    counts = [
        kept_bytes(training_context(task(), [torch.ones(24)]), (0,))  # type: ignore[arg-type]
        for task in (Penalised, PenalisedMore)
    ]
    assert counts[0] == counts[1] > 0
