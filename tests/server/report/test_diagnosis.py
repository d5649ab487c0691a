"""What the page says of a run in words."""

from __future__ import annotations

import pytest

from headwater.server.report.diagnosis import MIN_ROUNDS, diagnose
from headwater.server.report.round_points import Point, point_of
from tests.round_rows import masked, row


def points(number: int = MIN_ROUNDS, **changes: object) -> list[Point]:
    return [point_of(row(n, "a", "b", **changes)) for n in range(1, number + 1)]


def test_nothing_is_said_of_too_few_rounds() -> None:
    assert diagnose(points(MIN_ROUNDS - 1, noise_scale=1000.0)) == []


@pytest.mark.parametrize(
    ("noise_scale", "said"),
    [(1000.0, "far below the noise scale"), (1.0, "far above the noise scale"), (12.0, "suits")],
)
def test_the_batch_is_compared_with_the_noise_scale(noise_scale: float, said: str) -> None:
    assert said in diagnose(points(noise_scale=noise_scale))[0]


def test_unlike_devices_are_named() -> None:
    (said,) = diagnose(points(heterogeneity=6.0, squared_gradient=2.0))
    assert "3.0 times" in said


def test_like_devices_are_not() -> None:
    (said,) = diagnose(points(heterogeneity=1.0, squared_gradient=2.0))
    assert said == "Nothing stands out in the last rounds."


def test_masked_rounds_measure_no_noise() -> None:
    (said,) = diagnose(points(masked_clients=[masked("m")]))
    assert "masked" in said
