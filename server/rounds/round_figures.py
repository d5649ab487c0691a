"""Gathers the figures of a committed round in its row."""

from __future__ import annotations

from dataclasses import replace

from headwater.common.messages import ReadyReport, UpdateReport
from headwater.server.aggregation.round_reports import AcceptedReports, RoundSum
from headwater.server.fleet import Traffic
from headwater.server.planning.round_plans import RoundPlans
from headwater.server.rounds.evaluation import EvaluatedRound
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import (
    ClientRows,
    MaskedClientRow,
    RoundRow,
    masked_client_row,
)
from headwater.server.rounds.run_state import StepResult, Training


def row_of_round(
    training: Training,
    planned: RoundPlans,
    opened: OpenRound,
    done: RoundSum,
    step: StepResult,
    evaluated: EvaluatedRound,
    traffic: Traffic,
    seconds_split: dict[str, float],
    client_seconds: dict[str, float],
) -> RoundRow:
    """Return the row of a committed round.

    ``seconds_split`` are the server's seconds by part, ``client_seconds`` those of the clients.
    """
    noise, ready = step.noise, opened.ready
    seconds = [float(part.seconds.max()) for part in opened.columns]
    seconds += [one.seconds or 0.0 for one in ready.values()]
    total_seconds = sum(seconds_split.values())
    row = RoundRow(
        round=training.round,
        num_clients=len(done.names),
        num_invited=len(planned.plans),
        num_examples=round(done.num_examples),
        num_examples_left_out=round(done.num_refused),
        weight=done.weight,
        loss=done.loss,
        metrics=evaluated.metrics,
        num_test_left_out=evaluated.num_test_left_out,
        num_held_out_left_out=evaluated.num_held_out_left_out,
        num_held_out_clients=evaluated.num_held_out_clients,
        not_evaluated=evaluated.not_evaluated,
        metrics_by_label=evaluated.metrics_by_label,
        learning_rate=step.learning_rate,
        seconds=total_seconds,
        seconds_split=seconds_split,
        client_seconds=client_seconds,
        num_epoch_examples=planned.num_epoch_examples,
        slowest_client_seconds=max(seconds),
        updates_per_hour=3600 * len(done.names) / (total_seconds - seconds_split["wait"]),
        bytes_up=traffic.bytes_up,
        bytes_down=traffic.bytes_down,
        num_nodes=traffic.num_nodes,
        num_scale_shifts=training.sum.num_shifts,
        target=step.target,
        target_by=training.target.by,
        noise_scale=step.noise_scale,
        gradient_variance=None if noise is None else noise.variance,
        squared_gradient=None if noise is None else noise.squared_gradient,
        heterogeneity=None if noise is None else noise.heterogeneity,
        measured_share=None if noise is None else noise.measured_share,
        num_clipped=done.num_clipped,
        num_bounded=planned.num_bounded,
        below_share=planned.below_share,
        num_outliers=len(opened.outliers),
        left_out=planned.left_out,
        refused={name: f"{error.code}: {error}" for name, error in opened.refused.items()},
        clients=ClientRows(
            opened.accepted if opened.releases_reports else AcceptedReports(), opened.plans
        ),
        masked_clients=_masked_rows(opened, done),
    )
    for feature in training.features.values():
        row = replace(row, **feature.figures(opened))
    return row


def _masked_rows(opened: OpenRound, done: RoundSum) -> list[MaskedClientRow]:
    """Return the rows of the clients that report no more than their plans and their hardware."""
    answers: dict[str, ReadyReport | UpdateReport] = {**opened.ready}
    if not opened.releases_reports:
        answers |= opened.accepted
    plans = opened.plans
    return [masked_client_row(answers[name], plans[name]) for name in done.names if name in answers]
