"""A figure that one member masked falsely is in no row, and honest ones are."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from headwater.common.stats.gradient_noise import NoiseSums
from headwater.server.aggregation.believed_figures import believed_noise
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.secagg.opened.opened_figures import OpenedFigures

WEIGHT = 40


def opened(loss: float = 2.0, *, variance: float = 1.0, **metrics: float) -> RoundSum:
    return RoundSum(
        names=("a", "b"),
        mean_P=torch.zeros(1),
        weight=WEIGHT,
        num_examples=WEIGHT,
        summed_weight=WEIGHT,
        loss_sum=loss * WEIGHT,
        metric_sums={name: value * WEIGHT for name, value in metrics.items()},
        noise=NoiseSums(
            weight=WEIGHT, measured_weight=WEIGHT, variance=variance * WEIGHT, squared_gradient=4.0
        ),
    )


def after(*sums: RoundSum) -> tuple[RoundSum, OpenedFigures]:
    figures = OpenedFigures()
    for one in sums:
        done, figures = figures.believed(one)
    return done, OpenedFigures.of_json(json.loads(json.dumps(asdict(figures))))


@pytest.mark.parametrize("rounds", [0, 1, 6])
def test_an_accuracy_beyond_belief_is_in_no_row(
    rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    honest = [
        NoiseSums(weight=4, measured_weight=4, variance=4.0 * at, squared_gradient=2.0)
        for at in (1, 2, 3)
    ]
    liar = NoiseSums(weight=4, measured_weight=4, variance=1e80, squared_gradient=1.0)
    assert believed_noise([*honest, liar]) == [*honest, NoiseSums(weight=4)]
    assert believed_noise(honest) == honest
    assert believed_noise([honest[0], liar]) == [honest[0], liar]  # of two nobody can say
