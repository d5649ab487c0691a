"""The slope by which the soak judges growth."""

import pytest

from benchmarks.trend import trend


def test_the_trend_of_a_line_is_its_slope() -> None:
    found = trend([0, 1, 2, 3, 4], [1.0, 3.0, 5.0, 7.0, 9.0])
    assert (found.low, found.slope, found.high) == (2.0, 2.0, 2.0)


def test_a_spike_does_not_tilt_the_trend() -> None:
    values = [100.0] * 20
    values[-1] = 1e6
    found = trend(list(range(20)), values)
    assert found.slope == 0.0
    assert found.low <= 0.0 <= found.high


def test_two_samples_have_no_trend() -> None:
    with pytest.raises(ValueError, match="three samples"):
        trend([0, 1], [0.0, 1.0])
