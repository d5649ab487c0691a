"""A figure that one member masked falsely is in no row, and honest ones are."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict

import pytest
import torch

from headwater.common.estimates.gradient_noise import NoiseSums
from headwater.server.aggregation.believed_figures import believed_noise
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.secagg.opened_figures import OpenedFigures

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
    """Return the last sum as it is believed, and the figures as a checkpoint restores them."""
    figures = OpenedFigures()
    for one in sums:
        done, figures = figures.believed(one)
    return done, OpenedFigures.of_json(json.loads(json.dumps(asdict(figures))))


@pytest.mark.parametrize("rounds", [0, 1, 6])
def test_an_accuracy_beyond_belief_is_in_no_row(
    rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    honest = [opened(accuracy=0.5)] * rounds
    with caplog.at_level(logging.WARNING):
        done, figures = after(*honest, opened(accuracy=1e15))
    assert done.metric_sums == {}
    assert done.loss == 2.0
    assert "accuracy 1e+15" in caplog.text
    assert figures.believed(opened(accuracy=0.6))[0].metric_sums == {"accuracy": 0.6 * WEIGHT}


@pytest.mark.parametrize("lie", [1e15, -1e15, 20_001.0])
def test_a_loss_beyond_belief_is_not_a_number(lie: float) -> None:
    done, _ = after(*[opened(200.0)] * 3, opened(lie, accuracy=0.5))
    assert math.isnan(done.loss)
    assert done.metric_sums == {"accuracy": 0.5 * WEIGHT}


def test_honest_figures_may_be_percent_large_and_far_from_the_last() -> None:
    rounds = [(1e6, 12.0), (3e7, 97.0), (1e3, 99.0), (0.5, 100.0)]
    for number in range(1, 5):
        done, _ = after(*(opened(loss, accuracy=part) for loss, part in rounds[:number]))
        assert math.isfinite(done.loss)
        assert list(done.metric_sums) == ["accuracy"]


def test_a_false_noise_leaves_the_round_unmeasured() -> None:
    done, figures = after(*[opened(variance=2.0)] * 2, opened(variance=1e12))
    assert done.noise is None
    assert figures.believed(opened(variance=3.0))[0].noise is not None


def test_of_plain_devices_one_whose_norms_are_beyond_belief_counts_as_unmeasured() -> None:
    honest = [
        NoiseSums(weight=4, measured_weight=4, variance=4.0 * at, squared_gradient=2.0)
        for at in (1, 2, 3)
    ]
    liar = NoiseSums(weight=4, measured_weight=4, variance=1e80, squared_gradient=1.0)
    assert believed_noise([*honest, liar]) == [*honest, NoiseSums(weight=4)]
    assert believed_noise(honest) == honest
    assert believed_noise([honest[0], liar]) == [honest[0], liar]  # of two nobody can say
