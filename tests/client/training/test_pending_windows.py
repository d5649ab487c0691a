"""The sampler's place where two rounds of a device are pending (``--overlap``)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.flower.state_file import read_sampler
from headwater.client.training.sampler import SamplerState, window
from headwater.common.errors import PlanWithoutEarlier

NUM_EXAMPLES, QUOTA = 30, 7


class Walk:
    """A device that carries out plans, and the examples of each round that it summed."""

    def __init__(self) -> None:
        self.state = SamplerState()
        self.windows: dict[int, tuple[int, ...]] = {}

    def carry_out(self, number: int, *, counted: int | None, after: int | None = None) -> None:
        settled = self.state.settle(counted, after_round=after)
        taken = window(
            settled.next_place, quota=QUOTA, run_seed=0, name="pi", num_examples=NUM_EXAMPLES
        )
        self.windows[number] = taken.positions
        self.state = settled.pend(number, taken.after(QUOTA))
        self.restart()

    def restart(self) -> None:
        self.state = read_sampler(dataclasses.asdict(self.state))


def plain_walk(number: int) -> list[tuple[int, ...]]:
    """Return the windows of a device whose every round counts at once."""
    walk = Walk()
    for at in range(1, number + 1):
        walk.carry_out(at, counted=at - 1 or None)
    return [walk.windows[at] for at in range(1, number + 1)]


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_counted_windows_are_those_of_a_plain_walk_whatever_is_lost(losses: list[bool]) -> None:
    """Where the first of two rounds is lost, the second is dropped, and both come again."""
    walk, counted, number, kept = Walk(), None, 1, list[tuple[int, ...]]()
    walk.carry_out(1, counted=None)
    for is_lost in losses:
        walk.carry_out(number + 1, counted=counted, after=number)
        if is_lost:
            number += 2
            walk.carry_out(number, counted=counted)
        else:
            kept.append(walk.windows[number])
            counted, number = number, number + 1
    assert kept == plain_walk(len(kept))


def test_a_plan_that_comes_again_after_the_next_one_has_the_same_window() -> None:
    walk = Walk()
    walk.carry_out(1, counted=None)
    walk.carry_out(2, counted=None, after=1)
    walk.carry_out(3, counted=1, after=2)
    before = dict(walk.windows)
    walk.carry_out(2, counted=None, after=1)  # its device was killed while its update was sent
    walk.carry_out(3, counted=1, after=2)
    assert walk.windows == before


def test_a_plan_that_follows_on_one_of_which_nothing_was_summed_is_refused() -> None:
    walk = Walk()
    walk.carry_out(1, counted=None)
    with pytest.raises(PlanWithoutEarlier, match="round 2"):
        walk.carry_out(3, counted=None, after=2)
