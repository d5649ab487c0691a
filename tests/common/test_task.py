"""What a task may do wrong, and the name that it gets for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.common.data.additivity import check_additive
from headwater.common.data.batches import batch_of, evaluate_sums
from headwater.common.errors import (
    BuffersChanged,
    EmptyDataset,
    MissingData,
    TaskError,
    TaskNotAdditive,
    UnknownTask,
)
from headwater.common.task import Task, load_task, loss_sum, open_train_examples
from tests.tasks import (
    NAN_GRADIENT,
    NAN_LOSS,
    RAISES_BACKWARD,
    RAISES_FORWARD,
    TwoLayers,
    examples,
)


def check(task: Task, data: TensorDataset | None = None) -> None:
    torch.manual_seed(0)
    check_additive(task, task.new_model(), data or examples(6))


class Given(TwoLayers):
    """A task made of a loss and, if need be, a model."""

    def __init__(self, loss: Callable[..., Any], model: Callable[[], nn.Module] | None = None):
        super().__init__()
        self.loss, self.model = loss, model

    def new_model(self) -> nn.Module:
        return super().new_model() if self.model is None else self.model()

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
        return self.loss(model, batch)


def squares(model: nn.Module, batch: Sequence[Tensor]) -> Any:
    return (model(batch[0]).squeeze(1) - batch[1]).square().sum(), len(batch[0])


def test_a_sum_passes() -> None:
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
    """Leaves the values alone and mixes the gradients of the batch."""

    def forward(self, hidden_BH: Tensor) -> Tensor:
        mean_H = hidden_BH.mean(0, keepdim=True)
        return hidden_BH + (mean_H - mean_H.detach())


def test_a_layer_that_mixes_only_the_gradients_is_refused() -> None:
    mixing = Given(
        squares, lambda: nn.Sequential(nn.Linear(3, 2), GradientMixed(), nn.Linear(2, 1))
    )
    with pytest.raises(TaskNotAdditive, match="the gradient of 2 examples together"):
        check(mixing)


def padded(num_tokens: Sequence[int]) -> TensorDataset:
    """Rows of whole-numbered tokens in 1..4, padded with 0 to a common length."""
    rows = torch.zeros(len(num_tokens), max(num_tokens), dtype=torch.int64)
    for row, length in zip(rows, num_tokens, strict=True):
        row[:length] = torch.arange(length) % 4 + 1
    return TensorDataset(rows)


def trimmed(examples: Sequence[tuple[Tensor]]) -> Tensor:
    """Collate rows to the longest of them."""
    rows = torch.stack([example[0] for example in examples])
    return rows[:, : int((rows > 0).sum(1).max())]


class Tokens(TwoLayers):
    """Predicts each token from itself; what is counted depends on ``counts_padding``."""

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


def test_one_example_can_show_nothing_and_passes() -> None:
    check(TwoLayers(), examples(1))


def test_the_check_leaves_model_gradients_and_random_state_as_they_were() -> None:
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
    """Keeps a running count in a buffer, in place or by putting another tensor there."""

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


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda loss, n: loss, "must return"),
        (lambda loss, n: (loss,), "must return"),
        (lambda loss, n: [loss, n], "must return"),
        (lambda loss, n: (loss.expand(2), n), r"found shape \(2,\)"),
        (lambda loss, n: (loss.reshape(1), n), r"found shape \(1,\)"),
        (lambda loss, n: (loss.item(), n), "found float"),
        (lambda loss, n: (loss, n + 0.5), "whole number"),
        (lambda loss, n: (loss, -n), "whole number"),
        (lambda loss, n: (loss, None), "whole number"),
        (lambda loss, n: (loss, "3"), "whole number"),
        (lambda loss, n: (loss, float("nan")), "whole number"),
        (lambda loss, n: (loss, float("inf")), "whole number"),
        (lambda loss, n: (loss, torch.ones(2)), "whole number"),
        (lambda loss, n: (loss, n, [1.0]), "metric"),
        (lambda loss, n: (loss, n, {"a": torch.ones(2)}), "metric a"),
        (lambda loss, n: (loss, n, {"a": None}), "metric a"),
    ],
)
def test_an_answer_of_the_wrong_form_is_a_task_error(
    answer: Callable[[Tensor, int], Any], match: str
) -> None:
    task = Given(lambda model, batch: answer(*squares(model, batch)))
    data = examples(2)
    with pytest.raises(TaskError, match=match):
        loss_sum(task, task.new_model(), batch_of(task, data, [0, 1]))


@pytest.mark.parametrize("weight", [2, 2.0, torch.tensor(2), torch.tensor([2])])
def test_a_whole_weight_is_read_in_any_form(weight: Any) -> None:
    task = Given(lambda model, batch: (squares(model, batch)[0], weight, {"a": torch.tensor(3)}))
    _, whole, metrics = loss_sum(task, task.new_model(), batch_of(task, examples(2), [0, 1]))
    assert (whole, metrics) == (2, {"a": 3.0})


def test_evaluation_sums_are_those_of_one_large_batch() -> None:
    task, data = TwoLayers(), examples(10)
    torch.manual_seed(1)
    model = task.new_model()
    whole = loss_sum(task, model, batch_of(task, data, range(10)))
    assert evaluate_sums(task, model, data, 3) == (whole[0].item(), 10, {})


def test_a_plain_list_of_examples_is_collated() -> None:
    rows = [(torch.tensor([float(p)]), p) for p in range(5)]
    values, numbers = batch_of(TwoLayers(), rows, [3, 1])
    assert torch.equal(values, torch.tensor([[3.0], [1.0]]))
    assert numbers.tolist() == [3, 1]


GOOD_TASK = """
from tests.tasks import TwoLayers

