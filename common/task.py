"""The task that a user writes: its interface, making one, and calling it safely.

A task builds the model, opens a device's private examples and sums a loss. Its file imports torch
and nothing of this project. Training relies on that sum being additive, so
``common.additivity`` checks it on real examples before the first round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from headwater.common.errors import EmptyDataset, MissingData, TaskError, TaskFailed, system_remedy
from headwater.common.example_streams import as_examples, copied
from headwater.common.user_code.failures import described, running
from headwater.common.user_code.run_scope import object_named
from headwater.common.user_code.task_spec import METHODS, code_at, code_of, find_task

MAX_METRICS, MAX_METRIC_CHARACTERS = 48, 64  # that a task may return, and of a metric's name

LOSS = "loss"  # the name of the loss among the metrics of an evaluation

Metrics = dict[str, float]
LossOf = Callable[["Task", nn.Module, Any], tuple[Tensor, int, Metrics]]
LossSum = tuple[Tensor, int] | tuple[Tensor, int, Mapping[str, Any]]


@runtime_checkable
class Examples(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any: ...


@runtime_checkable
class Task(Protocol):
    """The three methods that a task must have.

    It may also have ``test_examples() -> Examples``, ``collate(examples) -> batch``,
    ``max_weight_per_example`` (1 where absent), ``weight_unit: float`` where weights are no whole
    numbers, ``penalty(model) -> scalar``, a term of the mean loss on the parameters,
    ``statistics(example)``, ``measured`` and ``use_statistics(found)`` (``common.statistics``),
    ``metrics_from_sums(sums, weight) -> Mapping[str, float]``, the metrics that are shown where
    they are no sums per weight, ``sample(model) -> str | None``, a text to show after a test
    (``server.samples``), ``set_round(number)``, which is called before the loss is computed
    for a round, from 1, ``columns(examples) -> Mapping[str, Sequence]``, for partitions
    (``common.data.columns``), ``lengths(examples) -> Sequence[int]``, where a batch is padded
    (``common.data.example_lengths``), and ``predict(model, batch)``, a value for each example or a
    dict of such columns (``client.adaptation.predictions``).
    """

    def new_model(self) -> nn.Module:
        """Build the model, in float32. Called under the run's seed on the server."""
        ...

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Examples:
        """Open the private examples: ``data`` is the device's path, parts are for simulation."""
        ...

    def loss_sum(self, model: nn.Module, batch: Any) -> LossSum:
        """Return the summed loss, the weight it was summed over and, optionally, metric sums."""
        ...


# A weight in float32 is off by this part of it, and is the whole number next to it.
WEIGHT_ROUNDING = 1e-5
# A unit that is no finer is exact. To a finer one weights are rounded: by 2^-17 of 2^-16.
ROUNDED_UNIT = 2.0**-10

# What autograd raises for a gradient of what was computed under ``no_grad``.
NEEDS_AUTOGRAD = "does not require grad"

# What a task raises that was given None for its data: open(None) is a TypeError.
MISSES_DATA = (OSError, ValueError, TypeError, AttributeError, AssertionError)


def load_task(spec: str) -> Task:
    """Load the task that a spec names: construct its class, or take the object.

    If a Python caller gave an object under this name (``user_code.run_scope``), it is that object;
    a class is constructed. Any other spec is one of ``user_code.task_spec``.

    Raises:
        UnknownTask: there is no such file, module or class, or its import fails.
        TaskError: the class cannot be constructed without arguments, or lacks a method of ``Task``.
        TaskFailed: its ``set_round`` raised an exception.
    """
    task_class = object_named(spec)
    if task_class is None:
        task_class = find_task(spec)
    if not isinstance(task_class, type):
        return _checked(task_class, spec)
    if not any(hasattr(task_class, method) for method in METHODS):
        raise TaskError(f"the task {spec} has none of the methods {', '.join(METHODS)}")
    try:
        task = task_class()
    except Exception as error:
        raise TaskError(f"{spec} cannot be constructed: {described(error)}") from error
    return _checked(task, spec)


def task_code(spec: str) -> str:
    """Return the name and the digest of the task's code (``user_code.task_spec.code_of``).

    Raises:
        UnknownTask: see ``load_task``.
    """
    given = object_named(spec)
    if given is None:
        return code_at(spec)
    return code_of(given if isinstance(given, type) else type(given))


def _checked(task: object, spec: str) -> Task:
    missing = [method for method in METHODS if not hasattr(task, method)]
    if missing:
        raise TaskError(f"the task {spec} has no method {', '.join(missing)}")
    found = cast(Task, task)
    tell_round(found, 1)
    return found


