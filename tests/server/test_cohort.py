"""Who is invited: everybody, or a sample in which each has its turn."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.cohort import select

NAMES = st.lists(
    st.integers(0, 30).map(str) | st.text("ab0", min_size=1, max_size=3), unique=True, min_size=1
)


@given(NAMES, st.integers(1, 40), st.integers(0, 9), st.integers(1, 50))
def test_a_cohort_has_the_asked_size_and_no_name_twice(
    names: list[str], size: int, seed: int, round_number: int
) -> None:
    invited = select(names, size=size, seed=seed, round_number=round_number)
    assert len(invited) == len(set(invited)) == min(size, len(names))
    assert set(invited) <= set(names)


@given(NAMES, st.integers(1, 40), st.data())
def test_the_choice_does_not_depend_on_the_order_of_the_names(
    names: list[str], size: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(names))
    one = select(names, size=size, seed=3, round_number=5)
    assert select(shuffled, size=size, seed=3, round_number=5) == one


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 3))
def test_within_a_lap_each_is_invited_once_before_any_is_invited_twice(
    num_names: int, size: int, lap: int
) -> None:
    names = [str(n) for n in range(num_names)]
    per_lap = -(-num_names // min(size, num_names))
    invited = Counter[str]()
    for turn in range(per_lap):
        round_number = lap * per_lap + turn + 1
        invited.update(select(names, size=size, seed=1, round_number=round_number))
        if turn < per_lap - 1:
            assert max(invited.values()) == 1
    assert set(invited) == set(names)


def test_without_a_size_all_are_invited_in_order() -> None:
    names = ["10", "9", "b", "2", "a"]
    assert select(names, size=None, seed=0, round_number=1) == ["2", "9", "10", "a", "b"]


def test_names_of_the_same_number_have_one_order() -> None:
    one = select(["07", "7", "007"], size=None, seed=0, round_number=1)
    assert select(["7", "007", "07"], size=None, seed=0, round_number=1) == one


def test_seed_and_round_change_the_sample() -> None:
    names = [str(n) for n in range(100)]
    samples = {
        tuple(select(names, size=10, seed=seed, round_number=r)) for seed in (0, 1) for r in (1, 2)
    }
    assert len(samples) == 4
