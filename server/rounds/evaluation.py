"""Evaluates the model on the server's test examples and on the examples that devices hold out.

Devices send sums, and the server divides once, as for gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn
from torch.utils.data import Subset

from headwater.common.data.batches import evaluate_sums
from headwater.common.errors import MissingData, TaskFailed
from headwater.common.messages import EvaluateReport
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import EvaluationSettings
from headwater.common.streams import as_examples
from headwater.common.task import Examples, Metrics, Task
from headwater.common.user_code import described, running

MICRO_BATCH_SIZE = 256


def open_test_examples(task: Task, model: nn.Module) -> Examples | None:
    """Open the task's test examples and evaluate the first one; None if the task has none.

    Raises:
        MissingData: they cannot be read.
        TaskFailed: ``test_examples`` raised another exception, or the first one did.
    """
    test_examples = getattr(task, "test_examples", None)
    try:
        with running("test_examples"):
            found = test_examples() if test_examples is not None else None
            examples = None if found is None else as_examples(found, "test_examples")
    except TaskFailed as failed:
        error = failed.__cause__
        if not isinstance(error, OSError | ValueError):
            raise
        raise MissingData(f"the task's test_examples found no data: {described(error)}") from error
    if examples is None or len(examples) == 0:
        return None
    with running("the first test example"):
        _first_sums(task, model, examples)
    opened: Examples = examples
    return opened


def test_metric_names(task: Task, model: nn.Module, examples: Examples | None) -> list[str] | None:
    """Return the names of the metrics on the first test example; None without test examples."""
    if examples is None:
        return None
    return list(_first_sums(task, model, examples))


def _first_sums(task: Task, model: nn.Module, examples: Examples) -> Metrics:
    _, _, sums = evaluate_sums(task, model, Subset(examples, [0]), 1)  # type: ignore[arg-type]
    return sums


def is_due(chosen: EvaluationSettings, *, round_number: int, rounds: int) -> bool:
    """Return whether a round ends with an evaluation; the last one always does."""
    return round_number % chosen.every_rounds == 0 or round_number == rounds


def on_server(task: Task, image: ModelImage, examples: Examples | None) -> dict[str, float]:
    """Return test_loss and the task's metrics on its test examples; empty without examples."""
    if examples is None:
        return {}
    with running("the evaluation on test_examples"):
        loss, weight, sums = evaluate_sums(task, image.model, examples, MICRO_BATCH_SIZE)
    return means("test", loss, weight, sums)


def on_devices(reports: Iterable[EvaluateReport]) -> dict[str, float]:
    """Return held_out_loss and the metrics over all devices that answered."""
    answers = list(reports)
    names = sorted({name for answer in answers for name in answer.metric_sums})
    sums = {n: math.fsum(answer.metric_sums.get(n, 0.0) for answer in answers) for n in names}
    loss = math.fsum(answer.loss_sum for answer in answers)
    return means("held_out", loss, sum(answer.weight for answer in answers), sums)


def means(prefix: str, loss: float, weight: int, sums: dict[str, float]) -> dict[str, float]:
    """Divide sums by their weight; return nothing if the weight is zero."""
    if weight == 0:
        return {}
    rows = {f"{prefix}_loss": loss / weight}
    return rows | {f"{prefix}_{name}": value / weight for name, value in sums.items()}
