"""Sums over a round's reports."""

from __future__ import annotations

from headwater.common.messages import Step, UpdateReport
from headwater.server.aggregation.round_reports import (
    ReportColumns,
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
