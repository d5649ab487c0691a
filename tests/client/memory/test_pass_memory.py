"""What is computed again of each block under a limit: the cheapest that fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.memory.activation_checkpointing import Recomputed
from headwater.client.memory.pass_memory import PassMemory, Stretch

NOTHING, CHEAP, ALL = Recomputed


def passed(
    inner: dict[int, int],
    *,
    cheap: dict[int, int] | None = None,
    seconds: dict[int, float] | None = None,
    peaks: tuple[int, ...] = (1000,),
) -> PassMemory:
    """A pass whose last block runs again first, with a peak before each that does."""
    return PassMemory(
        rest_bytes=900,
        inner_bytes=inner,
        cheap_bytes=cheap or {},
        seconds=seconds or dict.fromkeys(inner, 1.0),
        order=tuple(reversed(inner)),
        stretches=tuple(Stretch(peak_bytes=p, num_done=done) for done, p in enumerate(peaks)),
    )


# (after the forward pass, in blocks 2, 1 and 0)
PASS = passed({0: 50, 1: 50, 2: 80}, peaks=(1100, 1150, 1140, 1300))


@pytest.mark.parametrize("kept", [set(), {0, 1}, {0, 1, 2}])
def test_kept_activations_count_until_the_backward_pass_has_used_them(kept: set[int]) -> None:
    choice = dict.fromkeys(kept, NOTHING)
    assert PASS.peak_bytes(choice) == 1300  # behind the last block, as of an embedding's gradient
    early = passed({0: 50, 1: 50, 2: 80}, peaks=(1100,))
    assert early.peak_bytes(choice) == 1100 + sum(PASS.inner_bytes[block] for block in kept)


def test_cheap_outputs_are_no_part_of_what_a_block_keeps() -> None:
    one = passed({0: 50, 1: 50}, cheap={0: 20, 1: 15})
    assert one.peak_bytes({0: CHEAP, 1: NOTHING}) == 1000 + 30 + 50
    assert one.peak_bytes({0: CHEAP, 1: CHEAP}) == 1000 + 30 + 35
    assert one.peak_bytes() == one.peak_bytes({0: ALL, 1: ALL}) == 1000


def test_what_drops_the_most_is_computed_again_and_no_more_than_needed() -> None:
    one = passed({0: 50, 1: 50, 2: 80})
    assert one.cheapest(1180) == {0: NOTHING, 1: NOTHING, 2: NOTHING}
    assert one.cheapest(1179) == {0: NOTHING, 1: NOTHING, 2: ALL}
    assert one.cheapest(1099) == {0: ALL, 1: NOTHING, 2: ALL}
    assert one.cheapest(1000) == one.cheapest(10) == {0: ALL, 1: ALL, 2: ALL}


def test_cheap_outputs_come_before_whole_blocks() -> None:
    one = passed({0: 50, 1: 50, 2: 50}, cheap={0: 20, 1: 20, 2: 20})
    assert one.cheapest(1149) == {0: CHEAP, 1: NOTHING, 2: NOTHING}
    assert one.cheapest(1090) == {0: CHEAP, 1: CHEAP, 2: CHEAP}
    assert one.cheapest(1089) == {0: ALL, 1: CHEAP, 2: NOTHING}


def test_the_block_that_takes_the_least_time_for_its_bytes_is_computed_again_first() -> None:
    one = passed({0: 40, 1: 40, 2: 40}, seconds={0: 1.0, 1: 0.1, 2: 1.0})
    assert one.cheapest(1080) == {0: NOTHING, 1: ALL, 2: NOTHING}


def test_seconds_that_differ_by_a_little_count_as_equal() -> None:
    one = passed({0: 64, 1: 64, 2: 64}, seconds={0: 1.05, 1: 0.95, 2: 1.0})
    assert one.cheapest(1128) == {0: ALL, 1: NOTHING, 2: NOTHING}


def test_what_turns_out_not_to_be_needed_is_taken_back() -> None:
    one = passed({0: 10, 1: 100}, cheap={0: 10, 1: 0})
    # Cheap outputs do not suffice, and the large block alone does.
    assert one.cheapest(1010) == {0: NOTHING, 1: ALL}


def test_the_heap_has_gaps_and_cheap_outputs_save_less_there() -> None:
    one = passed({0: 50, 1: 50}, cheap={0: 20, 1: 20})
    gaps = 44  # 0.22 of the 200 that a pass takes which drops nothing
    assert one.in_heap().peak_bytes(one.nothing) == 1100 + gaps
    assert one.peak_bytes({0: CHEAP, 1: CHEAP}) == 1060
    assert one.in_heap().peak_bytes({0: CHEAP, 1: CHEAP}) == 1080 + gaps
    assert one.in_heap().peak_bytes({0: ALL, 1: NOTHING}) == 1050 + gaps


def test_the_slowdown_is_the_share_of_a_pass_that_whole_blocks_take_again() -> None:
    one = passed({0: 50, 1: 50, 2: 50}, seconds={0: 1.0, 1: 2.0, 2: 7.0})
    assert one.slowdown({0: NOTHING, 1: CHEAP, 2: NOTHING}) == 0.0
    assert one.slowdown({0: ALL, 1: ALL, 2: CHEAP}) == pytest.approx(0.1)
    assert one.slowdown(dict.fromkeys(range(3), ALL)) == pytest.approx(1 / 3)


@given(
    inner=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    share=st.floats(0, 1),
    peaks=st.lists(st.integers(1000, 1200), min_size=7, max_size=7),
    limit=st.integers(900, 2000),
)
def test_the_choice_fits_if_any_does(
    inner: list[int], share: float, peaks: list[int], limit: int
) -> None:
    blocks = dict(enumerate(inner))
    one = passed(
        blocks,
        cheap={block: int(share * size) for block, size in blocks.items()},
        peaks=tuple(peaks[: len(inner) + 1]),
    )
    assert one.peak_bytes(one.cheapest(limit)) <= max(limit, one.peak_bytes())
