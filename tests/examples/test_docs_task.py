"""docs/task.md is held to its word: its task runs, and breaking it gives the messages it quotes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.common.errors import (
    BatchDependentLayer,
    BuffersChanged,
    MissingData,
    TaskNotAdditive,
)
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.sources import load
from headwater.common.task import Task, load_task, open_train_examples
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine
from tests.additivity import check_additive

DOC = Path(__file__).parents[2] / "docs" / "task.md"


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    """Return the doc's own task, in a file as a reader would save it."""
    found = re.search(r"^```python\n(.*?)^```$", DOC.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    path = tmp_path / "rainfall.py"
    path.write_text(found.group(1))
    return path


def checked(task: Task) -> None:
    examples = open_train_examples(task, data=None, part=0, num_parts=1)
    check_additive(task, ModelImage(task.new_model()).model, examples)


def test_the_task_of_the_doc_trains_in_the_simulator(task_file: Path) -> None:
    rows: list[RoundRow] = []
    overrides = {
        "task": f"{task_file}:Rainfall",
        "rounds": 5,
        "optimizer.name": "sgd",
        "threads": 1,
        "simulation.clients": 4,
        "plan.accumulation_steps": 2,
        "out": task_file.parent / "run",
    }
    run_engine(load(None, overrides), on_round=rows.append, resume=False)
    assert rows[-1].loss < rows[0].loss / 2


def test_the_task_of_the_doc_opens_a_file(task_file: Path) -> None:
    torch.save(torch.arange(10.0).reshape(2, 5), task_file.parent / "rows.pt")
    task = load_task(f"{task_file}:Rainfall")
    examples = open_train_examples(task, data=task_file.parent / "rows.pt", part=0, num_parts=1)
    inputs, target = examples[1]
    assert inputs.tolist() == [5, 6, 7, 8]
    assert target.tolist() == [9]


def test_the_task_of_the_doc_names_a_missing_file(task_file: Path) -> None:
    task = load_task(f"{task_file}:Rainfall")
    with pytest.raises(MissingData, match=r"nowhere\.pt"):
        open_train_examples(task, data=Path("nowhere.pt"), part=0, num_parts=1)


Sums = tuple[Tensor, int]
Broken = Callable[[nn.Module, Tensor], Sums]


def mean_loss(model: nn.Module, inputs: Tensor) -> Sums:
    return model(inputs).square().mean(), len(inputs)


def counted_padding(model: nn.Module, inputs: Tensor) -> Sums:
    longest = int(inputs[:, 0].max())  # as if the first column were a length
    return model(inputs).square().sum(), len(inputs) * longest


def centred_inputs(model: nn.Module, inputs: Tensor) -> Sums:
    centred = inputs - inputs.mean(0) if len(inputs) > 1 else inputs
    return model(centred).square().sum(), len(inputs)


def detached_statistics(model: nn.Module, inputs: Tensor) -> Sums:
    # The value is the sum of squares; its gradient is scaled by the size of the batch.
    value = model(inputs).square().sum()
    return value.detach() + len(inputs) * (value - value.detach()), len(inputs)


def heavy_examples(model: nn.Module, inputs: Tensor) -> Sums:
    return model(inputs).square().sum(), 100 * len(inputs)


BROKEN: dict[str, Broken] = {
    "probably a mean is returned, not a sum": mean_loss,
    "probably padding is counted in the weight": counted_padding,
    "examples enter each other's loss": centred_inputs,
    "probably a layer mixes the examples of a batch": detached_statistics,
    "more than the task's max_weight_per_example": heavy_examples,
}


class BrokenTask:
    """Four examples whose first column is 1, 2, 3, 4."""

    max_weight_per_example = 10

    def __init__(self, loss: Broken) -> None:
        self._loss = loss

    def new_model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(3, 2)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[Tensor]:
        return [torch.tensor([float(row), 1.0, float(row**2)]) for row in (1, 2, 3, 4)]

    def loss_sum(self, model: nn.Module, batch: Tensor) -> Sums:
        return self._loss(model, batch)


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_task_gets_the_message_that_the_doc_quotes(message: str) -> None:
    assert f"`{message}`" in DOC.read_text()
    with pytest.raises(TaskNotAdditive, match=re.escape(message)):
        checked(BrokenTask(BROKEN[message]))


class Remembering(nn.Linear):
    """Counts its calls in a buffer, as a running statistic would."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("num_calls").add_(1)
        return functional.linear(inputs, self.weight, self.bias)


class RememberingTask(BrokenTask):
    """A correct loss over a model that it is not."""

    def __init__(self) -> None:
        super().__init__(lambda model, inputs: (model(inputs).square().sum(), len(inputs)))

    def new_model(self) -> nn.Module:
        return Remembering()


def test_a_model_that_keeps_running_statistics_gets_buffers_changed() -> None:
    assert "`BuffersChanged`" in DOC.read_text()
    with pytest.raises(BuffersChanged, match="num_calls"):
        checked(RememberingTask())


def test_a_model_with_batch_norm_gets_batch_dependent_layer() -> None:
    assert "`BatchDependentLayer`" in DOC.read_text()
    with pytest.raises(BatchDependentLayer):
        ModelImage(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
