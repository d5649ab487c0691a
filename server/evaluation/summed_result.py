"""What the sums of a test say: each model's means, and what was counted of its predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from headwater.common.errors import CorruptUpdate, EmptyDataset
from headwater.common.evaluation.kinds import Floats, Ints
from headwater.common.evaluation.measures import Measures
from headwater.common.evaluation.terms import (
    COUNTS,
    FIRST_METRIC,
    HIGH,
    LOSS,
    LOW,
    NUM_EXAMPLES,
    NUM_FIGURES,
    NUM_LEFT_OUT,
    WEIGHT,
    from_two,
)
from headwater.common.wording import counted
from headwater.server.evaluation.tested_models import TestedModel


class SumsOfModel(NamedTuple):
    """One model's rows."""

    figures: Floats
    reals: Floats
    counts: Ints


def result_of(
    sums: Mapping[str, Tensor],
    models: Sequence[TestedModel],
    measures: Measures,
    *,
    names: Sequence[str],
    num_devices: int,
) -> dict[str, Any]:
    """Return the result as plain data; a mean is divided once, by the weight of all devices.

    ``names`` are those of the metrics, in their order.

    Raises:
        EmptyDataset: no device holds examples out.
        CorruptUpdate: no examples have such sums.
    """
    rows = rows_of(sums, len(models))
    first = rows[0].figures
    if not first[NUM_EXAMPLES]:
        raise EmptyDataset(
            f"none of {counted(num_devices, 'device')} holds examples out that can be evaluated, "
            "or under masks as many as its secure.min_quota",
            remedy="raise --test-fraction; 1 tests on all examples of the devices",
        )
    results = []
    for model, row in zip(models, rows, strict=True):
        measures.check(row.counts, row.reals)
        figures = row.figures
        if figures[WEIGHT] < 0 or figures[NUM_EXAMPLES] != first[NUM_EXAMPLES]:
            raise CorruptUpdate(
                "the sums of the test: no examples have such, so a device sent others than its own",
                remedy="find the device by leaving some out, and begin again",
            )
        weight = figures[WEIGHT] or math.nan
        values = figures[FIRST_METRIC:][: len(names)] / weight
        results.append(
            {
                "model": str(model.path),
                "round": model.round,
                "loss": _number(figures[LOSS] / weight),
                "weight": int(figures[WEIGHT]),
                "metrics": {name: _number(v) for name, v in zip(names, values, strict=True)},
                "predictions": measures.found(row.counts, row.reals),
            }
        )
    return {
        "num_devices": num_devices,
        "num_examples": int(first[NUM_EXAMPLES]),
        "num_left_out": int(first[NUM_LEFT_OUT]),
        "results": results,
    }


def num_metrics(sums: Mapping[str, Tensor], num_models: int) -> int:
    """Return the number of metrics up to the last that is not zero for the first model."""
    metrics = rows_of(sums, num_models)[0].figures[FIRST_METRIC:]
    return int(np.flatnonzero(metrics).max(initial=-1)) + 1


def rows_of(sums: Mapping[str, Tensor], num_models: int) -> list[SumsOfModel]:
    """Return each model's rows of the sums over all devices."""
    whole = from_two(sums[HIGH].numpy(), sums[LOW].numpy())
    counts = sums[COUNTS].numpy() if COUNTS in sums else np.zeros(0)
    rows = zip(
        np.split(whole, num_models),
        np.split(np.rint(counts).astype(np.int64), num_models),
        strict=True,
    )
    return [SumsOfModel(row[:NUM_FIGURES], row[NUM_FIGURES:], own) for row, own in rows]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
