"""What a budget is, and how many rounds of an algorithm use it up."""

from __future__ import annotations

import pytest

from headwater.common.errors import SettingsError
from headwater.simulation.compare.budget import Budget, Cost, Resource, amount_text, parse_budget

COST: Cost = {"rounds": 10.0, "bytes": 5e6, "examples": 4000.0, "seconds": 25.0}


@pytest.mark.parametrize(
    ("text", "resource", "amount"),
    [
        ("rounds=50", "rounds", 50),
        ("bytes=20MB", "bytes", 20e6),
        ("bytes=1.5 GiB", "bytes", 1.5 * 2**30),
        ("bytes=4096", "bytes", 4096),
        ("examples=50000", "examples", 50_000),
        ("seconds=0.5", "seconds", 0.5),
    ],
)
def test_a_budget_names_a_resource_and_an_amount(
    text: str, resource: Resource, amount: float
) -> None:
    assert parse_budget(text) == Budget(resource=resource, amount=amount)


@pytest.mark.parametrize(
    "text",
    [
        *("50", "rounds", "rounds=", "rounds=0", "rounds=-3", "rounds=1.5", "rounds=many"),
        *("steps=5", "bytes=20 XB", "examples=nan", "seconds=inf", "rounds=10001"),
    ],
)
def test_any_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match="--budget: ") as refused:
        parse_budget(text)
    assert refused.value.remedy


def test_rounds_follow_from_what_a_round_of_the_search_cost() -> None:
    def rounds(resource: Resource, amount: float) -> int:
        return Budget(resource=resource, amount=amount).rounds_within(COST)

    assert rounds("rounds", 50) == 50
    assert rounds("bytes", 20e6) == 40
    assert rounds("examples", 2001) == 6  # the sixth round uses up the rest
    assert rounds("seconds", 1.0) == 1
    assert rounds("examples", 1e15) == 10_000
    assert Budget(resource="seconds", amount=9.0).rounds_within({**COST, "seconds": 0.0}) == 10_000


@pytest.mark.parametrize(("amount", "expected"), [(50, 17), (5, 3), (2, 2), (1, 1)])
def test_a_search_run_has_a_third_of_the_rounds_and_never_more_than_all(
    amount: float, expected: int
) -> None:
    assert Budget(resource="rounds", amount=amount).search_rounds == expected


def test_amounts_are_read_without_counting_digits() -> None:
    assert amount_text("rounds", 19) == "19 rounds"
    assert amount_text("examples", 12_400.0) == "12,400 examples"
    assert amount_text("bytes", 3_113_640) == "3.11 MB"
    assert amount_text("bytes", 950) == "950 B"
    assert amount_text("bytes", 123_456_789) == "123 MB"
    assert amount_text("seconds", 8.264) == "8.26 s"
    assert amount_text("seconds", 3600) == "3,600 s"
