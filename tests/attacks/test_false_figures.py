"""A client whose update is honest and whose loss or accuracy is not: it ends no run."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch

import headwater
from headwater.client.own_feature.device_feature import DeviceWork
from headwater.common.messages import EvaluateReport
from headwater.server.aggregation.believed_figures import MOST_PART, false_figures, without_figures
from headwater.server.aggregation.round_reports import ReportColumns, total_metrics
from headwater.server.planning.vitals_columns import VitalsColumns
from headwater.server.rounds.evaluation import EvaluatedRound, on_devices
from tests.attacks.raw import cohort
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
        num_examples=np.full(number, 10),
        num_refused=[0] * number,
        num_steps=np.ones(number, dtype=np.int64),
        sent_weight=np.full(number, 10),
        summed_weight=np.full(number, 10),
        loss_sum=10 * np.array(loss),
        metric_sums={name: 10 * np.array(values) for name, values in metrics.items()},
        seconds=np.ones(number),
        vitals=VitalsColumns.of([]),
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
        ([20, 30, 15, 1e5], {"mae": [4.0, 5.0, 3.0, 3e2]}, []),  # a supermarket among corner shops
        ([1e20, 1.1e20, 0.9e20, 1e20], {}, []),  # sales in a small unit
        ([1, 1, 1], {"rare": [0.0, 0.0, 1.0]}, []),
        ([1] * 5, {"clicks": [0.0, 0.0, 0.0, 3.0, 9.0]}, ["3", "4"]),  # nobody knows what is usual
        ([1] * 7, {"clicks": [0.0, 0.0, 0.0, 0.0, 3.0, 9.0, 2.0]}, []),
        ([1] * 7, {"clicks": [0.0, 0.0, 0.0, 1e9, 3.0, 9.0, 2.0]}, ["3"]),
        ([1] * 10, {"clicks": [0.0] * 7 + [1e9] * 3}, ["7", "8", "9"]),  # three who agree on a lie
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


def test_a_client_that_leaves_a_metric_out_hides_no_other_s() -> None:
    part = columns([1.0] * 4, accuracy=[0.5, math.nan, 0.6, 1e90])
    assert list(false_figures([part])) == ["3"]
    assert total_metrics([part])["accuracy"] == pytest.approx(1e91)
    (kept,) = without_figures([part], ["3"])
    assert total_metrics([kept])["accuracy"] == pytest.approx(11 + 10 * 11 / 30)
    other = columns([1.0, 1.0])
    assert list(false_figures([part, other])) == ["3"]


def test_where_nobody_is_believed_there_is_no_mean() -> None:
    """A loss of 0 would be the best that a run has had."""
    part = columns([1e30, 2e30], mae=[1e30, 0.5])
    [kept] = without_figures([part], list(false_figures([part])))
    assert np.isnan(kept.loss_sum).all()
    assert np.isnan(kept.metric_sums["mae"]).all()


def test_each_mean_is_that_of_the_others() -> None:
    part = columns([1.0, 2.0, 3.0, 1e99], accuracy=[0.2, 0.4, 0.6, 0.9])
    [kept] = without_figures([part], ["3"])
    assert sum(kept.loss_sum) / 40 == pytest.approx(2.0)
    assert sum(kept.metric_sums["accuracy"]) / 40 == pytest.approx(0.4)


def evaluated(name: str, loss: float, accuracy: float, weight: int = 10) -> EvaluateReport:
    metrics = {"accuracy": accuracy * weight}
    return EvaluateReport(name=name, weight=weight, loss_sum=loss * weight, metric_sums=metrics)


def counted_of(lie: EvaluateReport, most_weight: dict[str, int]) -> EvaluatedRound:
    return on_devices([*HONEST, lie], task=Signs(), round_number=1, most_weight=most_weight)


HONEST = [evaluated("a", 1.0, 0.25), evaluated("b", 2.0, 0.5), evaluated("c", 3.0, 0.75)]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (evaluated("liar", 1e90, 0.5), "its loss 1e+90"),
        (evaluated("liar", 2.0, 99.0), "its accuracy 99"),
        (evaluated("liar", 2.0, -1e99), "its accuracy 1e+99"),
    ],
)
def test_what_a_device_tells_of_its_held_out_examples_is_not_believed_alone(
    lie: EvaluateReport, why: str
) -> None:
    weights = dict.fromkeys(["a", "b", "c", "liar"], 100)
    found = counted_of(lie, weights)
    assert found.metrics == {"held_out_loss": 2.0, "held_out_accuracy": 0.5}
    assert found.num_held_out_clients == 3
    assert found.not_evaluated["liar"].startswith(why)


def test_held_out_examples_count_up_to_what_a_device_owns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = {"a": 10, "b": 10, "c": 10, "liar": 30}
    with caplog.at_level(logging.WARNING):
        lie = evaluated("liar", 1.0, 1.0, weight=10**15)
        found = counted_of(lie, weights)
    assert found.metrics["held_out_accuracy"] == pytest.approx((0.5 * 30 + 1.0 * 30) / 60)
    assert "1 device told more held-out examples than examples in all" in caplog.text


async def test_one_device_ends_no_run_by_its_evaluation() -> None:
    names = ("first", "second", "third", "liar")
    async with cohort(*names, on_devices=True) as (run, *devices):
        for device in devices:
            await device.describe()
        for device in devices:
            await device.update(await device.plan())
        for device in devices:
            instruction = await device.plan()
            accuracy = 1e15 if device.name == "liar" else 0.5
            report = json.loads(evaluated(device.name, 0.5, accuracy, 2).model_dump_json())
            await device.reply(instruction, json.dumps(report))
        await run.end()
        assert run.rows[0].metrics["held_out_accuracy"] == 0.5
