"""The check of additivity refuses means, padding, batch statistics and changed buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.common.additivity.comparison import Comparison
from headwater.common.additivity.example_cache import ExampleCache
from headwater.common.additivity.single_examples import SingleExamples
from headwater.common.errors import BuffersChanged, TaskError, TaskFailed, TaskNotAdditive
from headwater.common.task import Task, loss_sum_alone
from tests.additivity import check_additive
from tests.tasks import (
    NAN_GRADIENT,
    NAN_LOSS,
    RAISES_BACKWARD,
    RAISES_FORWARD,
    Given,
    TwoLayers,
    examples,
    squares,
)


def check(task: Task, data: TensorDataset | None = None) -> None:
    torch.manual_seed(0)
    check_additive(task, task.new_model(), data or examples(6))


def test_a_loss_sum_passes() -> None:
    check(TwoLayers())


def test_a_mean_is_refused_and_called_a_mean() -> None:
    def mean(model: nn.Module, batch: Sequence[Tensor]) -> Any:
        loss, weight = squares(model, batch)
        return loss / weight, weight

    with pytest.raises(TaskNotAdditive, match="probably a mean is returned"):
        check(Given(mean))


def test_a_mean_that_claims_a_weight_of_one_is_refused() -> None:
    def mean(model: nn.Module, batch: Sequence[Tensor]) -> Any:
        return squares(model, batch)[0] / len(batch[0]), 1

    with pytest.raises(TaskNotAdditive, match="together weigh 1, one by one 2"):
        check(Given(mean))


class Centred(nn.Module):
    """Subtracts the batch's mean, as BatchNorm does."""

    def forward(self, hidden_BH: Tensor) -> Tensor:
        return hidden_BH - hidden_BH.mean(0, keepdim=True) / 2


def test_a_layer_that_mixes_the_batch_is_refused() -> None:
    mixing = Given(squares, lambda: nn.Sequential(nn.Linear(3, 2), Centred(), nn.Linear(2, 1)))
    with pytest.raises(TaskNotAdditive, match="a layer mixes the examples of a batch"):
        check(mixing)


class GradientMixed(nn.Module):
    """Keeps the values and mixes the gradients of the batch."""

    def forward(self, hidden_BH: Tensor) -> Tensor:
        mean_H = hidden_BH.mean(0, keepdim=True)
        return hidden_BH + (mean_H - mean_H.detach())


def test_a_layer_that_mixes_only_the_gradients_is_refused() -> None:
    mixing = Given(
        squares, lambda: nn.Sequential(nn.Linear(3, 2), GradientMixed(), nn.Linear(2, 1))
    )
    with pytest.raises(TaskNotAdditive, match="the gradient of 4 examples together"):
        check(mixing)


def padded(num_tokens: Sequence[int]) -> TensorDataset:
    """Rows of integer tokens in 1..4, padded with 0 to a common length."""
    rows = torch.zeros(len(num_tokens), max(num_tokens), dtype=torch.int64)
    for row, length in zip(rows, num_tokens, strict=True):
        row[:length] = torch.arange(length) % 4 + 1
    return TensorDataset(rows)


def trimmed(examples: Sequence[tuple[Tensor]]) -> Tensor:
    """Collate rows to the longest of them."""
    rows = torch.stack([example[0] for example in examples])
    return rows[:, : int((rows > 0).sum(1).max())]


class Tokens(TwoLayers):
    """Predicts each token from itself; ``in_loss`` and ``in_weight`` say whether padding counts."""

    max_weight_per_example = 5

    def __init__(self, *, in_weight: bool = False, in_loss: bool = False) -> None:
        super().__init__()
        self.in_weight, self.in_loss = in_weight, in_loss

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 5))

    def collate(self, examples: Sequence[tuple[Tensor]]) -> Tensor:
        return trimmed(examples)

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        ignored = -100 if self.in_loss else 0
        logits = model(batch).flatten(0, 1)
        loss = functional.cross_entropy(
            logits, batch.flatten(), ignore_index=ignored, reduction="sum"
        )
        return loss, batch.numel() if self.in_weight else int((batch > 0).sum())


def test_tokens_without_their_padding_pass() -> None:
    check(Tokens(), padded([5, 2, 3, 1]))


def test_padding_in_the_weight_is_refused() -> None:
    with pytest.raises(TaskNotAdditive, match="padding is counted in the weight"):
        check(Tokens(in_weight=True), padded([5, 2, 3, 1]))


def test_padding_in_the_loss_is_refused() -> None:
    with pytest.raises(TaskNotAdditive, match="padding enters the loss"):
        check(Tokens(in_loss=True), padded([5, 2, 3, 1]))


def test_a_weight_above_the_tasks_own_bound_is_refused_with_the_bound() -> None:
    with pytest.raises(TaskNotAdditive, match=r"weighs 6, more than .* of 5") as caught:
        check(Tokens(), padded([2, 6]))
    assert "max_weight_per_example" in caught.value.remedy


def test_a_model_with_dropout_passes() -> None:
    check(Given(squares, lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))))


def test_a_mean_is_found_in_a_model_with_dropout() -> None:
    def mean(model: nn.Module, batch: Sequence[Tensor]) -> Any:
        return squares(model, batch)[0] / len(batch[0]), len(batch[0])

    random = Given(mean, lambda: nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)))
    with pytest.raises(TaskNotAdditive, match="mean"):
        check(random)


def test_a_single_example_passes() -> None:
    check(TwoLayers(), examples(1))


