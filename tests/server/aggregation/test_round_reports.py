"""Sums over a round's reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwater.common.messages import Step, UpdateReport
from headwater.server.aggregation.round_reports import (
    ReportColumns,
    RoundSum,
    added_sums,
    total_loss,
    total_metrics,
    total_summed_weight,
)


def report(*, num_examples: int, weights: list[int], sent: int | None = None) -> UpdateReport:
    steps = tuple(
        Step(num_examples=1, weight=w, loss=1.0, gradient_norm=1.0, seconds=0.5, peak_bytes=0)
        for w in weights
    )
    return UpdateReport(
        name="pi",
        round=1,
        num_examples=num_examples,
        weight=sum(weights) if sent is None else sent,
        loss_sum=1.0,
        micro_batch_size=1,
        seconds=1.0,
        steps=steps,
        reason="quota",
    )


def test_the_summed_weight_is_that_of_the_steps_and_bounded_by_the_task() -> None:
    scaled = report(num_examples=3, weights=[10, 20], sent=500)
    lying = report(num_examples=2, weights=[2**53], sent=64)
    silent = report(num_examples=1, weights=[], sent=7)
    parts = [ReportColumns.of(one) for one in (scaled, lying, silent)]
    assert total_summed_weight(parts, max_weight_per_example=32) == 30 + 64 + 7


def test_columns_of_several_reports_add_up_to_the_columns_of_each() -> None:
    reports = [report(num_examples=n, weights=[n]) for n in (1, 2, 3)]
    together, apart = [ReportColumns.of(*reports)], [ReportColumns.of(one) for one in reports]
    assert total_loss(together) == total_loss(apart) > 0
    assert total_metrics(together) == total_metrics(apart)


def sum_of(name: str, mean: Sequence[float], weight: int) -> RoundSum:
    return RoundSum(
        names=(name,),
        mean_P=torch.tensor(mean),
        weight=weight,
        num_examples=weight,
        summed_weight=weight,
        loss_sum=0.5 * weight,
        metric_sums={"correct": weight - 1},
        noise=None,
        num_refused=1,
        num_clipped=2,
    )


def test_the_mean_of_several_sums_has_one_divisor_and_counts_each_as_often_as_it_should() -> None:
    done = added_sums([sum_of("a", [1.0, 8.0], 3), sum_of("b", [5.0, -2.0], 6)], [1024, 512])
    assert done.names == ("a", "b")
    assert done.mean_P.tolist() == [(3 * 1 + 3 * 5) / 6, (3 * 8 - 3 * 2) / 6]
    assert (done.weight, done.num_examples, done.summed_weight) == (9, 9, 9)
    assert (done.loss_sum, done.metric_sums) == (4.5, {"correct": 7})
    assert (done.num_refused, done.num_clipped) == (2, 4)


def test_a_single_sum_stays_as_it_is_however_often_it_counts() -> None:
    one = sum_of("a", [1 / 3], 3)
    assert added_sums([one], [7]) is one
