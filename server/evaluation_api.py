"""``headwater.evaluate``: a model's loss and metrics on examples, from a notebook or a script."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwater.common.additivity.sums import Sums, compare
from headwater.common.data.evaluation import EvaluationSums, evaluate_sums
from headwater.common.errors import MissingData, TaskError, remedy_in_traceback
from headwater.common.model.trained_model import (
    lacks_statistics,
    load_module,
    model_file,
    named_task,
    read_model,
)
from headwater.common.model.trained_model import task_of as task_of_record
from headwater.common.task import Examples, Task, rounds_weights, tell_round
from headwater.common.task_of_parts.given_data import data_set_of
from headwater.common.task_of_parts.metrics import Asked
from headwater.common.task_of_parts.task_of_parts import TaskOfParts
from headwater.server.evaluate_model import DataResult, sums_on
from headwater.server.rounds.evaluation import open_test_examples

log = logging.getLogger(__name__)

NUM_COMPARED = 4  # examples, together and alone


@remedy_in_traceback()
def evaluate(
    model: nn.Module | str | Path,
    examples: Any = None,
    *,
    task: Task | type[Task] | str | Path | None = None,
    loss: Any = None,
    metrics: Asked = None,
) -> DataResult:
    """Test a model on examples; return its mean loss and metrics, and how many were left out.

    Args:
        model: a module, or a run's folder or its model's file.
        examples: a map-style data set, or arrays as in (X, y); not given: the task's test examples.
        task: an object with a task's methods, its class, or ``FILE.py:Class``; not given: that of
            the run, or one of ``loss``.
        loss: one of torch's, in the place of a task: its mean over the examples.
        metrics: beside ``loss``: names, as in ``"accuracy"``, or functions by name.

    Raises:
        TaskError: neither task nor loss is given with a module, or both are.
        MissingData: there are no examples.
        TaskNotAdditive: the loss or a metric is no sum over the examples of a batch.
        HeadwaterError: the model cannot be read; or the task fails on all examples.
    """
    if task is not None and loss is not None:
        raise TaskError("a task is given, and a loss beside it", remedy="give one of the two")
    chosen = given = _task(task)
    if examples is not None:
        examples = data_set_of(examples, "examples")
    if loss is not None:
        parts = TaskOfParts(model=_no_model, examples=examples, loss=loss, metrics=metrics)
        chosen = parts  # the model is another task's, or given
    if not isinstance(model, nn.Module):
        file = model_file(Path(model))
        record, state = read_model(file)
        builder = given or task_of_record(None, record, file)
        tell_round(builder, record.rounds or 1)
        model = load_module(builder, record, state, file)
        chosen = chosen or builder
    elif chosen is not None and lacks_statistics(chosen):
        log.warning(
            "the task uses statistics, and none are known here: if the model was trained with "
            "--statistics, give the folder of its run in the model's place"
        )
    if chosen is None:
        raise TaskError(
            "neither a task nor a loss is given, by which the model is tested",
            remedy="give task=, or loss=nn.CrossEntropyLoss() or another one of torch's",
        )
    name = "examples"
    if examples is None:
        examples, name = open_test_examples(chosen, model), "test examples"
    if examples is None:
        raise MissingData(
            "there are no examples to test on",
            remedy="give examples=, or a task with test_examples",
        )
    modes = [(module, module.training) for module in model.modules()]
    try:
        check_sums(chosen, model, examples)
        return sums_on(chosen, model, name, examples)
    finally:  # the caller goes on training
        for module, is_training in modes:
            module.training = is_training


def check_sums(task: Task, model: nn.Module, examples: Examples) -> None:
    """Compare the sums of the first examples together with those of each alone.

    Raises:
        TaskNotAdditive: they differ, and not because they are drawn at random.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # they may draw
            some = [examples[at] for at in range(min(len(examples), NUM_COMPARED))]
        together, again = (
            evaluate_sums(task, model, some, NUM_COMPARED, seed=seed) for seed in range(2)
        )
        alone = [evaluate_sums(task, model, [one], 1) for one in some]
    except TaskError:
        raise
    except Exception:  # of an example that cannot be read: the evaluation counts and names it
        return
    if not together.faults and _sums(together) == _sums(again):
        compare(
            _sums(together),
            list(map(_sums, alone)),
            size=len(some),
            is_rounded=rounds_weights(task),
        )


def _sums(total: EvaluationSums) -> Sums:
    return Sums(total.loss_sum, total.weight, total.metric_sums)


def _task(given: Any) -> Task | None:
    if given is None or not isinstance(given, str | Path | type):
        found: Task | None = given
        return found
    return given() if isinstance(given, type) else named_task(str(given))


def _no_model() -> nn.Module:
    raise TaskError("a task of a loss alone builds no model")