def tell_round(task: Task, number: int) -> None:
    """Tell a task that has ``set_round`` the round that its next losses belong to, from 1.

    The check and the trial of a task belong to the first round.

    Raises:
        TaskFailed: ``set_round`` raised an exception.
    """
    set_round = getattr(task, "set_round", None)
    if set_round is not None:
        with running("set_round"):
            set_round(max(number, 1))


def check_data_exists(data: Path | None) -> None:
    """Check the path of ``--data`` before a task opens it.

    Raises:
        MissingData: there is no such file or folder.
    """
    if data is not None and not data.exists():
        raise MissingData(f"--data: {data} does not exist")


def open_train_examples(task: Task, *, data: Path | None, part: int, num_parts: int) -> Examples:
    """Open a device's examples.

    Raises:
        MissingData: the task raised an OSError or a ValueError: the path does not exist, cannot be
            read, or has unexpected content; or there is no path, and the task cannot do without.
        TaskFailed: the task raised another exception.
        TaskError: it returned no examples; see ``as_examples``.
        EmptyDataset: there is no example.
    """
    try:
        with running("train_examples"):
            found = task.train_examples(data=data, part=part, num_parts=num_parts)
            examples: Examples = as_examples(found, "train_examples")
    except TaskFailed as failed:
        raise _not_opened(task, data, failed) from failed.__cause__
    if len(examples) == 0:
        source = f"in {data}" if data is not None else f"as part {part} of {num_parts}"
        raise EmptyDataset(f"the task {type(task).__name__} found no example {source}")
    return examples


def _not_opened(task: Task, data: Path | None, failed: TaskFailed) -> MissingData | TaskFailed:
    """Return the error for an exception that ``train_examples`` raised; it names the data."""
    error, name = failed.__cause__, type(task).__name__
    assert error is not None  # see ``running``
    if data is None and isinstance(error, MISSES_DATA) and system_remedy(str(error)) is None:
        return MissingData(
            f"no --data was given, and the task {name} found no data: {described(error)}",
            remedy="name a file or folder that the task reads with --data; headwater-simulate also "
            "takes one for each device, as in --data 'devices/*.csv'",
        )
    if data is not None and isinstance(error, OSError | ValueError):
        if isinstance(error, OSError):
            return MissingData(f"the task {name} found no data in {data}: {described(error)}")
        return MissingData(
            f"the task {name} cannot use {data}: {described(error)}",
            remedy="correct the place in the data that is named, or leave that row out of it; if "
            "it is other data than the task reads, name another --data",
        )
    on = "" if data is None else f" on {data}"
    return TaskFailed(f"train_examples failed{on}: {described(error)}", remedy=failed.remedy)


def built_model(task: Task) -> nn.Module:
    """Return a new model of the task.

    A module of ``torch.export`` has one mode, that in which it was exported, and raises where
    another asks for ``train()`` or ``eval()``; here it returns itself.

    Raises:
        TaskFailed: ``new_model`` raised an exception.
        TaskError: it returned something else than a module.
    """
    with running("new_model"):
        model: object = task.new_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"new_model must return a torch.nn.Module, found {type(model).__name__}",
            remedy="end new_model with `return model`; of a torch.export program return .module()",
        )
    for module in model.modules():
        if "train" not in vars(module):
            continue
        try:
            module.train(module.training)
        except NotImplementedError:
            vars(module).update(dict.fromkeys(("train", "eval"), partial(_itself, module)))
    return model


def _itself(module: nn.Module, *_: object) -> nn.Module:
    return module


def weight_unit(task: Task) -> float:
    """Return the step in which the task's weights are counted; 1 unless the task says otherwise.

    Raises:
        TaskError: it is no finite number above 0.
    """
    unit = getattr(task, "weight_unit", 1)
    number = _number(unit)
    if number is None or not 0 < number < math.inf:
        raise TaskError(f"weight_unit must be a number above 0, found {unit!r}")
    return number


def rounds_weights(task: Task) -> bool:
    """Return whether each call's weight is rounded to the unit, by half of it at the most.

    A coarser unit is exact: a weight that is no multiple of it is refused.
    """
    return weight_unit(task) <= ROUNDED_UNIT


def max_weight_per_example(task: Task) -> int:
    """Return the most units of weight that one example may have; 1 if the task says nothing."""
    return math.ceil(getattr(task, "max_weight_per_example", 1) / weight_unit(task))


