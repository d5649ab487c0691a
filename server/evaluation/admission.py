"""Checks one device's sums of a test against its report, whose counts are checked on their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.errors import CorruptUpdate
from headwater.common.evaluation.terms import (
    FIRST_METRIC,
    HIGH,
    LOSS,
    LOW,
    NUM_EXAMPLES,
    NUM_FIGURES,
    NUM_LEFT_OUT,
    OTHER,
    WEIGHT,
    EvaluationTerms,
    from_two,
)
from headwater.common.messages import Update, UpdateReport
from headwater.common.sums.encoded_vector import Vector
from headwater.common.terms import Terms

# The sums travel in two float32 (``common.evaluation.terms``), the report's in float64.
ROUNDING = 1e-6


def admit(update: Update, terms: Terms) -> Vector:
    """Return the vector of an update whose sums are those of its report.

    A sum of 10^13 right answers of 24 examples would otherwise be the test's result.

    Raises:
        CorruptUpdate: they differ, or the models were tested on unlike numbers of examples.
    """
    assert isinstance(terms, EvaluationTerms)
    check_told(update.sums, [update.report], num_models=terms.num_models)
    return update.vector


def check_told(
    sums: Mapping[str, Tensor], reports: Sequence[UpdateReport], *, num_models: int
) -> None:
    """Check a test's sums against the reports of the devices whose sums they are.

    Raises:
        CorruptUpdate: they differ, or the models were tested on unlike numbers of examples.
    """
    whole = from_two(*(sums[key].double().numpy() for key in (HIGH, LOW)))
    rows = np.split(whole, num_models)
    told = np.sum([_told(report) for report in reports], axis=0)
    sent = rows[0][:NUM_FIGURES].copy()
    sent[NUM_LEFT_OUT] = 0.0
    is_told = np.allclose(sent, told, rtol=ROUNDING, atol=ROUNDING)
    if not is_told or any(row[NUM_EXAMPLES] != sent[NUM_EXAMPLES] for row in rows):
        whose = f"{reports[0].name}: the sums of its test are not those of its report"
        if len(reports) > 1:
            whose = "the sums of the test are not those of the devices' reports"
        raise CorruptUpdate(
            whose,
            remedy="start devices and aggregators with headwater's own, of the server's version",
        )


def _told(report: UpdateReport) -> NDArray[np.float64]:
    """Return the figures that a device's sums have, by its report."""
    told = np.zeros(NUM_FIGURES)
    names = sorted(name for name in report.metric_sums if not name.startswith(OTHER))
    told[FIRST_METRIC:][: len(names)] = [report.metric_sums[name] for name in names]
    told[NUM_EXAMPLES], told[WEIGHT] = report.num_examples, report.weight
    told[LOSS] = report.loss_sum
    return told
