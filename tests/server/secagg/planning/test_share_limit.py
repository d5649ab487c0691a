"""The limit of a client's part in a masked round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.server.secagg.planning.share_limit import (
    PLANNED_PART,
    largest_value,
    lightest,
    limited_weights,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([8, 8, 8], 8), ([100, 50, 10, 1, 1], 57), ([30, 1, 1], 1), ([7, 3], 1), ([], 1)],
)
def test_the_largest_value_is_that_of_the_table(values: list[int], expected: int) -> None:
    assert largest_value(values, max_share=0.6) == expected


@given(st.lists(st.integers(100, 2**30), min_size=3, max_size=20), st.floats(0.45, 1.0))
def test_no_value_is_more_than_its_share_and_a_larger_limit_would_be(
    values: list[int], max_share: float
) -> None:
    share = PLANNED_PART * max_share
    limit = largest_value(values, max_share=max_share)
    assert limit <= share * sum(min(value, limit) for value in values) * (1 + 1e-9)
    larger = limit + 1
    if larger <= max(values):
        assert larger > share * sum(min(value, larger) for value in values) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("values", "min_survivors", "expected"),
    [
        ([100, 50, 10, 1, 1], 1.0, [1, 1, 10, 50, 100]),
        ([100, 50, 10, 1, 1], 0.7, [1, 1, 10, 100]),
        ([100, 50, 10, 1, 1], 0.1, [1, 1, 100]),  # three are the least of any sum
        ([5, 7], 0.5, [5, 7]),
    ],
)
def test_the_lightest_that_may_be_left_are_counted_on(
    values: list[int], min_survivors: float, expected: list[int]
) -> None:
    assert lightest(values, min_survivors=min_survivors) == expected


@given(st.lists(st.integers(100, 2**30), min_size=3, max_size=20), st.floats(0.3, 1.0))
def test_no_weight_is_more_than_its_share_of_those_that_may_be_left(
    values: list[int], min_survivors: float
) -> None:
    weights = {str(at): value for at, value in enumerate(values)}
    limited = limited_weights(weights, max_share=0.6, min_survivors=min_survivors)
    for name, own in limited.items():
        others = [value for other, value in limited.items() if other != name]
        left = lightest([*others, max(own, *others)], min_survivors=min_survivors)[:-1]
        assert own <= 0.6 * (own + sum(min(value, own) for value in left)) * (1 + 1e-9)
