"""Lines in the micro-batch size: fitted to measured points, and refitted to each round."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.estimates.linear_fit import PRIOR_WEIGHT, Line, fit_line, refit_line

VALUES = st.floats(1e-6, 1e12)
POINTS = st.lists(
    st.tuples(st.integers(1, 4096).map(float), VALUES, st.floats(0.01, 10)), max_size=8
)


def close(found: Line, expected: Line) -> bool:
    """Compare to what the sums of a fit may lose: 12 digits, less at a base near nothing."""
    scale = expected.base + expected.each
    return math.isclose(found.each, expected.each, rel_tol=1e-9, abs_tol=1e-9 * scale) and (
        math.isclose(found.base, expected.base, rel_tol=1e-9, abs_tol=1e-6 * scale)
    )


@given(
    st.floats(0, 1e3),
    st.floats(1e-3, 1e3),
    st.lists(st.integers(1, 300), min_size=2, max_size=6, unique=True),
)
def test_points_of_a_line_give_the_line(base: float, each: float, sizes: list[int]) -> None:
    line = Line(base=base, each=each)
    assert close(fit_line([(size, line.at(size), 1.0) for size in sizes]), line)


@given(POINTS)
def test_a_fitted_line_is_never_negative_and_never_decreases(
    points: list[tuple[float, float, float]],
) -> None:
    line = fit_line(points)
    assert line.base >= 0
    assert line.each >= 0
    assert math.isfinite(line.base)
    assert math.isfinite(line.each)


@given(POINTS, st.sampled_from([0.25, 2.0, 1024.0]))
def test_a_fit_scales_with_the_unit_of_its_values(
    points: list[tuple[float, float, float]], factor: float
) -> None:
    scaled = fit_line([(x, y * factor, w) for x, y, w in points])
    assert close(scaled, fit_line(points).times(factor))


def test_relative_errors_count_equally_at_every_size() -> None:
    """One point a tenth too high, one a tenth too low, 1000 times larger: the middle stays."""
    high_low = fit_line([(1, 1.1, 1), (1000, 900.0, 1), (1, 1 / 1.1, 1), (1000, 1000 / 0.9, 1)])
    assert high_low.at(1) == pytest.approx(1, rel=0.02)
    assert high_low.at(1000) == pytest.approx(1000, rel=0.02)


def test_a_heavier_point_attracts_the_line() -> None:
    points = [(1.0, 10.0, 1.0), (2.0, 10.0, 1.0), (2.0, 20.0, 3.0), (4.0, 40.0, 1.0)]
    lighter = [(x, y, 0.01 if y == 20 else w) for x, y, w in points]
    assert fit_line(points).at(2) > fit_line(lighter).at(2)


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([], Line(base=0, each=0)),
        ([(1, 0.0, 1), (2, -1.0, 1), (3, 5.0, 0)], Line(base=0, each=0)),
        ([(4, 8.0, 1)], Line(base=0, each=2)),
        ([(4, 8.0, 1), (4, 8.0, 1)], Line(base=0, each=2)),
        ([(1, 5.0, 1), (9, 5.0, 1)], Line(base=5, each=0)),
        ([(1, 1.0, 1), (2, 4.0, 1)], Line(base=0, each=1.2)),
    ],
)
def test_a_fit_through_unsuitable_points_is_bounded(
    points: list[tuple[float, float, float]], line: Line
) -> None:
    """The last one: sum of x y / y^2 over sum of x^2 / y^2 is (1 + 2/4) / (1 + 4/16) = 1.2."""
    found = fit_line(points)
    assert (found.base, found.each) == pytest.approx((line.base, line.each))


def test_a_round_without_measurements_keeps_the_line() -> None:
    line = Line(base=1, each=2)
    assert refit_line(line, {}) == line


@given(st.floats(0, 10), st.floats(0.01, 10), st.sets(st.integers(1, 256), min_size=1, max_size=5))
def test_a_round_that_confirms_the_line_changes_nothing(
    base: float, each: float, sizes: set[int]
) -> None:
    line = Line(base=base, each=each)
    assert close(refit_line(line, {size: line.at(size) for size in sizes}), line)


@pytest.mark.parametrize("size", [1, 16, 256])
@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_change_of_speed_is_learned_within_a_few_rounds(size: int, factor: float) -> None:
    """Each round halves the gap at the size that was seen, or better."""
    before = Line(base=0.01, each=0.001)
    line, target = before, before.at(size) * factor
    for number in range(1, 9):
        line = refit_line(line, {size: target})
        gap = abs(line.at(size) - target) / abs(before.at(size) - target)
        assert gap <= PRIOR_WEIGHT**number * (1 + 1e-9)


@pytest.mark.parametrize("size", [2, 16, 256])
def test_an_increase_is_followed_as_far_as_a_decrease(size: int) -> None:
    line = Line(base=0.5, each=0.1)
    up, down = (refit_line(line, {size: line.at(size) * factor}) for factor in (1.01, 0.99))
    rise, fall = up.at(size) - line.at(size), line.at(size) - down.at(size)
    assert rise == pytest.approx(fall, rel=1e-6)
    assert rise > 0


def test_after_a_line_of_zero_only_the_measurements_count() -> None:
    seen = {1.0: 3.0, 4.0: 9.0}
    assert close(refit_line(Line(base=0, each=0), seen), Line(base=1, each=2))
