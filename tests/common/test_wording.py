"""A number with its noun, durations, and names in the order in which people count."""

from __future__ import annotations

import random

import pytest

from headwater.common.wording import counted, duration_text, names_text, natural

ORDER = ["2", "07", "7", "10", "a", "pi", "pi2", "pi2b3", "pi2b20", "pi10", "pi10-old"]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (1200, "1,200 runs")]
)
def test_a_noun_is_plural_unless_the_number_is_one(number: int, text: str) -> None:
    assert counted(number, "run") == text


def test_names_sort_by_the_numbers_in_them() -> None:
    assert sorted(random.Random(0).sample(ORDER, len(ORDER)), key=natural) == ORDER


@pytest.mark.parametrize(
    ("number", "text"), [(1, "a"), (3, "a, b, c"), (6, "a, b, c, d, e and 1 more")]
)
def test_five_names_are_shown_and_the_rest_are_counted(number: int, text: str) -> None:
    assert names_text(list("abcdef")[:number], number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (172_800, "2 d")]
)
def test_a_duration_is_shown_in_its_largest_unit(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
