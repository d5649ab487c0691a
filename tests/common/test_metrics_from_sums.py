"""Metrics of several sums: R2 and those of torchmetrics, as of all examples at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater
from headwater.common.errors import TaskError, TaskFailed
from headwater.common.task import shown_metrics
from tests.python_tasks import Signs

N, CLASSES = 60, 3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def values_of(asked: Any, outputs: Tensor, targets: Tensor, loss: Any) -> dict[str, float]:
    """Return the metrics of sums over ragged batches, whose model gives back its inputs."""
    task = headwater.Task(
        model=nn.Identity, examples=TensorDataset(outputs, targets), loss=loss, metrics=asked
    )
    total: dict[str, float] = {}
    for start, end in ((0, 7), (7, 8), (8, N)):
        _, _, sums = task.loss_sum(nn.Identity(), [outputs[start:end], targets[start:end]])
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + float(value)
    return task.metrics_from_sums(total, N)


def r2_of(outputs: Tensor, targets: Tensor) -> float:
    errors = (outputs - targets).double().square().sum(0)
    around = (targets.double() - targets.double().mean(0)).square().sum(0)
    return float((1 - errors / around).mean())


@pytest.mark.parametrize(("shape", "offset"), [((N,), 0.0), ((N, 1), 2000.0), ((N, 3), -5.0)])
def test_r2_is_that_of_all_examples(shape: tuple[int, ...], offset: float) -> None:
    targets = numbers(*shape) + offset
    outputs = targets + 0.3 * numbers(*shape, seed=1)
    found = values_of(["r2", "mse"], outputs, targets, nn.MSELoss())
    # The squares' sum has 53 bits, of which the mean's square takes away those above the spread.
    assert found["r2"] == pytest.approx(r2_of(outputs, targets), abs=1e-15 * max(offset**2, 10))
    assert found["mse"] == pytest.approx(float((outputs - targets).square().mean()), rel=1e-5)


def test_r2_of_targets_that_are_all_alike_is_none() -> None:
    assert math.isnan(values_of("r2", numbers(N), torch.ones(N), nn.MSELoss())["r2"])


def test_a_run_shows_r2_and_chooses_the_best_model_by_it() -> None:
    inputs = numbers(N, 2)
    targets = inputs.sum(1, keepdim=True) + 2
    run = headwater.simulate(
        model=lambda: nn.Linear(2, 1),
        examples=TensorDataset(inputs, targets),
        test=TensorDataset(inputs, targets),
        loss=nn.MSELoss(),
        metrics=["r2"],
        clients=4,
        rounds=3,
        progress=False,
        optimizer="sgd",
        learning_rate=0.1,
        settings={"evaluation.stop_when": "test_r2"},
    )
    with torch.no_grad():
        expected = r2_of(run.model(inputs), targets)
    assert run.metrics["test_r2"] == pytest.approx(expected, abs=1e-6)
    assert run.metrics.keys() == {"train_r2", "test_loss", "test_r2"}
    assert run.evaluate().metrics["r2"] == pytest.approx(expected, abs=1e-6)


class Hits:
    """The protocol of a metric of torchmetrics, with states that are sums."""

    def __init__(self, **reductions: Any) -> None:
        self._defaults: dict[str, Any] = {"hits": torch.zeros(CLASSES), "seen": torch.tensor(0)}
        self._reductions = {"hits": "sum", "seen": "sum"} | reductions
        self.reset()

    def reset(self) -> None:
        self.hits, self.seen = (copy.deepcopy(one) for one in self._defaults.values())

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        is_right = outputs.argmax(1) == targets
        self.hits += torch.bincount(targets[is_right], minlength=CLASSES)
        self.seen += len(targets)

    def compute(self) -> Tensor:
        return torch.div(self.hits.sum(), self.seen)


def test_a_metric_whose_states_are_sums_is_that_of_all_examples() -> None:
    outputs, targets = numbers(N, CLASSES), torch.arange(N) % CLASSES
    given = Hits()
    given.seen += 5  # the caller's own is left alone
    found = values_of({"mine": given}, outputs, targets, nn.CrossEntropyLoss())
    assert found == {"mine": float((outputs.argmax(1) == targets).double().mean())}
    assert given.seen == 5


def with_a_list() -> Hits:
    metric = Hits(hits="cat")
    metric._defaults["hits"] = list[Any]()
    return metric


def with_a_start() -> Hits:
    metric = Hits()
    metric._defaults["seen"] = torch.tensor(1)
    return metric


REFUSED: dict[str, tuple[Callable[[], Hits], str]] = {
    "every example's values": (with_a_list, "state hits keeps every example's values"),
    "a maximum": (lambda: Hits(seen="max"), "state seen is reduced by max"),
    "a start": (with_a_start, "state seen begins at another value than zero"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_metric_that_does_not_add_up_is_refused_by_its_state(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(TaskError, match=words) as found:
        values_of({"mine": make()}, numbers(N, 3), torch.arange(N) % 3, nn.CrossEntropyLoss())
    assert "(Hits) does not add up" in str(found.value)
    assert "dist_reduce_fx='sum'" in found.value.remedy


def test_a_metric_made_of_others_is_refused() -> None:
    """As torchmetrics' 1 - accuracy: its sums are in the others, and none came back."""
    metric = Hits()
    metric._defaults = {}
    metric.reset = lambda: None  # type: ignore[method-assign]
    with pytest.raises(TaskError, match="keeps no sums of its own"):
        values_of({"mine": metric}, numbers(N, 3), torch.arange(N) % 3, nn.CrossEntropyLoss())


