"""What a task predicts, a row for each example, as CSV or JSON lines.

A task says it in ``predict(model, batch)``: a tensor or list with a value for each example of the
batch, or a dict of such columns by name. Without it, the ``predictions`` of the task's tests on
devices are taken: probabilities and labels of classes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor, nn

from headwater.common.data.batches import batch_of
from headwater.common.data.example_faults import ExampleFault, exception_fault
from headwater.common.errors import HeadwaterError, TaskError
from headwater.common.system.json_logs import to_json_value
from headwater.common.task import Examples, Task
from headwater.common.user_code.failures import is_allocation_failure

PREDICT, PREDICTIONS = "predict", "predictions"
EXAMPLE, PREDICTION = "example", "prediction"
NAMES = "example_names"
BATCH_SIZE = 64

Row = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Predictor:
    """Predicts a task's examples; those on which the task raises are left out, and counted."""

    task: Task
    model: nn.Module
    faults: dict[int, ExampleFault] = field(default_factory=dict)
    """By the example's position."""
    columns: list[str] | None = None
    """The names of the columns, once there is a row."""
    _names: Sequence[str] | None = None
    """The names of the examples, where the data set has some (docs/data.md)."""

    def __post_init__(self) -> None:
        """Check that the task predicts something.

        Raises:
            TaskError: it has neither of the two methods.
        """
        if not any(callable(getattr(self.task, name, None)) for name in (PREDICT, PREDICTIONS)):
            raise TaskError(
                f"the task {type(self.task).__name__} does not say what it predicts",
                remedy=f"add a method {PREDICT}(model, batch) that returns a value for each "
                "example, or a dict of such columns; see docs/model.md",
            )

    def rows(self, examples: Examples) -> Iterator[Row]:
        """Yield a row for each example that can be predicted, in their order.

        Raises:
            TaskError: the task returned something else than columns.
            MemoryError: one example alone does not fit.
        """
        self.model.eval()
        names = getattr(examples, NAMES, None)
        self._names = names if names is not None and len(names) == len(examples) else None
        for start in range(0, len(examples), BATCH_SIZE):
            yield from self._rows(examples, range(start, min(start + BATCH_SIZE, len(examples))))

    def _rows(self, examples: Examples, positions: Sequence[int]) -> Iterator[Row]:
        try:
            batch = batch_of(self.task, examples, positions)
            with torch.no_grad():
                columns = columns_of(self.task, self.model, batch, len(positions))
            self._check_names([*columns])
        except HeadwaterError:
            raise
        except Exception as error:
            if len(positions) > 1:  # too large, or one of them fails
                middle = len(positions) // 2
                yield from self._rows(examples, positions[:middle])
                yield from self._rows(examples, positions[middle:])
                return
            if is_allocation_failure(error):
                raise
            self.faults[positions[0]] = exception_fault(error)
            return
        for at, position in enumerate(positions):
            example = position if self._names is None else self._names[position]
            yield {EXAMPLE: example, **{name: column[at] for name, column in columns.items()}}

    def _check_names(self, names: list[str]) -> None:
        if self.columns is not None and self.columns != names:
            raise TaskError(
                f"{PREDICT} returned the columns {', '.join(names)}, and "
                f"{', '.join(self.columns)} for the examples before",
                remedy="return the same columns for each batch, with None where there is no value",
            )
        self.columns = names


def columns_of(task: Any, model: nn.Module, batch: Any, number: int) -> dict[str, list[Any]]:
    """Return what a task predicts of a batch of so many examples, by the names of columns.

    Raises:
        TaskError: it is no column with a value for each example, or a dict of some.
        Exception: the task's own.
    """
    if callable(getattr(task, PREDICT, None)):
        found, what = task.predict(model, batch), PREDICT
        named = found if isinstance(found, Mapping) else {PREDICTION: found}
    else:
        named, what = _of_classes(task.predictions(model, batch)), PREDICTIONS
    columns = {str(name): _column(values) for name, values in named.items()}
    wrong = [name for name, column in columns.items() if column is None or len(column) != number]
    if wrong or not columns or EXAMPLE in columns:
        raise TaskError(
            f"{what} must return a value for each of the {number} examples of a batch, or a dict "
            f"of such columns, and none may be named {EXAMPLE!r}"
            f"{'; not so: ' + ', '.join(wrong) if wrong else ''}",
            remedy="see docs/model.md, Predict with it",
        )
    return {name: column for name, column in columns.items() if column is not None}


def _column(values: Any) -> list[Any] | None:
    if isinstance(values, Tensor | np.ndarray):
        return list(values.tolist()) if values.ndim else None
    if not isinstance(values, list | tuple):
        return None
    return [one.tolist() if isinstance(one, Tensor | np.ndarray) else one for one in values]


def _of_classes(found: Any) -> dict[str, Tensor]:
    """Return the class of the largest probability, that probability, and the label.

    Raises:
        TaskError: these are no probabilities and labels.
    """
    is_pair = isinstance(found, tuple) and len(found) == 2
    if not is_pair or not all(isinstance(one, Tensor) for one in found):
        raise TaskError("predictions must return two tensors, probabilities and labels")
    chances, labels = found
    if chances.shape == labels.shape:  # those of class 1 of two
        chances = torch.stack([1 - chances, chances], -1)
    if chances.shape[:-1] != labels.shape:
        raise TaskError(
            f"predictions gives probabilities of shape {tuple(found[0].shape)} for labels of shape "
            f"{tuple(labels.shape)}"
        )
    probability, prediction = chances.max(-1)
    return {PREDICTION: prediction, "probability": probability, "label": labels}


def write_csv(file: TextIO, rows: Iterator[Row]) -> int:
    """Write rows with a line of names first; lists are JSON. Return how many there were."""
    number, writer = 0, None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(file, fieldnames=[*row], lineterminator="\n")
            writer.writeheader()
        writer.writerow({key: _cell(value) for key, value in row.items()})
        number += 1
    return number


def _cell(value: Any) -> Any:
    is_nested = isinstance(value, list | tuple | dict)
    return json.dumps(to_json_value(value), allow_nan=False) if is_nested else value


def write_json_lines(file: TextIO, rows: Iterator[Row]) -> int:
    """Write an object a line; what is no finite number is null. Return how many there were."""
    number = 0
    for row in rows:
        file.write(json.dumps(to_json_value(row), allow_nan=False) + "\n")
        number += 1
    return number
