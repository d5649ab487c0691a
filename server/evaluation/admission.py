"""Checks one device's sums of a test against its report, whose counts are checked on their own."""

from __future__ import annotations

import numpy as np

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
from headwater.common.messages import Update
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
    report = update.report
    whole = from_two(*(update.sums[key].double().numpy() for key in (HIGH, LOW)))
    rows = np.split(whole, terms.num_models)
    told = np.zeros(NUM_FIGURES)
    names = sorted(name for name in report.metric_sums if not name.startswith(OTHER))
    told[FIRST_METRIC:][: len(names)] = [report.metric_sums[name] for name in names]
    told[NUM_EXAMPLES], told[WEIGHT], told[LOSS] = (
        report.num_examples,
        report.weight,
        report.loss_sum,
    )
    sent = rows[0][:NUM_FIGURES].copy()
    sent[NUM_LEFT_OUT] = 0.0
    is_told = np.allclose(sent, told, rtol=ROUNDING, atol=ROUNDING)
    if not is_told or any(row[NUM_EXAMPLES] != sent[NUM_EXAMPLES] for row in rows):
        raise CorruptUpdate(
            f"{report.name}: the sums of its test are not those of its report",
            remedy="start the device with headwater's own client, of the server's version",
        )
    return update.vector
