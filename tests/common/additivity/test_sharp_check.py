"""What the check finds in terms that are a thousandth of the loss, and in state between calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.common.additivity.comparison import Comparison
from headwater.common.additivity.example_cache import ExampleCache
from headwater.common.additivity.single_examples import SingleExamples
from headwater.common.errors import HiddenState, TaskNotAdditive
from tests.tasks import TwoLayers
from tests.tasks import examples as plain_examples

NUM_EXAMPLES = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.num_calls, self.mean = 0, torch.zeros(8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.tanh(self.first(inputs)))
        return outputs


def data() -> TensorDataset:
    random = torch.Generator().manual_seed(2)
    inputs = torch.randn(NUM_EXAMPLES, 6, generator=random)
    return TensorDataset(inputs, torch.arange(NUM_EXAMPLES) % 3)


LossOf = Callable[[Any, Tensor, Tensor], Tensor]


class Task:
    def __init__(self, loss: LossOf) -> None:
        self._loss, self.num_calls = loss, 0

    def new_model(self) -> nn.Module:
        return Net()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        raise NotImplementedError

    def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, int]:
        inputs, labels = batch
        return self._loss(model, inputs, labels), len(labels)


def cross_entropy(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs), labels, reduction="sum")


def check(loss: LossOf, examples: Any = None, task: Task | None = None) -> list[str]:
    torch.manual_seed(0)
    chosen = task or Task(loss)
    model = chosen.new_model().train()
    singles = SingleExamples(chosen, model, ExampleCache(chosen, examples or data()))
    singles.add(range(NUM_EXAMPLES), lambda _: True)
    comparison = Comparison(singles)
    comparison.run(lambda _: True)
    return comparison.notes


def contrastive(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    """Add a thousandth of an in-batch contrastive term."""
    hidden = functional.normalize(model.first(inputs), dim=1)
    pairs: Tensor = (hidden @ hidden.T).exp().log().sum()
    return cross_entropy(model, inputs, labels) + 1e-3 * pairs


def balancing(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    """Add a router's load-balancing term: the squares of each expert's share of the batch."""
    shares: Tensor = model.first(inputs).softmax(1).mean(0)
    return cross_entropy(model, inputs, labels) + 1e-3 * len(inputs) * shares.square().sum()


def penalised(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    penalty: Tensor = sum(parameter.square().sum() for parameter in model.parameters())
    return cross_entropy(model, inputs, labels) + 1e-4 * penalty


@pytest.mark.parametrize("loss", [contrastive, balancing])
def test_a_thousandth_of_a_term_over_pairs_of_examples_is_found_and_named(loss: LossOf) -> None:
    with pytest.raises(TaskNotAdditive, match="examples enter each other's loss"):
        check(loss)


def test_a_penalty_on_the_parameters_is_named_with_the_method_that_has_it_right() -> None:
    with pytest.raises(TaskNotAdditive, match="a penalty on the parameters") as caught:
        check(penalised)
    assert "penalty(model)" in caught.value.remedy


def test_padding_in_the_loss_is_named_as_what_it_is() -> None:
    class Padded(Task):
        def collate(self, rows: list[Tensor]) -> Tensor:
            return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0.0)

        def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, int]:
            return (model.first.weight[0, 0] + batch).square().sum(), len(batch)

    rows = [torch.ones(3), torch.ones(5), torch.ones(4), torch.ones(2)]
    with pytest.raises(TaskNotAdditive, match="padding enters the loss"):
        check(cross_entropy, rows, Padded(cross_entropy))


def test_a_sum_passes_and_so_does_a_task_that_cannot_compute_in_float64() -> None:
    assert check(cross_entropy) == []
    weights = torch.tensor([1.0, 2.0, 0.5])  # float32, as are the logits alone
    assert (
        check(lambda model, x, y: functional.cross_entropy(model(x), y, weights, reduction="sum"))
        == []
    )


def test_a_hook_that_clamps_gradients_is_named() -> None:
    def hooked(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        outputs = model(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda grad: grad.clamp(-10, 10))
        return functional.cross_entropy(outputs, labels, reduction="sum")

    with pytest.raises(TaskNotAdditive, match="a hook changes gradients"):
        check(hooked)


def counted(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    model.num_calls += 1
    factor: float = min(1.0, model.num_calls / 100)
    return cross_entropy(model, inputs, labels) * factor


def averaged(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    hidden = model.first(inputs)
    model.mean = 0.9 * model.mean + 0.1 * hidden.detach().mean(0)
    loss: Tensor = cross_entropy(model, inputs, labels) + (hidden - model.mean).square().sum()
    return loss


@pytest.mark.parametrize(("loss", "name"), [(counted, "num_calls"), (averaged, "mean")])
def test_state_outside_of_buffers_that_changes_the_next_loss_is_refused_by_name(
    loss: LossOf, name: str
) -> None:
    with pytest.raises(HiddenState, match=f": {name} changes with each call"):
        check(loss)


class Recurrent(nn.Module):
    """Begins each sequence where the last one of its batch ended."""

    def __init__(self, *, kept_in: type | None) -> None:
        super().__init__()
        self.kept_in, self.state = kept_in, None if kept_in is None else kept_in()
        self.cells, self.head = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        held = self.state["h"] if isinstance(self.state, dict) and self.state else self.state
        begins_anew = not isinstance(held, Tensor) or held.shape[1] != len(inputs)
        outputs, last = self.cells(inputs[:, None], None if begins_anew else held)
        self.state = last.detach() if self.kept_in is None else {"h": last.detach()}
        logits: Tensor = self.head(outputs[:, -1])
        return logits


@pytest.mark.parametrize("kept_in", [None, dict])
def test_a_hidden_state_that_is_kept_between_batches_is_refused_by_name(
    kept_in: type | None,
) -> None:
    class Kept(Task):
        def new_model(self) -> nn.Module:
            return Recurrent(kept_in=kept_in)

    def loss(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model(inputs), labels, reduction="sum")

    with pytest.raises(HiddenState, match=": state changes with each call"):
        check(loss, task=Kept(loss))


def test_a_task_that_counts_its_own_calls_is_refused_by_name() -> None:
    class Annealed(Task):
        def loss_sum(self, model: Any, batch: Any) -> tuple[Tensor, int]:
            self.num_calls += 1
            loss, weight = super().loss_sum(model, batch)
            return loss * self.num_calls, weight

    with pytest.raises(HiddenState, match=r"Annealed\.num_calls changes"):
        check(cross_entropy, task=Annealed(cross_entropy))


def test_what_a_pass_only_keeps_for_a_look_is_no_state() -> None:
    def seen(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        model.num_calls += 1
        return cross_entropy(model, inputs, labels)

    assert check(seen) == []


def test_a_generator_of_the_model_s_own_is_no_state() -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        noise = torch.randn(inputs.shape, generator=generator)
        return cross_entropy(model, inputs + noise, labels)

    [note] = check(noisy)
    assert "draws random numbers" in note


def test_the_check_of_plain_rows_is_silent() -> None:
    torch.manual_seed(0)
    task = TwoLayers()
    model = task.new_model().train()
    singles = SingleExamples(task, model, ExampleCache(task, plain_examples(4, seed=1)))
    singles.add(range(4), lambda _: True)
    comparison = Comparison(singles)
    comparison.run(lambda _: True)
    assert comparison.notes == []
