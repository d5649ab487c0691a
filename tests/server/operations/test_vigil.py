"""When the operator is told for whom a round waits."""

import pytest

from headwater.server.operations.vigil import (
    FIRST_SECONDS,
    LongWaitNotice,
    duration_text,
    names_text,
)


def test_a_wait_is_told_after_five_minutes_then_after_twice_as_long_each_time() -> None:
    vigil = LongWaitNotice()
    told = [second for second in range(3600) if vigil.is_due(second)]
    assert told == [FIRST_SECONDS, 2 * FIRST_SECONDS, 4 * FIRST_SECONDS, 8 * FIRST_SECONDS]


def test_a_long_wait_that_was_not_looked_at_is_told_once() -> None:
    vigil = LongWaitNotice()
    assert [vigil.is_due(seconds) for seconds in (10_000, 10_001)] == [True, False]


def test_the_next_wait_is_told_from_the_start() -> None:
    vigil = LongWaitNotice()
    assert vigil.is_due(10_000)
    assert not vigil.is_due(1)
    assert vigil.is_due(FIRST_SECONDS)


@pytest.mark.parametrize(
    ("number", "text"), [(1, "a"), (3, "a, b, c"), (6, "a, b, c, d, e and 1 more")]
)
def test_the_first_few_are_named_and_the_rest_are_counted(number: int, text: str) -> None:
    assert names_text(list("abcdef")[:number], number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (172_800, "2 d")]
)
def test_a_length_of_time_has_one_figure(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
