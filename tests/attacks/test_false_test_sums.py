"""A device without masks sends other sums of a test than it reports: they are in no result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater.common.errors import CorruptUpdate
from headwater.common.evaluation.terms import (
    FIRST_METRIC,
    HIGH,
    LOSS,
    LOW,
    NUM_EXAMPLES,
    NUM_FIGURES,
    WEIGHT,
    EvaluationTerms,
    in_two,
)
from headwater.common.messages import Update, UpdateReport
from headwater.server.evaluation.admission import admit, check_told

DIGEST = "0" * 64
TERMS = EvaluationTerms(model=DIGEST, measures=DIGEST)
BOTH = EvaluationTerms(model=DIGEST, other="1" * 64, measures=DIGEST)


def update(*changed: dict[int, float]) -> Update:
    """Return a device's update of 24 examples, with a row of changed figures for each model."""
    rows = []
    for changes in changed:
        row = np.zeros(NUM_FIGURES)
        row[NUM_EXAMPLES], row[WEIGHT], row[LOSS], row[FIRST_METRIC] = 24, 24, 31.7, 20
        row[FIRST_METRIC + 1] = 3e9 + 0.25  # larger than float32 has digits for
        for at, value in changes.items():
            row[at] = value
        rows.append(row)
    high, low = (torch.from_numpy(part).float() for part in in_two(np.concatenate(rows)))
    report = UpdateReport(
        name="d",
        round=1,
        num_examples=24,
        weight=24,
        loss_sum=31.7,
        metric_sums={"squares": 3e9 + 0.25, "accuracy": 20, "other loss": 9.0},
        micro_batch_size=24,
        seconds=1.0,
        steps=(),
        reason="quota",
    )
    return Update(values_P=torch.zeros(2), report=report, sums={HIGH: high, LOW: low})


def test_the_sums_of_the_report_are_taken() -> None:
    one = update({})
    assert admit(one, TERMS) is one.vector
    two = update({}, {LOSS: 5.0, FIRST_METRIC: 1.0})
    assert admit(two, BOTH) is two.vector


@pytest.mark.parametrize(
    "changes",
    [
        {NUM_EXAMPLES: 16_000_000.0},
        {WEIGHT: 16_000_000.0},
        {LOSS: -1e13},
        {FIRST_METRIC: 1e13},
        {FIRST_METRIC: 21.0},
        {FIRST_METRIC + 2: 1.0},
    ],
)
def test_other_sums_are_refused_with_the_device_s_name(changes: dict[int, float]) -> None:
    with pytest.raises(CorruptUpdate, match="d: the sums of its test are not those of its report"):
        admit(update(changes), TERMS)


def test_two_models_are_tested_on_the_same_number_of_examples() -> None:
    with pytest.raises(CorruptUpdate, match="d: the sums"):
        admit(update({}, {NUM_EXAMPLES: 23.0}), BOTH)


@pytest.mark.parametrize("added", [0.0, 1.0, 1e6])
def test_an_aggregator_s_sums_are_those_of_its_devices_reports(added: float) -> None:
    one, two = update({}), update({FIRST_METRIC: 20.0 + added})
    sums = {key: one.sums[key] + two.sums[key] for key in (HIGH, LOW)}
    reports = [one.report, two.report]
    if not added:
        check_told(sums, reports, num_models=1)
        return
    with pytest.raises(CorruptUpdate, match="not those of the devices' reports"):
        check_told(sums, reports, num_models=1)