def loss_sum(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, int, Metrics]:
    """Call the task's ``loss_sum`` and return loss, weight and metric sums.

    All are in units of the task's weight (``weight_unit``): the weight is a number of units, and
    loss and metrics are divided by the unit, so that what is summed over devices and divided once
    is the mean per weight.

    Raises:
        TaskError: the result is not a scalar tensor, a weight of 0 or more units and, optionally, a
            dict of metric sums.
    """
    unit = weight_unit(task) if hasattr(task, "weight_unit") else 1
    result = task.loss_sum(model, batch)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise TaskError(
            "loss_sum must return (loss_sum, weight) or (loss_sum, weight, metric sums)"
        )
    loss, weight = result[0], result[1]
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        raise TaskError(f"loss_sum must return a scalar tensor first, found {_kind(loss)}")
    count = weight if type(weight) is int and unit == 1 and weight >= 0 else _count(weight, unit)
    if unit != 1:
        loss = loss / unit
    if len(result) == 2:
        return loss, count, Metrics()
    sums = result[2]
    if not isinstance(sums, Mapping):
        raise TaskError(f"the metric sums must be a dict by name, found {_kind(sums)}")
    if len(sums) > MAX_METRICS or any(len(str(name)) > MAX_METRIC_CHARACTERS for name in sums):
        raise TaskError(
            f"found {len(sums)} metric sums: a report has room for {MAX_METRICS}, with names of up "
            f"to {MAX_METRIC_CHARACTERS} characters",
            remedy="return fewer metric sums from loss_sum, or give them shorter names",
        )
    if LOSS in sums:
        raise TaskError(
            f"a metric is named {LOSS}, which would stand in the place of the loss itself",
            remedy="leave it out, as the mean loss is reported without it, or give it another name",
        )
    metrics = Metrics()
    for name, value in sums.items():
        metric = value if type(value) is float else _number(value)
        if metric is None:
            raise TaskError(f"the metric {name} must be a number, found {_kind(value)}")
        metrics[str(name)] = metric if unit == 1 else metric / unit
    return loss, count, metrics


def shown_metrics(task: Task | None, sums: Mapping[str, float], weight: float) -> dict[str, float]:
    """Return the metrics of many examples: each sum per weight, or what the task makes of them.

    Nothing if there is no sum or no weight; ``sums`` and ``weight`` are in units of the task's.

    Raises:
        TaskFailed: the task's ``metrics_from_sums`` raised an exception.
        TaskError: it returned no numbers by name.
    """
    if not sums or not weight:
        return {}
    if task is None or not hasattr(task, "metrics_from_sums"):
        return {name: value / weight for name, value in sums.items()}
    unit = weight_unit(task)
    with running("metrics_from_sums"):
        found = task.metrics_from_sums({n: s * unit for n, s in sums.items()}, weight * unit)
    if not isinstance(found, Mapping):
        raise TaskError(f"metrics_from_sums must return numbers by name, found {_kind(found)}")
    numbers = {str(name): _number(value) for name, value in found.items()}
    if none := [name for name, value in numbers.items() if value is None]:
        raise TaskError(f"metrics_from_sums must return numbers: {none[0]} is none")
    return {name: value for name, value in numbers.items() if value is not None}


def _count(weight: Any, unit: float) -> int:
    """Return a weight as a number of units.

    Raises:
        TaskError: it is no whole number of 0 or more.
    """
    number = _number(weight)
    if number is None or not 0 <= number < math.inf:
        raise TaskError(
            f"the weight must be a whole number of examples or tokens, found {weight!r}"
        )
    count = round(number / unit)
    if abs(number - count * unit) > WEIGHT_ROUNDING * max(number, unit) and unit > ROUNDED_UNIT:
        raise TaskError(
            f"the weight must be a whole number of examples or tokens, found {weight!r}"
            if unit == 1
            else f"the weight must be a multiple of the task's weight_unit of {unit:g}, found "
            f"{weight!r}",
            remedy="give the task weight_unit = 0.5 if all weights are multiples of 0.5, or "
            "weight_unit = 2**-16, to which each call's weight is rounded; no int(), which rounds "
            "each micro-batch by up to 1 (docs/task.md)",
        )
    return count


def loss_sum_alone(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, int, Metrics]:
    """Call the task's ``loss_sum`` where no gradient of the parameters is needed.

    A loss that takes gradients itself, as a gradient penalty or the force of a potential energy
    does, cannot be computed under ``no_grad``: it is computed again with autograd, on the batch as
    it was (a loss may write to its batch, or take the labels out).

    Raises:
        TaskError: see ``loss_sum``.
    """
    try:
        with torch.no_grad():
            return loss_sum(task, model, copied(batch))
    except RuntimeError as error:
        if NEEDS_AUTOGRAD not in str(error):
            raise
    with torch.enable_grad():
        loss, weight, metrics = loss_sum(task, model, batch)
    return loss.detach(), weight, metrics


def _number(value: Any) -> float | None:
    """Return a number, or a tensor of one element, as a float; None for anything else."""
    if isinstance(value, str):
        return None
    try:
        return float(value.item() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _kind(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
