"""The pieces of a round cover it once, are about equal in work, and leave each worker its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.training.sampler import SamplerPosition, SamplerState
from headwater.common.messages import Plan, Step, UpdateReport
from headwater.simulation.compute.orders import plain_report, report_of
from headwater.simulation.compute.worker_pool import RoundPieces
from headwater.simulation.fleet.devices import ClientPlan
from headwater.simulation.fleet.position_columns import PositionColumns

MANY = 1 << 30


def clients_of(quotas: Sequence[int]) -> list[ClientPlan]:
    return [
        ClientPlan(
            str(part),
            part,
            {
                str(part): Plan(
                    round=1, run_seed=0, model_version=0, quota=quota, micro_batch_size=1
                )
            },
        )
        for part, quota in enumerate(quotas)
    ]


@given(
    st.lists(st.integers(1, 50), max_size=40),
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(0, 200),
)
def test_pieces_hold_each_device_once_and_are_in_order(
    quotas: list[int], num_workers: int, most: int, least_work: float
) -> None:
    pieces = RoundPieces(clients_of(quotas), num_workers, least_work=least_work)
    found: list[int] = []
    turn = 0
    while piece := pieces.take(turn % num_workers, end=MANY, most=most):
        numbers = [at for at, _ in piece]
        assert len(numbers) <= most
        assert numbers == sorted(numbers)
        found += numbers
        turn += 1
    assert sorted(found) == list(range(len(quotas)))


def test_pieces_shrink_so_that_two_workers_finish_together() -> None:
    pieces = RoundPieces(clients_of([3] * 64), 2)
    sizes: list[int] = []
    while piece := pieces.take(len(sizes) % 2, end=MANY, most=64):
        sizes.append(len(piece))
    assert sizes[0] == 64 // 4
    assert sizes[-2:] == [1, 1]


def test_a_worker_takes_its_own_devices_first_then_those_of_another() -> None:
    pieces = RoundPieces(clients_of([1] * 4), 2)
    taken = [[at for at, _ in pieces.take(0, end=MANY, most=2)] for _ in range(2)]
    assert {at % 2 for at in taken[0]} == {0}
    taken += [[at for at, _ in pieces.take(0, end=MANY, most=2)] for _ in range(3)]
    assert sorted(at for piece in taken for at in piece) == [0, 1, 2, 3]


def test_devices_without_a_slot_wait() -> None:
    pieces = RoundPieces(clients_of([1] * 6), 1)
    assert [at for at, _ in pieces.take(0, end=1, most=6)] == [0]
    assert pieces.take(0, end=1, most=6) == []


def test_a_device_that_is_a_piece_by_itself_starts_first() -> None:
    pieces = RoundPieces(clients_of([1, 1, 9, 1]), 1)
    assert [at for at, _ in pieces.take(0, end=MANY, most=4)] == [2]


def test_a_short_device_keeps_its_place_so_that_those_behind_it_need_not_wait() -> None:
    pieces = RoundPieces(clients_of([2, 1, *[2] * 10]), 1)
    assert [at for at, _ in pieces.take(0, end=MANY, most=12)] == [0, 1, 2, 3, 4, 5, 6]


def test_no_piece_but_the_last_is_shorter_than_the_least_work() -> None:
    pieces = RoundPieces(clients_of([3] * 64), 2, least_work=30)
    sizes: list[int] = []
    while piece := pieces.take(len(sizes) % 2, end=MANY, most=64):
        sizes.append(len(piece))
    assert sizes == [16, 12, 10, 10, 10, 6]


def test_the_last_pieces_are_about_one_for_each_worker() -> None:
    pieces = RoundPieces(clients_of([10] * 8), 2, least_work=15)
    assert not pieces.are_last
    for worker in (0, 1):
        pieces.take(worker, end=MANY, most=8)
    assert not pieces.are_last  # 40 examples
    pieces.take(0, end=MANY, most=8)
    assert pieces.are_last


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_report_made_plain_is_the_same_report_again(num_steps: int) -> None:
    step = Step(
        num_examples=2,
        weight=3,
        loss=0.5,
        gradient_norm=None,
        seconds=1,
        peak_bytes=7,
        size=2.5,  # of examples that differ in length
    )
    report = UpdateReport(
        name="a",
        round=1,
        num_examples=4,
        weight=6,
        loss_sum=1.5,
        metric_sums={"right": 2.0},
        micro_batch_size=2,
        seconds=2.0,
        steps=(step,) * num_steps,
        reason="quota",
    )
    assert report_of(plain_report(report)) == report


def test_states_stored_elsewhere_are_those_of_each_device() -> None:
    here, there = PositionColumns(4), PositionColumns(4)
    for part in (1, 3):
        place = SamplerPosition(epoch=part, offset=2, skipped=(0,) * part)
        after = SamplerPosition(epoch=part, offset=5)
        here[part] = SamplerState(
            place=place, pending_round=part, pending_place=after, settled_round=None
        )
    parts = np.array([3, 1])
    there.store(parts, here.states(parts))
    assert [there[part] for part in range(4)] == [here[part] for part in range(4)]
    assert [part for part, _ in there.to_plain()] == [1, 3]
