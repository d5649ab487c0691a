"""Evaluates the model on the server's test examples and on the examples that devices hold out.

Devices send sums, and the server divides once, as for gradients.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from torch import nn

from headwater.common.data.batches import batch_of
from headwater.common.data.evaluation import evaluate_sums
from headwater.common.data.example_faults import details, short_summary
from headwater.common.errors import (
    ConnectionLost,
    LateUpdate,
    MissingData,
    TaskFailed,
)
from headwater.common.example_streams import as_examples
from headwater.common.messages import EvaluateReport
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.common.task import Examples, Metrics, Task, loss_sum_alone, shown_metrics
from headwater.common.user_code.failures import described, running
from headwater.common.wording import counted
from headwater.server.aggregation.believed_figures import beyond_belief
from headwater.server.aggregation.round_reports import most_reported
from headwater.server.fleet import Dropout
from headwater.server.rounds.features import by_label

log = logging.getLogger(__name__)

MICRO_BATCH_SIZE = 256
MAX_NAMED = 5  # clients in one log line


@dataclass(kw_only=True, slots=True)
class EvaluatedRound:
    """The metrics of a round, and what was left out of them."""

    metrics: dict[str, float] = field(default_factory=dict)
    num_test_left_out: int = 0
    """Test examples of the server that could not be evaluated."""
    num_held_out_left_out: int = 0
    """The same among the examples that devices hold out."""
    num_held_out_clients: int | None = None
    """Devices whose held-out examples are in the metrics; None if devices do not evaluate."""
    not_evaluated: dict[str, str] = field(default_factory=dict)
    """Why each of the other devices is not in them."""
    metrics_by_label: dict[str, dict[str, float]] = field(default_factory=dict)
    """Those of the devices of each label, see ``by_label``."""


def server_test_examples(task: Task, image: ModelImage, settings: Settings) -> Examples | None:
    """Open the server's test examples; None if there are none, or nothing to test on them.

    Raises:
        MissingData, TaskFailed: see ``open_test_examples``.
    """
    layout = image.layout
    if not layout.local:
        return open_test_examples(task, image.model)
    is_tested = settings.evaluation.on_devices
    log.warning(
        "%s of %s parameters stay on the devices (%s): the server has no whole model to test%s",
        f"{layout.num_local:,}",
        f"{layout.num_local + layout.num_parameters:,}",
        settings.model.local_parameters,
        "; the devices test theirs" if is_tested else ", --evaluate-on-devices tests on each",
    )
    return None


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
        raise MissingData(
            f"the task's test_examples found no data: {described(error)}",
            remedy="put the file where test_examples looks for it; into a signed task with "
            "`headwater-server publish --with PATH`",
        ) from error
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
    weight, sums = _first_sums(task, model, examples)
    return list(shown_metrics(task, sums, weight or 1))


def _first_sums(task: Task, model: nn.Module, examples: Examples) -> tuple[int, Metrics]:
    model.eval()
    return loss_sum_alone(task, model, batch_of(task, examples, [0]))[1:]


def is_due(settings: Settings, *, round_number: int) -> bool:
    """Return whether a round ends with an evaluation; the last one always does."""
    is_last = not settings.has_round_after(round_number)
    return is_last or round_number % settings.evaluation.every_rounds == 0


def on_server(
    task: Task, image: ModelImage, examples: Examples | None, *, num_known: int
) -> EvaluatedRound:
    """Return test_loss and the task's metrics on its test examples; empty without examples.

    It logs which examples are left out, unless they are ``num_known`` as in the test before.
    """
    if examples is None:
        return EvaluatedRound()
    places = image.places()
    with running("the evaluation on test_examples"):
        total = evaluate_sums(task, image.model, examples, MICRO_BATCH_SIZE)
    image.check_places(places, "the evaluation on test_examples")
    if len(total.faults) not in (0, num_known):
        log.warning(
            "%d of %s cannot be evaluated and are left out: %s",
            len(total.faults),
            counted(len(examples), "test example"),
            short_summary(total.faults, examples),
        )
        for kind, detail in details(total.faults).items():
            log.warning("test examples: %s: %s", kind, detail)
    return EvaluatedRound(
        metrics=means("test", task, total.loss_sum, total.weight, total.metric_sums),
        num_test_left_out=len(total.faults),
    )


def on_devices(
    answers: Iterable[EvaluateReport | Dropout],
    *,
    task: Task,
    round_number: int,
    most_weight: Mapping[str, int],
) -> EvaluatedRound:
    """Return held_out_loss and the metrics over all devices that evaluated some example.

    And over those of each label, if ``by_label`` lets them be told.

    A report counts up to the weight ``most_weight`` of its device, and not at all if its figures
    are beyond belief. It logs what was left out, in a line for examples and one for devices. A lost
    connection, or a device with too few examples to hold one out, is no warning.
    """
    reports: list[EvaluateReport] = []
    refused: dict[str, int] = {}
    missing: dict[str, str] = {}
    warned: dict[str, str] = {}
    for answer in answers:
        if isinstance(answer, Dropout):
            error = answer.error
            is_warned, why = not isinstance(error, ConnectionLost | LateUpdate), str(error)
            missing[answer.name] = f"{error.code}: {error}"
        elif answer.weight:
            reports.append(answer)
            is_warned = False
        else:
            is_warned = bool(answer.num_refused)
            number = counted(answer.num_refused, "held-out example")
            why = f"none of its {number} can be evaluated"
            missing[answer.name] = why if is_warned else "it has too few examples to hold one out"
        if is_warned:
            warned[answer.name] = why
        if isinstance(answer, EvaluateReport) and answer.num_refused:
            refused[answer.name] = answer.num_refused
    reports, false = _believed(reports, most_weight, round_number=round_number)
    missing |= false
    warned |= false
    if refused:
        log.warning(
            "round %d: %s cannot be evaluated and were left out on %d of %s (%s)",
            round_number,
            counted(sum(refused.values()), "held-out example"),
            len(refused),
            counted(len(reports) + len(missing), "device"),
            _first({name: str(number) for name, number in refused.items()}),
        )
    if warned:
        log.warning(
            "round %d: the evaluation is without %d of %s (%s)",
            round_number,
            len(warned),
            counted(len(reports) + len(missing), "device"),
            _first(warned),
        )
    names = most_reported(Counter(chain.from_iterable(one.metric_sums for one in reports)))
    return EvaluatedRound(
        metrics=_means_of(task, reports, names),
        num_held_out_left_out=sum(refused.values()),
        num_held_out_clients=len(reports),
        not_evaluated=missing,
        metrics_by_label={
            label: _means_of(task, found, names) | {"num_devices": len(found)}
            for label, found in by_label(reports).items()
        },
    )


def _means_of(
    task: Task, reports: Sequence[EvaluateReport], names: Iterable[str]
) -> dict[str, float]:
    sums = {n: math.fsum(report.metric_sums.get(n, 0.0) for report in reports) for n in names}
    loss = math.fsum(report.loss_sum for report in reports)
    return means("held_out", task, loss, sum(report.weight for report in reports), sums)


def _believed(
    reports: Sequence[EvaluateReport], most_weight: Mapping[str, int], *, round_number: int
) -> tuple[list[EvaluateReport], dict[str, str]]:
    """Return the reports that count, of at most their devices' weight, and why others do not."""
    cut = [one.name for one in reports if one.weight > most_weight[one.name]]
    if cut:
        log.warning(
            "round %d: %s told more held-out examples than examples in all, and count up to those "
            "(%s)",
            round_number,
            counted(len(cut), "device"),
            ", ".join(cut[:MAX_NAMED]),
        )
    metrics = dict.fromkeys(chain.from_iterable(one.metric_sums for one in reports))
    sums = {"loss": np.array([one.loss_sum for one in reports])} | {
        name: np.array([one.metric_sums.get(name, math.nan) for one in reports]) for name in metrics
    }
    weights = np.array([one.weight for one in reports], np.float64)
    false = beyond_belief([one.name for one in reports], weights, sums)
    kept = [_scaled(one, most_weight[one.name]) for one in reports if one.name not in false]
    return kept, {name: f"its {why}" for name, why in false.items()}


def _scaled(report: EvaluateReport, most: int) -> EvaluateReport:
    """Return a report's sums for a weight of at most ``most``."""
    if report.weight <= most:
        return report
    part = most / report.weight
    metrics = {name: value * part for name, value in report.metric_sums.items()}
    return report.model_copy(
        update={"weight": most, "loss_sum": report.loss_sum * part, "metric_sums": metrics}
    )


def _first(texts: Mapping[str, str]) -> str:
    """Return the first clients with their texts."""
    named = ", ".join(f"{name}: {text}" for name, text in list(texts.items())[:MAX_NAMED])
    return f"{named}, ..." if len(texts) > MAX_NAMED else named


def means(
    prefix: str, task: Task, loss: float, weight: int, sums: dict[str, float]
) -> dict[str, float]:
    """Return the loss and the metrics that are shown; nothing if the weight is zero."""
    if weight == 0:
        return {}
    rows = {f"{prefix}_loss": loss / weight}
    shown = shown_metrics(task, sums, weight)
    return rows | {f"{prefix}_{name}": value for name, value in shown.items()}