class Good(TwoLayers):
    pass

class NeedsMore(TwoLayers):
    def __init__(self, required):
        pass

class Fails(TwoLayers):
    def __init__(self):
        raise OSError("no such device")

class Unfinished:
    def new_model(self): ...
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_task.py"
    file.write_text(GOOD_TASK)
    return file


def test_a_task_is_loaded_by_file_and_class(task_file: Path) -> None:
    assert type(load_task(f"{task_file}:Good")).__name__ == "Good"


@pytest.mark.parametrize("spec", ["Good", "my_task.py", ":Good", "my_task.py:", ""])
def test_a_spec_without_file_and_class_is_an_unknown_task(spec: str) -> None:
    with pytest.raises(UnknownTask, match=r"expected FILE\.py:Class"):
        load_task(spec)


def test_a_task_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownTask, match=r"there is no task file .*absent\.py"):
        load_task(f"{tmp_path}/absent.py:Good")


@pytest.mark.parametrize("name", ["Absent", "__file__"])
def test_a_class_that_is_not_there_is_named(task_file: Path, name: str) -> None:
    with pytest.raises(UnknownTask, match=f"has no class {name}"):
        load_task(f"{task_file}:{name}")


@pytest.mark.parametrize("name", ["NeedsMore", "Fails"])
def test_a_class_that_cannot_be_made_is_a_task_error(task_file: Path, name: str) -> None:
    with pytest.raises(TaskError, match=name):
        load_task(f"{task_file}:{name}")


def test_missing_methods_are_named(task_file: Path) -> None:
    with pytest.raises(TaskError, match="no method train_examples, loss_sum"):
        load_task(f"{task_file}:Unfinished")


@pytest.mark.parametrize("text", ["def (", "import nowhere_to_be_found", "1 / 0"])
def test_a_file_that_fails_to_import_is_an_unknown_task(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(UnknownTask, match="cannot be imported"):
        load_task(f"{file}:Good")


def test_a_file_that_is_not_python_is_an_unknown_task(tmp_path: Path) -> None:
    file = tmp_path / "task.txt"
    file.write_text(GOOD_TASK)
    with pytest.raises(UnknownTask, match="is not a Python file"):
        load_task(f"{file}:Good")


def test_a_device_without_examples_is_refused() -> None:
    class Empty(TwoLayers):
        def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
            return examples(0)

    with pytest.raises(EmptyDataset, match="as part 3 of 4"):
        open_train_examples(Empty(), data=None, part=3, num_parts=4)


def test_data_that_cannot_be_read_is_missing_data() -> None:
    class Absent(TwoLayers):
        def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
            raise FileNotFoundError(data)

    with pytest.raises(MissingData):
        open_train_examples(Absent(), data=Path("nowhere"), part=0, num_parts=1)


@pytest.mark.parametrize("kind", [NAN_LOSS, NAN_GRADIENT, RAISES_BACKWARD, RAISES_FORWARD])
def test_an_example_that_training_would_leave_out_is_passed_over(kind: int) -> None:
    check(TwoLayers(), examples(6, kinds=[kind, 0, kind]))


def test_a_mean_is_found_behind_examples_that_fail() -> None:
    class Mean(TwoLayers):
        def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            loss, weight = super().loss_sum(model, batch)
            return loss / weight, weight

    with pytest.raises(TaskNotAdditive, match="mean"):
        check(Mean(), examples(12, kinds=[NAN_LOSS, RAISES_FORWARD] * 3))