def test_the_check_changes_neither_model_nor_gradients_nor_random_state() -> None:
    task = TwoLayers()
    model = task.new_model().eval()
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    check_additive(task, model, examples(6))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not model.training
    assert torch.equal(torch.get_rng_state(), state)


class Counting(nn.Module):
    """Keeps a running count in a buffer, in place or by assigning a new tensor."""

    count: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.in_place = in_place

    def forward(self, inputs_BI: Tensor) -> Tensor:
        if self.training:
            if self.in_place:
                self.count += 1
            else:
                self.count = self.count + 1
        return inputs_BI


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_training_changes_is_refused_by_name(in_place: bool) -> None:
    counting = Given(squares, lambda: nn.Sequential(Counting(in_place=in_place), nn.Linear(3, 1)))
    with pytest.raises(BuffersChanged, match=r"0\.count"):
        check(counting)


class Clamping(nn.Linear):
    """Bounds its own weight in the forward pass, as an embedding with ``max_norm`` does."""

    def forward(self, inputs_BI: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(inputs_BI)


def test_a_parameter_that_a_forward_pass_changes_is_refused_by_name() -> None:
    with pytest.raises(BuffersChanged, match="changed the parameter weight"):
        check(Given(squares, lambda: Clamping(3, 1)))


def with_gradient_penalty(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    inputs_BI = batch[0].clone().requires_grad_()
    loss, weight = squares(model, (inputs_BI, batch[1]))
    (slopes_BI,) = torch.autograd.grad(model(inputs_BI).sum(), inputs_BI, create_graph=True)
    return loss + slopes_BI.square().sum(), weight


def test_a_loss_that_takes_gradients_of_its_inputs_passes() -> None:
    check(Given(with_gradient_penalty))


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: (squares(model, batch)[0].detach(), len(batch[0])),
        lambda model, batch: (torch.tensor(squares(model, batch)[0].item()), len(batch[0])),
    ],
)
def test_a_loss_that_is_cut_off_from_its_parameters_is_refused(loss: Any) -> None:
    with pytest.raises(TaskError, match="depends on the parameters, and has no gradient") as caught:
        check(Given(loss))
    assert "detach()" in caught.value.remedy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_that_is_summed_in_half_precision_is_refused(dtype: torch.dtype) -> None:
    half = Given(lambda model, batch: (squares(model, batch)[0].to(dtype), len(batch[0])))
    with pytest.raises(TaskNotAdditive, match=r"summed in b?float16") as caught:
        check(half)
    assert "logits.float()" in caught.value.remedy


def test_a_constant_loss_passes_and_leaves_the_parameters_as_they_were() -> None:
    task = Given(lambda model, batch: (torch.tensor(0.5 * len(batch[0])), len(batch[0])))
    torch.manual_seed(0)
    model = task.new_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    check_additive(task, model, examples(6))
    assert all(map(torch.equal, before, model.parameters()))


def in_place(model: nn.Module, batch: Any) -> Any:
    batch[0].mul_(0.5).add_(1.0)
    return squares(model, batch)


def taking_labels_out(model: nn.Module, batch: Any) -> Any:
    targets = batch.pop()
    return squares(model, (batch[0], targets))


def in_place_with_slopes(model: nn.Module, batch: Any) -> Any:
    batch[0].mul_(0.5)
    return with_gradient_penalty(model, batch)


@pytest.mark.parametrize("loss", [in_place, taking_labels_out, in_place_with_slopes])
def test_a_loss_that_changes_its_batch_passes_as_each_call_gets_a_new_one(loss: Any) -> None:
    check(Given(loss))


def test_a_loss_alone_that_needs_autograd_is_computed_on_the_batch_as_it_was() -> None:
    model, inputs_BI, targets_B1 = nn.Linear(3, 1), torch.ones(2, 3), torch.zeros(2, 1)
    task = Given(in_place_with_slopes)
    found, _, _ = loss_sum_alone(task, model, [inputs_BI.clone(), targets_B1])
    expected = with_gradient_penalty(model, [inputs_BI / 2, targets_B1])[0]
    assert found.item() == expected.item()


def test_a_mean_that_takes_gradients_of_its_inputs_is_refused() -> None:
    def mean(model: nn.Module, batch: Sequence[Tensor]) -> Any:
        loss, weight = with_gradient_penalty(model, batch)
        return loss / weight, weight

    with pytest.raises(TaskNotAdditive, match="probably a mean is returned"):
        check(Given(mean))


@pytest.mark.parametrize("kind", [NAN_LOSS, NAN_GRADIENT, RAISES_BACKWARD, RAISES_FORWARD])
def test_an_example_that_training_would_skip_is_skipped(kind: int) -> None:
    check(TwoLayers(), examples(6, kinds=[kind, 0, kind]))


def test_a_mean_is_found_after_examples_that_fail() -> None:
    class Mean(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            loss, weight = super().loss_sum(model, batch)
            return loss / weight, weight

    with pytest.raises(TaskNotAdditive, match="mean"):
        check(Mean(), examples(12, kinds=[NAN_LOSS, RAISES_FORWARD] * 3))


def test_a_piece_that_raises_is_named_with_the_user_s_line() -> None:
    def three(model: nn.Module, batch: Sequence[Tensor]) -> Any:
        if len(batch[0]) == 3:
            raise ValueError("not three")
        return squares(model, batch)

    task, data = Given(three), examples(10)
    comparison = Comparison(SingleExamples(task, task.new_model(), ExampleCache(task, data)))
    with pytest.raises(TaskFailed, match="3 examples that work one by one fail") as caught:
        comparison.compare_pieces(ExampleCache(task, data), range(10))
    assert 'raise ValueError("not three")' in caught.value.message
