"""``headwater.evaluate`` gives what a plain loop over all examples gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import headwater
from headwater.common.errors import MissingData, TaskError, TaskNotAdditive
from headwater.common.task import load_task
from tests.python_tasks import Annealed

TASK = "examples/digits.py:Digits"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> headwater.Run:
    out = tmp_path_factory.mktemp("run")
    return headwater.simulate(TASK, clients=4, rounds=3, out=out, progress=False)


@pytest.mark.slow
def test_a_run_a_folder_and_a_module_are_tested_alike(run: headwater.Run) -> None:
    out = run.settings.out
    assert out is not None
    found = [
        run.evaluate(),
        headwater.evaluate(out),
        headwater.evaluate(out / "model.safetensors"),
        headwater.evaluate(run.model, task=TASK),
    ]
    for one in found:
        assert one.metrics["accuracy"] == pytest.approx(run.metrics["test_accuracy"])
        assert one.loss == pytest.approx(run.metrics["test_loss"])


class Scaled(Annealed):
    """Inputs that are scaled by what the run measures."""

    measured: ClassVar[dict[str, Any]] = {"inputs": headwater.Moments(-1000, 1000, size=3)}
    found: Any = None

    def statistics(self, example: Any) -> dict[str, Any]:
        return {"inputs": example[0]}

    def use_statistics(self, found: Any) -> None:
        self.found = found["inputs"]

    def loss_sum(self, model: nn.Module, batch: Any) -> Any:
        inputs = batch[0] if self.found is None else self.found.scaled(batch[0])
        return super().loss_sum(model, (inputs, batch[1]))


@pytest.mark.parametrize("task", [Annealed, Scaled])
def test_a_task_is_tested_as_the_last_round_left_it(
    task: type, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = headwater.simulate(
        task, clients=4, rounds=3, out=tmp_path, statistics=task is Scaled, progress=False
    )
    expected = pytest.approx(run.metrics["test_loss"])
    assert run.evaluate().loss == expected
    assert headwater.evaluate(tmp_path, task=task).loss == expected
    assert "the task uses statistics" not in caplog.text
    headwater.evaluate(run.model, task=task)
    assert ("the task uses statistics" in caplog.text) is (task is Scaled)


def test_a_folder_s_model_is_tested_by_a_loss(run: headwater.Run) -> None:
    """The task that built it is in the run's record."""
    out = run.settings.out
    assert out is not None
    data = load_task(TASK).test_examples()  # type: ignore[attr-defined]
    found = headwater.evaluate(out, data, loss=nn.CrossEntropyLoss())
    assert found.loss == pytest.approx(run.metrics["test_loss"])


def test_a_loss_of_torch_s_is_enough_to_test_a_module() -> None:
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(5, 3), torch.randn(40, 5), torch.randint(0, 3, (40,))
    weights = torch.tensor([1.0, 0.5, 2.0])
    loss = nn.CrossEntropyLoss(weight=weights)
    found = headwater.evaluate(model, TensorDataset(inputs, targets), loss=loss)
    with torch.no_grad():
        assert found.loss == pytest.approx(loss(model(inputs), targets).item(), rel=1e-4)
    assert found.num_examples == 40
    assert model.training, "the caller goes on training"


def test_examples_that_cannot_be_tested_are_left_out_and_counted() -> None:
    inputs = torch.randn(10, 5)
    inputs[3] = float("nan")
    found = headwater.evaluate(
        nn.Linear(5, 1), TensorDataset(inputs, torch.zeros(10, 1)), loss=nn.MSELoss()
    )
    assert (found.num_examples, found.num_left_out) == (9, 1)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, TaskError),
        ({"task": TASK, "loss": nn.MSELoss()}, TaskError),
        ({"loss": nn.MSELoss()}, TaskError),
        ({"task": "tests/server/test_evaluation_api.py:Untested"}, MissingData),
    ],
)
def test_what_is_missing_is_named_with_a_remedy(
    given: dict[str, Any], error: type[headwater.HeadwaterError]
) -> None:
    with pytest.raises(error) as found:
        headwater.evaluate(nn.Linear(5, 1), **given)
    assert found.value.remedy


class Untested:
    """A task without test examples."""

    def new_model(self) -> nn.Module:
        return nn.Linear(5, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.zeros(2, 5), torch.zeros(2, 1))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        return (model(inputs) - targets).square().sum(), len(targets)


def test_a_metric_that_is_a_mean_is_refused() -> None:
    """The mean of each batch, divided by the examples: 0.002 where 0.4 is right."""
    data = TensorDataset(torch.randn(9, 4), torch.zeros(9, dtype=torch.int64))
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.bias[0] = 99.0

    def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == targets).float().mean()

    with pytest.raises(TaskNotAdditive, match="the metric right of 4 examples together is 1"):
        headwater.evaluate(model, data, loss=nn.CrossEntropyLoss(), metrics={"right": mean})
    one = TensorDataset(data.tensors[0][:1], data.tensors[1][:1])
    found = headwater.evaluate(model, one, loss=nn.CrossEntropyLoss(), metrics={"right": mean})
    assert found.metrics == {"right": 1.0}


class Noisy(TensorDataset):
    """Examples that draw from torch as they are read."""

    def __getitem__(self, at: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(3), self.tensors[1][at]


def test_noisy_examples_are_tested_alike_each_time_and_the_caller_s_draws_go_on() -> None:
    data, model = Noisy(torch.zeros(9, 3), torch.zeros(9, dtype=torch.long)), nn.Linear(3, 2)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(headwater.evaluate(model, data, loss=nn.CrossEntropyLoss()).loss)
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]
