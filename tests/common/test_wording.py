"""A number with its noun, and names in the order in which people count."""

from __future__ import annotations

import random

import pytest

from headwater.common.wording import counted, natural

ORDER = ["2", "07", "7", "10", "a", "pi", "pi2", "pi2b3", "pi2b20", "pi10", "pi10-old"]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (1200, "1,200 runs")]
)
def test_a_noun_is_plural_unless_the_number_is_one(number: int, text: str) -> None:
    assert counted(number, "run") == text


def test_names_sort_by_the_numbers_in_them() -> None:
    assert sorted(random.Random(0).sample(ORDER, len(ORDER)), key=natural) == ORDER
