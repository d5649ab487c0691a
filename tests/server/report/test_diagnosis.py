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


def test_batch_and_noise_scale_are_those_of_the_last_round() -> None:
    found = [*points(2, noise_scale=12.0), *points(1, noise_scale=17.26)]
    weight = found[-1]["weight"]
    assert diagnose(found) == [
        f"The effective batch of {weight} suits the gradient's noise scale of 17."
    ]


def test_a_noise_scale_that_jumps_is_said_not_to_be_settled() -> None:
    (said,) = diagnose([*points(2, noise_scale=141.0), *points(1, noise_scale=58_712.0)])
    assert "is 58,700 after the last round and not settled" in said
    assert "between 141 and 58,700 in the last 3 rounds" in said


def test_unlike_devices_are_named() -> None:
    (said,) = diagnose(points(heterogeneity=6.0, squared_gradient=2.0))
    assert "3.0 times" in said


def test_like_devices_are_not() -> None:
    (said,) = diagnose(points(heterogeneity=1.0, squared_gradient=2.0))
    assert said == "Nothing stands out in the last rounds."


def test_masked_rounds_measure_no_noise() -> None:
    (said,) = diagnose(points(masked_clients=[masked("m")]))
    assert "masked" in said
