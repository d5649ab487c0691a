"""The paired comparison: sums, the standard error of their difference, and its limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headwater.client.adaptation.comparison import UnitSums, compare, t_quantile
from headwater.common.errors import NoFiniteExample

TASK: Any = object()


def sums(losses: list[float], weights: list[float] | None = None) -> UnitSums:
    number = len(losses)
    return UnitSums(
        losses_N=np.array(losses),
        weights_N=np.array(weights or [1.0] * number),
        metrics=[{"accuracy": 1.0}] * number,
        num_examples_N=np.ones(number, np.int64),
    )


def test_with_equal_weights_it_is_the_standard_error_of_the_mean_difference() -> None:
    random = np.random.default_rng(1)
    first, second = random.random(30), random.random(30)
    found = compare(TASK, sums(first.tolist()), sums(second.tolist()))
    gains = first - second
    assert math.isclose(found.difference, gains.mean())
    assert math.isclose(found.standard_error, gains.std(ddof=1) / math.sqrt(30))
    assert found.metrics == found.other_metrics == {"accuracy": 1.0}


def test_an_equal_gain_on_each_example_is_beyond_chance() -> None:
    found = compare(TASK, sums([1.0] * 8), sums([0.5] * 8))
    assert (found.difference, found.standard_error) == (0.5, 0)
    assert not found.is_within_chance


def test_the_mean_is_over_the_weight() -> None:
    found = compare(TASK, sums([2.0, 6.0], [1.0, 3.0]), sums([1.0, 3.0], [1.0, 3.0]))
    assert (found.loss, found.other_loss, found.difference) == (2, 1, 1)
    assert found.standard_error == 0  # the same gain for each token


@pytest.mark.parametrize("losses", [[1.0] * 4, [9.0, 9.0]])
def test_a_difference_on_few_examples_is_within_chance(losses: list[float]) -> None:
    found = compare(TASK, sums(losses), sums([0.0] * len(losses)))
    assert found.difference > 0
    assert found.is_within_chance


def test_equal_models_differ_within_chance() -> None:
    assert compare(TASK, sums([1.0] * 9), sums([1.0] * 9)).is_within_chance


def test_an_example_without_a_finite_loss_under_one_model_is_left_out_for_both() -> None:
    found = compare(TASK, sums([1.0, 2.0, 3.0]), sums([1.0, math.nan, 1.0]))
    assert (found.num_examples, found.num_left_out) == (2, 1)
    assert (found.loss, found.other_loss) == (2, 1)


def test_metrics_are_made_of_the_sums_over_all_examples() -> None:
    class Root:
        def metrics_from_sums(self, sums: dict[str, float], weight: float) -> dict[str, float]:
            return {"root": math.sqrt(sums["accuracy"])}

    found = compare(Root(), sums([1.0] * 9), sums([1.0] * 9))  # type: ignore[arg-type]
    assert found.metrics == found.other_metrics == {"root": 3}


def test_no_finite_example_is_an_error() -> None:
    with pytest.raises(NoFiniteExample):
        compare(TASK, sums([1.0, 2.0]), sums([math.nan, math.inf]))


@pytest.mark.parametrize(
    ("freedom", "wanted"), [(4, 2.776445), (9, 2.262157), (29, 2.045230), (10**6, 1.959966)]
)
def test_the_quantile_is_student_s(freedom: int, wanted: float) -> None:
    """The values are those of the usual table."""
    assert math.isclose(t_quantile(freedom), wanted, rel_tol=3e-3)
