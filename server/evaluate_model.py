"""The command ``headwater-server evaluate``: tests a run's model on given examples.

As everywhere, sums are added and divided once: the row of several data sets is not a mean of means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import nn

from headwater.common.data.data_paths import find_data
from headwater.common.data.evaluation import evaluate_sums
from headwater.common.data.example_faults import summary
from headwater.common.errors import EmptyDataset, MissingData, SettingsError
from headwater.common.model.trained_model import (
    BEST,
    ModelRecord,
    load_module,
    model_file,
    read_model,
    task_of,
)
from headwater.common.system.json_logs import to_json_value
from headwater.common.system.printable import printable, printable_name
from headwater.common.task import (
    Examples,
    Metrics,
    Task,
    check_data_exists,
    open_train_examples,
    shown_metrics,
    tell_round,
)
from headwater.common.user_code.failures import running
from headwater.common.wording import figure_text
from headwater.server.rounds.evaluation import MICRO_BATCH_SIZE, open_test_examples


@dataclass(frozen=True, kw_only=True, slots=True)
class DataResult:
    """The sums over one data set's usable examples; ``weight`` is what they are divided by."""

    data: str
    num_examples: int
    loss_sum: float
    weight: int
    metric_sums: Metrics
    num_left_out: int = 0
    why_left_out: str = ""
    """The kinds of fault with their first positions, a line each."""
    task: Task | None = field(default=None, repr=False)
    """What makes metrics of the sums; None: they are sums per weight."""

    @property
    def loss(self) -> float:
        """The loss per unit of weight; NaN without any."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def metrics(self) -> Metrics:
        """The metrics per unit of weight, or what the task makes of the sums; none without any."""
        return Metrics(shown_metrics(self.task, self.metric_sums, self.weight))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """A model, and its results on each data set, then on all of them if there are several."""

    file: Path
    record: ModelRecord
    results: list[DataResult]
    empty: list[str] = field(default_factory=list)
    """The data sets without an example, which are left out."""


def evaluate(
    out: Path,
    *,
    data: Sequence[str],
    task: str | None,
    is_best: bool = False,
    local: Path | None = None,
) -> EvaluatedModel:
    """Test the model of a run's folder on each path of ``data``, or on the task's test examples.

    A path may be a pattern. Of several data sets, those without an example are left out. ``local``
    is the file of a device with the parameters that stayed on it.

    Raises:
        SettingsError: there is no such model, or it cannot be read.
        ModelMismatch, TaskError, StateError: see ``load_model``; or the task fails on an example.
        MissingData, EmptyDataset: a path cannot be opened, no path holds an example, or the task
            has no test examples.
    """
    for one in data:
        if not has_magic(one):
            check_data_exists(Path(one))
    found = [path for one in data for path in find_data(one, source="--data", folder=Path())]
    file = out / BEST if is_best else model_file(out)
    if is_best and not file.exists():
        raise SettingsError(
            f"there is no {BEST} in {out}", remedy="the run keeps it with --best METRIC"
        )
    record, state = read_model(file)
    chosen = task_of(task, record, file)
    tell_round(chosen, record.rounds or 1)
    model = load_module(chosen, record, state, file, local=local)
    empty: list[str] = []
    if found:
        opened, empty = _opened(chosen, found)
    else:
        test_examples = open_test_examples(chosen, model)
        if test_examples is None:
            raise MissingData(
                "the task has no test_examples", remedy="name examples to test on with --data PATH"
            )
        opened = [("test examples", test_examples)]
    results = [sums_on(chosen, model, name, examples) for name, examples in opened]
    if len(results) > 1:
        results.append(_total(results))
    return EvaluatedModel(file=file, record=record, results=results, empty=empty)


def _opened(task: Task, paths: Sequence[str]) -> tuple[list[tuple[str, Examples]], list[str]]:
    """Open the data sets; return them by their paths, and the paths without an example.

    Raises:
        MissingData, EmptyDataset: a path cannot be opened, or none has an example.
    """
    opened, empty = [], {}
    for path in paths:
        try:
            examples = open_train_examples(task, data=Path(path), part=0, num_parts=1)
        except EmptyDataset as error:
            empty[path] = error
        else:
            opened.append((path, examples))
    if not opened:
        raise next(iter(empty.values()))
    return opened, [*empty]


def sums_on(task: Task, model: nn.Module, name: str, examples: Examples) -> DataResult:
    """Return a model's sums on examples, which are called ``name``.

    Raises:
        TaskFailed, TaskError: the task fails on all of them, or breaks a rule.
    """
    with running(f"the evaluation on {name}"):
        total = evaluate_sums(task, model, examples, MICRO_BATCH_SIZE)
    return DataResult(
        data=name,
        num_examples=len(examples) - len(total.faults),
        num_left_out=len(total.faults),
        why_left_out="\n".join(map(printable, summary(total.faults, examples).splitlines())),
        loss_sum=total.loss_sum,
        weight=total.weight,
        metric_sums=total.metric_sums,
        task=task,
    )


def _total(results: Sequence[DataResult]) -> DataResult:
    names = sorted({name for each in results for name in each.metric_sums})
    return DataResult(
        data="all",
        task=results[0].task,
        num_examples=sum(each.num_examples for each in results),
        num_left_out=sum(each.num_left_out for each in results),
        loss_sum=math.fsum(each.loss_sum for each in results),
        weight=sum(each.weight for each in results),
        metric_sums={
            name: math.fsum(each.metric_sums.get(name, 0.0) for each in results) for name in names
        },
    )


def as_json(evaluated: EvaluatedModel) -> str:
    """Return the results as one JSON object; a loss that is not finite is null."""
    fields: dict[str, Any] = {
        "model": str(evaluated.file),
        "round": evaluated.record.rounds,
        "results": [
            {
                "data": each.data,
                "num_examples": each.num_examples,
                "num_left_out": each.num_left_out,
                "weight": each.weight,
                "loss": each.loss,
                "metrics": each.metrics,
            }
            for each in evaluated.results
        ],
        "empty": evaluated.empty,
    }
    return json.dumps(to_json_value(fields), allow_nan=False)


def as_table(evaluated: EvaluatedModel) -> RenderableType:
    """Return the results as a line about the model, a table, and why examples are left out."""
    rounds = evaluated.record.rounds
    when = "" if rounds is None else f", after round {rounds}"
    names = sorted({name for each in evaluated.results for name in each.metrics})
    has_gaps = any(each.num_left_out for each in evaluated.results)
    counts = ("examples", "left out") if has_gaps else ("examples",)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("data", overflow="fold", min_width=8)
    for column in (*counts, "weight", "loss", *map(_title, names)):
        table.add_column(column, justify="right", no_wrap=True)
    for each in evaluated.results:
        table.add_row(
            escape(printable(each.data)),
            str(each.num_examples),
            *([str(each.num_left_out)] if has_gaps else []),
            str(each.weight),
            figure_text(each.loss) if each.weight else "-",
            *(_metric(each, name) for name in names),
        )
    reasons = [
        Text(f"{each.num_left_out:,} left out of {printable(each.data)}:\n{each.why_left_out}")
        for each in evaluated.results
        if each.why_left_out
    ]
    if evaluated.empty:
        left_out = printable(", ".join(evaluated.empty))
        reasons.append(Text(f"left out, as there is no example in it: {left_out}"))
    return Group(f"{escape(printable(evaluated.file))}{when}", table, *reasons)


def _metric(result: DataResult, name: str) -> str:
    metrics = result.metrics
    return figure_text(metrics[name]) if name in metrics else "-"


def _title(metric: str) -> str:
    return escape(printable_name(metric.replace("_", " ")))
