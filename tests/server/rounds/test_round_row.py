"""A client's row: the gradient variance after each of its accumulation steps."""

from __future__ import annotations

import numpy as np

from headwater.common.messages import Step, UpdateReport
from headwater.server.rounds.round_row import client_row


def report(norms: list[float], weights: list[int]) -> UpdateReport:
    steps = tuple(
        Step(num_examples=w, weight=w, loss=1.0, gradient_norm=norm, seconds=0.5, peak_bytes=at)
        for at, (norm, w) in enumerate(zip(norms, weights, strict=True))
    )
    return UpdateReport(
        name="pi",
        round=1,
        num_examples=sum(weights),
        weight=sum(weights),
        loss_sum=2.0 * sum(weights),
        micro_batch_size=max(weights),
        seconds=3.0,
        steps=steps,
        reason="quota",
    )


def test_the_variance_of_one_examples_gradient_is_estimated_without_bias() -> None:
    """Gradients are drawn from N(G, S): the mean over many devices must meet tr(S)."""
    rng = np.random.default_rng(0)
    deviation_P = np.array([0.5, 1.0, 2.0, 0.1])
    mean_P = np.array([1.0, -2.0, 0.0, 3.0])
    weights = [4, 4, 4, 3]
    estimates = []
    for _ in range(4000):
        draws_BP = rng.normal(mean_P, deviation_P, size=(sum(weights), 4))
        ends = np.cumsum(weights)
        norms = [float(np.linalg.norm(draws_BP[:end].sum(0))) for end in ends]
        found = client_row(report(norms, weights), plan_reason="").gradient_variance
        assert found[0] is None
        estimates.append([value for value in found[1:] if value is not None])
    trace = float((deviation_P**2).sum())
    error = np.std(estimates, axis=0) / np.sqrt(len(estimates))
    assert (np.abs(np.mean(estimates, axis=0) - trace) <= 4 * error).all()


def test_examples_that_are_all_alike_have_no_variance() -> None:
    found = client_row(report([6.0, 12.0, 18.0], [2, 2, 2]), plan_reason="")
    assert found.gradient_variance == [None, 0.0, 0.0]


def test_a_step_without_weight_gives_no_variance() -> None:
    found = client_row(report([0.0, 3.0, 3.0, 6.0], [0, 1, 0, 1]), plan_reason="")
    assert found.gradient_variance == [None, None, None, 0.0]


def test_local_steps_give_no_variance_as_the_model_moves_between_them() -> None:
    found = client_row(report([6.0, 12.0], [2, 2]), plan_reason="", moves_model=True)
    assert found.gradient_variance == [None, None]
