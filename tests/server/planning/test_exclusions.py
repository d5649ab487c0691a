"""A client that made a secure session fail is excluded from the following rounds, and returns."""

from __future__ import annotations

from headwater.common.errors import ExamplesForgotten, LateUpdate, PrivacyRequired
from headwater.server.planning.exclusions import (
    FIRST_ROUNDS,
    MAX_REASON_CHARACTERS,
    exclude,
    excluded_in,
    from_json,
    owners_reasons,
    sit_out,
    to_json,
    without_owners,
)


def test_a_client_is_excluded_for_ten_rounds_and_for_twice_as_many_each_further_time() -> None:
    once = exclude({}, {"a": "it lied"}, round_number=5)
    assert set(excluded_in(once, ["a", "b"], round_number=5)) == {"a"}  # the round's next attempts
    assert set(excluded_in(once, ["a", "b"], round_number=5 + FIRST_ROUNDS)) == {"a"}
    assert excluded_in(once, ["a", "b"], round_number=6 + FIRST_ROUNDS) == {}
    twice = exclude(once, {"a": "it lied"}, round_number=30)
    assert twice["a"].through_round == 30 + 2 * FIRST_ROUNDS


def test_a_client_that_sits_out_is_back_in_the_next_round_and_at_no_fault() -> None:
    known = exclude({}, {"a": "it lied"}, round_number=1)
    known = sit_out(known, ["a", "b"], round_number=20)
    assert set(excluded_in(known, ["a", "b", "c"], round_number=20)) == {"a", "b"}
    assert excluded_in(known, ["a", "b"], round_number=21) == {}
    assert {name: one.times for name, one in known.items()} == {"a": 1, "b": 0}
    assert from_json(to_json(known)) == known


def test_exclusions_come_back_from_the_checkpoint_as_they_were() -> None:
    known = exclude({}, {"a": "it lied", "b": "so did it"}, round_number=7)
    assert from_json(to_json(known)) == known


def test_a_reason_is_no_longer_than_a_describe_request_allows() -> None:
    known = exclude({}, {"a": "x" * 1000}, round_number=1)
    assert len(excluded_in(known, ["a"], round_number=2)["a"]) == MAX_REASON_CHARACTERS


def test_an_owner_s_limit_excludes_a_client_until_it_connects_again() -> None:
    lied = exclude({}, {"a": "it lied"}, round_number=1)
    forgot = owners_reasons({"d": ExamplesForgotten("")})["d"]
    assert forgot.startswith("ExamplesForgotten: it lost the state")
    reasons = owners_reasons({"b": PrivacyRequired(""), "c": LateUpdate("")})
    assert list(reasons) == ["b"]
    known = exclude(lied, reasons, round_number=1, is_by_owner=True)
    assert set(without_owners(known, ["a"])) == {"a", "b"}
    assert set(without_owners(known, ["a", "b"])) == {"a"}
    assert set(without_owners(known)) == {"a"}
