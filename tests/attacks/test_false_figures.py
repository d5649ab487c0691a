"""A client whose update is honest and whose loss or accuracy is not: it ends no run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import headwater
from headwater.client.own_feature.device_feature import DeviceWork
from headwater.server.aggregation.believed_figures import MOST_PART, false_figures, without_figures
from headwater.server.aggregation.round_reports import ReportColumns
from tests.python_tasks import Signs


class Boasts:
    """A client that tells of an accuracy of its choice; its vector is right."""

    claim: float = 1e90

    class Device(headwater.DeviceFeature):
        def end(self, work: DeviceWork) -> None:
            if work.name == "3":
                work.total.metric_sums["accuracy"] = Boasts.claim * work.total.weight
                work.total.loss_sum = -1e97


GIVEN: dict[str, Any] = {
    "clients": 5,
    "rounds": 3,
    "accumulation_steps": 2,
    "micro_batch_size": 8,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "progress": False,
}


def test_a_false_accuracy_and_loss_are_in_no_mean(
    caplog: pytest.LogCaptureFixture,
) -> None:
    honest = headwater.simulate(Signs, **GIVEN)
    settings: dict[str, Any] = {"simulation.compute": "one-by-one"}
    with caplog.at_level(logging.WARNING):
        run = headwater.simulate(Signs, **GIVEN, feature=Boasts, settings=settings)
    assert len(run.history) == 3
    for row, right in zip(run.history, honest.history, strict=True):
        assert row.loss == pytest.approx(right.loss, rel=0.2)
        assert 0 < row.metrics["train_accuracy"] < 1
        assert row.num_outliers == 1
    assert "the figures of 1 device are in no mean (3: loss 6.25e+95" in caplog.text
    for name, tensor in honest.model.state_dict().items():  # its update counts
        torch.testing.assert_close(run.model.state_dict()[name], tensor)


def columns(loss: list[float], **metrics: list[float]) -> ReportColumns:
    number = len(loss)
    return ReportColumns(
        round=1,
        names=[str(at) for at in range(number)],
        num_examples=[10] * number,
        num_refused=[0] * number,
        num_steps=[1] * number,
        sent_weight=[10] * number,
        summed_weight=[10] * number,
        loss_sum=[10 * one for one in loss],
        metric_sums={name: [10 * one for one in values] for name, values in metrics.items()},
        seconds=[1.0] * number,
        vitals=[],
    )


@pytest.mark.parametrize(
    ("loss", "metrics", "found"),
    [
        ([1, 2, 3, 1e99], {}, ["3"]),
        ([1, 2, 3, -1e99], {}, ["3"]),
        ([0.001, 0.002, 0.003, 7.0], {}, []),  # of another kind, and honest
        ([1, 2, 3, 99.0], {}, []),
        ([1, 1, 1], {"accuracy": [0.5, 0.6, MOST_PART * 1.01]}, ["2"]),
        ([1, 1, 1], {"accuracy": [0.0, 0.0, 1.0]}, []),
        ([1, 1, 1], {"squared_error": [0.01, 0.02, 0.9]}, []),
        ([1, 1, 1], {"squared_error": [3.0, 5.0, 1e6]}, ["2"]),
        ([1, 1, 1], {"rare": [0.0, 0.0, 1.0]}, []),
        ([1, 1e12], {}, []),  # which of two is wrong nobody knows
        ([1, 1e20], {}, ["1"]),
        ([], {}, []),
    ],
)
def test_what_is_believed(
    loss: list[float], metrics: dict[str, list[float]], found: list[str]
) -> None:
    part = columns([float(one) for one in loss], **metrics)
    assert list(false_figures([part])) == found


def test_each_mean_is_that_of_the_others() -> None:
    part = columns([1.0, 2.0, 3.0, 1e99], accuracy=[0.2, 0.4, 0.6, 0.9])
    [kept] = without_figures([part], ["3"])
    assert sum(kept.loss_sum) / 40 == pytest.approx(2.0)
    assert sum(kept.metric_sums["accuracy"]) / 40 == pytest.approx(0.4)
