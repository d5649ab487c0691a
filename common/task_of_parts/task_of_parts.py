"""``headwater.Task``: a model, a data set and a loss of torch's as a task."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from headwater.common.errors import TaskError, remedy_in_traceback
from headwater.common.task import Examples
from headwater.common.task_of_parts.given_data import (
    CLIENTS_COLUMNS,
    DataOfClients,
    are_clients_columns,
    are_columns,
    data_set_of,
)
from headwater.common.task_of_parts.losses import WEIGHT_UNIT, summed_loss
from headwater.common.task_of_parts.metrics import Asked, metrics_of

PARTS = ("model", "examples", "loss", "test", "metrics")
"""The arguments of a call that make a task."""
SPLIT_SEED = 0
"""Of the order in which a data set is dealt out to the parts."""


class TaskOfParts:
    """A task made from a model, a data set and a loss.

    Args:
        model: a function or class that builds it, or the module; each use is a copy.
        examples: a map-style data set of (input, target) or (input, ..., target), or arrays as in
            (X, y), dealt out evenly to simulated clients, or by ``partition``; a list of data sets,
            one for each; or a function of a device's ``data`` path that opens one.
        loss: one of torch's, a module, a function or its name, as in
            ``nn.CrossEntropyLoss(weight=w)`` or ``"cross_entropy"``. Its mean becomes a sum with
            its weight; class weights and ``ignore_index`` count.
        test: a data set that the server tests on, or arrays.
        metrics: names (``accuracy``; ``mae``, ``mse``, ``r2``), metrics of torchmetrics whose
            states are sums, or functions of outputs and targets that return the sum over a batch,
            by name. None: what fits the loss.
        collate: joins examples to a batch; None: as torch's DataLoader does.
        max_weight_per_example: the most that an example weighs, as its tokens where texts differ in
            length; None: what the first one's target does.

    Raises:
        TaskError: a part is none, or the loss is none whose mean is known.
    """

    @remedy_in_traceback()
    def __init__(
        self,
        *,
        model: Any,
        examples: Any,
        loss: Any,
        test: Any = None,
        metrics: Asked = None,
        collate: Callable[[list[Any]], Any] | None = None,
        max_weight_per_example: float | None = None,
    ) -> None:
        if not (isinstance(model, nn.Module) or callable(model)):
            raise TaskError(
                f"model is a {type(model).__name__}",
                remedy="give a function that builds it, as in model=lambda: nn.Linear(4, 1)",
            )
        if collate is None and are_clients_columns(examples):
            raise TaskError(
                f"examples are {len(examples)} pairs of arrays of unlike lengths",
                remedy=CLIENTS_COLUMNS + "pad them to one length, or give collate=",
            )
        self._model, self._examples = model, data_set_of(examples, "examples")
        self._loss = summed_loss(loss)
        self._metrics = metrics_of(metrics, self._loss)
        if self._loss.class_weights is not None:
            self.weight_unit = WEIGHT_UNIT
        if test is not None:
            tested = data_set_of(test, "test")
            self.test_examples = lambda: tested
        if collate is not None:
            self.collate = collate
        self._max_weight = max_weight_per_example

    def new_model(self) -> nn.Module:
        """Return a copy of the model: a function may return the same one each time."""
        built = self._model if isinstance(self._model, nn.Module) else self._model()
        return _copied(built) if isinstance(built, nn.Module) else built

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Examples:
        """Open a device's data, or deal a part of the data set out."""
        if not isinstance(self._examples, Examples):
            takes_data = bool(inspect.signature(self._examples).parameters)
            opened: Examples = self._examples(data) if takes_data else self._examples()
        elif data is not None:
            raise ValueError(
                "the task has a data set of its own: leave --data out, or make the "
                "task of a function that opens one, as in examples=open_folder"
            )
        else:
            opened = self._examples
        if isinstance(opened, DataOfClients):
            return opened.of(part, num_parts)
        if num_parts == 1:
            return opened
        if isinstance(opened, list | tuple) and len(opened) <= num_parts and are_columns(opened):
            raise TaskError(
                f"examples are {len(opened)} pairs of arrays, and there are {num_parts} clients",
                remedy=CLIENTS_COLUMNS + "set clients= to fewer",
            )
        dealt = torch.randperm(len(opened), generator=torch.Generator().manual_seed(SPLIT_SEED))
        own: Examples = Subset(opened, dealt[part::num_parts].tolist())  # type: ignore[arg-type]
        return own

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the summed loss, its weight and the metrics' sums."""
        *inputs, targets = _row_of(batch)
        outputs = model(*inputs)
        loss, weight = self._loss.of(outputs, targets)
        with torch.no_grad():
            found = outputs.detach()
            sums: dict[str, Any] = {}
            for metric in self._metrics.values():
                sums |= metric.sums(found, targets)
        return loss, weight, sums

    def metrics_from_sums(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the metrics of all examples, of which ``loss_sum`` gave these sums."""
        return {name: metric.value(sums, weight) for name, metric in self._metrics.items()}

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs; of a loss of classes the class of the largest."""
        *inputs, _ = _row_of(batch)
        outputs = model(*inputs)
        return outputs.argmax(1) if self._loss.is_of_classes else outputs

    @property
    def num_data_sets(self) -> int | None:
        """The number of data sets, if each client has its own; None: one is dealt out."""
        own = self._examples
        return len(own.datasets) if isinstance(own, DataOfClients) else None

    @cached_property
    def max_weight_per_example(self) -> float:
        """The most that an example weighs: as is given, or by the first one's target."""
        if self._max_weight is not None:
            return self._max_weight
        if not isinstance(self._examples, Examples) or not len(self._examples):
            return self._loss.max_weight(None)
        return self._loss.max_weight(_row_of(self._examples[0])[-1])


def _row_of(example: Any) -> Sequence[Any]:
    """Return an example, or a batch, that is (input, target) or (input, ..., target).

    Raises:
        TaskError: it is none.
    """
    if not isinstance(example, list | tuple) or len(example) < 2:
        raise TaskError(
            f"an example is a {type(example).__name__}, and should be (input, target) or "
            "(input, ..., target): the model takes all but the last",
            remedy="let the data set return pairs, or write a task as a class (docs/task.md)",
        )
    return example


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy, with the hooks of its parameters, that shares memory where the model does."""
    copied, first = copy.deepcopy(model), dict[tuple[int, torch.Size], Tensor]()
    for own, new in zip(model.parameters(), copied.parameters(), strict=True):
        for hook in (own._backward_hooks or {}).values():
            new.register_hook(hook)  # type: ignore[no-untyped-call]
        if own.numel() and own.is_contiguous() and own.data_ptr():
            new.data = first.setdefault((own.data_ptr(), own.shape), new).data
    return copied


@remedy_in_traceback()
def task_of(task: Any, parts: dict[str, Any], *, is_elsewhere: bool) -> Any:
    """Return the task of a call: the one that it names, or one of the parts that it gives.

    None where it gives nothing and the task ``is_elsewhere``: in the settings, or in a run's.

    Raises:
        TaskError: it gives both, or none, or not all parts.
    """
    given = {name: part for name, part in parts.items() if part is not None}
    missing = [name for name in ("model", "examples", "loss") if name not in given]
    if not given and (task is not None or is_elsewhere):
        return task
    if isinstance(task, nn.Module):
        raise TaskError(
            "the first argument is a task, and a model is given",
            remedy="name the parts: model=net, examples=data_set, loss=nn.CrossEntropyLoss()",
        )
    if task is not None:
        raise TaskError(
            f"a task is given, and {', '.join(given)} beside it", remedy="give one of the two"
        )
    if missing:
        raise TaskError(
            f"no task is given, nor {', '.join(missing)}",
            remedy="give a task, or model=, examples= and loss=",
        )
    return TaskOfParts(**given)


Task = TaskOfParts
"""Its public name, ``headwater.Task``."""
