"""Sums of groups are added in the ring: exactly the sum of one session of all devices."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headwater.common.errors import (
    HeadwaterError,
    RoundAborted,
    SessionRefused,
    SumOutOfRange,
    TooFewSurvivors,
)
from headwater.common.messages import ReadyReport
from headwater.common.secagg.protocol import WEIGHT
from headwater.server.secagg.encoding_state import check_numbers
from headwater.server.secagg.group_sums import GroupSums, sum_groups
from headwater.server.secagg.session import ReadyCohort
from headwater.server.secagg.unmask_phase import UnmaskedSum
from tests.secagg import PLAN, Cast

BOUNDS = np.full(2, 4.0, np.float32)  # three values: a block of two, and one of one
ROTATED: dict[str, Any] = {
    "ring_bits": 16,
    "rotation_seed": bytes(32),
    "bounds_digest": hashlib.sha256(BOUNDS.tobytes()).digest(),
    "rotation_bounds": BOUNDS,
}


def cohort_of(cast: Cast) -> ReadyCohort:
    ready = {n: ReadyReport(name=n, round=1, seconds=1.0) for n in cast.names}
    weights = cast.setup.planned_weights
    return ReadyCohort(
        ready=ready,
        planned_weights=weights,
        metrics=(),
        max_examples=1,
        plan_digest=PLAN,
    )


class Rounds:
    """Runs a session for each group of a cast; ``lying`` devices' sums get a false weight."""

    def __init__(self, cast: Cast, lying: frozenset[str] = frozenset()) -> None:
        self.cast, self.lying = cast, lying
        self.all_weights = tuple(cast.setup.planned_weights.values())
        self.refused: dict[str, HeadwaterError] = {}

    def run_session(self, group: ReadyCohort) -> UnmaskedSum:
        setup = self.cast.setup
        self.cast.setup = replace(
            setup, planned_weights=group.planned_weights, added_weights=self.all_weights
        )
        try:
            opened = self.cast.play().sum
        finally:
            self.cast.setup = setup
        if self.lying & set(opened.survived):
            numbers = {**opened.numbers, WEIGHT: float(2**62)}
            opened = replace(opened, numbers=numbers)
        return opened

    def sums(self, *groups: tuple[str, ...]) -> GroupSums:
        return sum_groups(
            cohort_of(self.cast),
            groups,
            run_session=self.run_session,
            refuse=self.refused.__setitem__,
        )


def halves(cast: Cast) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(cast.names[::2]), tuple(cast.names[1::2])


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_the_sum_of_groups_is_the_plain_sum_of_all_bit_for_bit(mode: str) -> None:
    cast = Cast(9, mode=mode, num_values=50)
    rounds = Rounds(cast)
    total = rounds.sums(*halves(cast)).total()
    assert list(total.survived) == cast.names
    plain_P, scalars = cast.plain_sum(cast.names, total)
    np.testing.assert_array_equal(total.vector_P, plain_P)
    assert total.numbers[WEIGHT] == scalars[0]
    check_numbers(total)
    assert not rounds.refused


def test_groups_in_a_16_bit_ring_share_encoding_and_rotation() -> None:
    cast = Cast(8, **ROTATED)
    sums = Rounds(cast).sums(*halves(cast))
    assert sums.error is None, sums.error
    one, other = (found.session.parameters for found in sums.good)
    assert (one.encoding, one.scalars) == (other.encoding, other.scalars)
    assert one.rotation_seed == other.rotation_seed
    expected = sums.good[0].vector_P + sums.good[1].vector_P
    np.testing.assert_array_equal(sums.total().vector_P, expected)


def test_a_false_sum_is_thrown_away_with_its_devices_updates() -> None:
    cast = Cast(9)
    honest, lied = halves(cast)
    rounds = Rounds(cast, lying=frozenset({lied[1]}))
    sums = rounds.sums(honest, lied)
    assert sums.false == (lied,)
    assert sums.total().survived == honest
    assert set(rounds.refused) == set(lied)
    assert all(isinstance(error, SumOutOfRange) for error in rounds.refused.values())


def test_a_round_without_a_good_sum_is_aborted_with_the_reason() -> None:
    cast = Cast(8)
    sums = Rounds(cast, lying=frozenset(cast.names)).sums(*halves(cast))
    with pytest.raises(SumOutOfRange):
        sums.total()


def test_a_group_that_opens_no_sum_costs_only_its_own_devices() -> None:
    cast = Cast(8)
    rounds = Rounds(cast)

    def run_session(group: ReadyCohort) -> UnmaskedSum:
        if "d001" in group.ready:
            raise TooFewSurvivors("d001's group has lost its devices")
        return rounds.run_session(group)

    first, second = halves(cast)
    sums = sum_groups(
        cohort_of(cast), (first, second), run_session=run_session, refuse=lambda *_: None
    )
    assert sums.aborted == (second,)
    assert isinstance(sums.error, RoundAborted)
    assert sums.total().survived == first


def test_devices_in_no_group_are_told_so() -> None:
    cast = Cast(5)
    rounds = Rounds(cast)
    assert len(rounds.sums(tuple(cast.names[:3])).total().survived) == 3
    assert set(rounds.refused) == set(cast.names[3:])
    assert all(isinstance(error, SessionRefused) for error in rounds.refused.values())