def test_a_metric_of_several_numbers_is_refused() -> None:
    class Each(Hits):
        def compute(self) -> Tensor:
            return torch.div(self.hits, self.seen)

    with pytest.raises(TaskError, match="the metric mine gives 3 numbers"):
        values_of({"mine": Each()}, numbers(N, 3), torch.arange(N) % 3, nn.CrossEntropyLoss())


def test_torchmetrics_own_are_those_of_all_examples() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    outputs, targets = numbers(N, CLASSES), torch.arange(N) % CLASSES
    f1 = torchmetrics.classification.MulticlassF1Score(CLASSES, average="macro")
    found = values_of([f1], outputs, targets, nn.CrossEntropyLoss())
    assert found["multiclass_f1_score"] == pytest.approx(float(f1(outputs, targets)), rel=1e-6)
    several = torchmetrics.MetricCollection({"r2": torchmetrics.R2Score()})
    near = targets + numbers(N, seed=2)
    found = values_of(several, near, targets.float(), nn.MSELoss())
    assert found["r2"] == pytest.approx(r2_of(near, targets.float()), rel=1e-6)
    scores, is_one = torch.sigmoid(numbers(N)), (numbers(N, seed=3) > 0).float()
    binned = torchmetrics.classification.BinaryAUROC(thresholds=10)
    expected = float(binned(scores, is_one.long()))
    found = values_of({"auc": binned}, scores, is_one, nn.BCELoss())
    assert found["auc"] == pytest.approx(expected, rel=1e-6)
    curve = torchmetrics.classification.BinaryAUROC()
    with pytest.raises(TaskError, match="keeps every example's values"):
        values_of([curve], near, targets.float(), nn.MSELoss())


class Ratio(Signs):
    """A metric of two sums, in a class of the user's."""

    def metrics_from_sums(self, sums: dict[str, float], weight: float) -> dict[str, float]:
        return {"error": 1 - sums["accuracy"] / weight}


def test_a_class_makes_metrics_of_its_sums_in_each_place() -> None:
    given: dict[str, Any] = {"clients": 3, "rounds": 1, "progress": False}
    run = headwater.simulate(Ratio, **given, settings={"evaluation.on_devices": True})
    own = {"train_error", "test_error", "held_out_error"}
    assert own <= run.metrics.keys()
    assert not any("accuracy" in name for name in run.metrics)
    plain = headwater.simulate(Signs, **given)
    assert run.metrics["test_error"] == pytest.approx(1 - plain.metrics["test_accuracy"], abs=0.3)


def test_what_is_no_number_by_name_is_refused() -> None:
    class Broken(Signs):
        found: Any = 3

        def metrics_from_sums(self, sums: dict[str, float], weight: float) -> Any:
            return self.found

    task = Broken()
    with pytest.raises(TaskError, match="must return numbers by name, found int"):
        shown_metrics(task, {"accuracy": 1.0}, 2)
    task.found = {"f1": "high"}
    with pytest.raises(TaskError, match="f1 is none"):
        shown_metrics(task, {"accuracy": 1.0}, 2)
    assert shown_metrics(task, {}, 2) == {}
    Broken.metrics_from_sums = lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(TaskFailed, match="metrics_from_sums"):
        shown_metrics(task, {"accuracy": 1.0}, 2)
