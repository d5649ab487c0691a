"""The selection of a cohort: all clients, or a sample in turns; and the updates' weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from headwater.server.planning import cohort
from headwater.server.planning.cohort import (
    MAX_MEDIANS,
    Selection,
    Slowness,
    dataset_weights,
    in_order,
    select,
)


def sample(names: Sequence[str], *, size: int | None, seed: int, round_number: int) -> list[str]:
    """Return the names whose turn the round is."""
    turns = cohort.candidates_in_turn(names, size=size, seed=seed, round_number=round_number)
    return in_order(list(islice(turns, len(names) if size is None else size)))


NAMES = st.lists(
    st.integers(0, 30).map(str) | st.text("ab0", min_size=1, max_size=3), unique=True, min_size=1
)


@given(NAMES, st.integers(1, 40), st.integers(0, 9), st.integers(1, 50))
def test_a_cohort_has_the_asked_size_and_no_name_twice(
    names: list[str], size: int, seed: int, round_number: int
) -> None:
    invited = sample(names, size=size, seed=seed, round_number=round_number)
    assert len(invited) == len(set(invited)) == min(size, len(names))
    assert set(invited) <= set(names)


@given(NAMES, st.integers(1, 40), st.data())
def test_the_choice_does_not_depend_on_the_order_of_the_names(
    names: list[str], size: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(names))
    one = sample(names, size=size, seed=3, round_number=5)
    assert sample(shuffled, size=size, seed=3, round_number=5) == one


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 3))
def test_within_a_lap_each_is_invited_once_before_any_is_invited_twice(
    num_names: int, size: int, lap: int
) -> None:
    names = [str(n) for n in range(num_names)]
    per_lap = -(-num_names // min(size, num_names))
    invited = Counter[str]()
    for turn in range(per_lap):
        round_number = lap * per_lap + turn + 1
        invited.update(sample(names, size=size, seed=1, round_number=round_number))
        if turn < per_lap - 1:
            assert max(invited.values()) == 1
    assert set(invited) == set(names)


def test_without_a_size_all_are_invited_in_order() -> None:
    names = ["10", "9", "b", "2", "a"]
    assert sample(names, size=None, seed=0, round_number=1) == ["2", "9", "10", "a", "b"]


def test_the_caller_s_own_turns_replace_the_seeded_laps() -> None:
    turns = ["5", "1", "7", "3"]
    for round_number in (1, 2):
        found = select(
            frozenset(turns),
            size=2,
            seed=0,
            round_number=round_number,
            judge=lambda names: ([name for name in names if name != "1"], {}),
            waiting_since={},
            within_rounds=10,
            turns=turns,
        )
        assert found.names == ["5", "7"]  # "1" cannot be invited, and the next one takes its place


def test_names_with_numbers_are_in_natural_order() -> None:
    assert in_order({"pi10", "pi2", "pi1"}) == ["pi1", "pi2", "pi10"]


def test_names_of_the_same_number_have_one_order() -> None:
    one = sample(["07", "7", "007"], size=None, seed=0, round_number=1)
    assert sample(["7", "007", "07"], size=None, seed=0, round_number=1) == one


def test_seed_and_round_change_the_sample() -> None:
    names = [str(n) for n in range(100)]
    samples = {
        tuple(sample(names, size=10, seed=seed, round_number=r)) for seed in (0, 1) for r in (1, 2)
    }
    assert len(samples) == 4


# Clients that are too slow.


def invited(
    names: list[str],
    slow: Mapping[str, float],
    round_number: int,
    *,
    size: int | None = None,
    waiting_since: Mapping[str, int] | None = None,
    within: int = 10,
    needed: int = 1,
) -> Selection:
    def judge(batch: Sequence[str]) -> tuple[list[str], dict[str, Slowness]]:
        able = [name for name in batch if name not in slow]
        why = {name: f"{name} is slow" for name in batch if name in slow}
        return able, {name: Slowness(factor=slow[name], reason=why[name]) for name in why}

    return select(
        names,
        size=size,
        seed=3,
        round_number=round_number,
        judge=judge,
        waiting_since=waiting_since or {},
        within_rounds=within,
        min_clients=needed,
    )


@given(NAMES, st.none() | st.integers(1, 40), st.integers(1, 50))
def test_if_no_client_is_too_slow_the_cohort_is_the_seeded_sample(
    names: list[str], size: int | None, round_number: int
) -> None:
    found = invited(names, {}, round_number, size=size)
    assert found.names == sample(names, size=size, seed=3, round_number=round_number)
    assert found.exceptions == found.left_out == {}


@given(
    names=NAMES,
    size=st.none() | st.integers(1, 40),
    round_number=st.integers(1, 50),
    data=st.data(),
)
def test_the_next_client_in_the_order_takes_the_place_of_a_slow_one(
    names: list[str], size: int | None, round_number: int, data: st.DataObject
) -> None:
    slow = data.draw(st.sets(st.sampled_from(names)))
    found = invited(names, dict.fromkeys(slow, 2.0), round_number, size=size)
    able = set(found.names) - found.exceptions.keys()
    num_able = len(names) - len(slow)
    assert able <= set(names) - slow
    assert len(able) == min(num_able, size or len(names))
    assert set(found.exceptions) | set(found.left_out) <= slow
    assert not found.left_out.keys() & set(found.names)
    whose_turn = sample(names, size=size, seed=3, round_number=round_number)
    assert set(whose_turn) <= set(found.names) | set(found.left_out)


class Fleet:
    """Devices of which some are too slow at times, some away, over rounds."""

    def __init__(self, size: int | None, within: int) -> None:
        self.waiting_since: dict[str, int] = {}
        self.asked: dict[str, list[int]] = {}
        self.left_out: dict[str, list[int]] = {}
        self._size, self._within = size, within

    def round(self, number: int, here: list[str], slow: Mapping[str, float]) -> Selection:
        waiting = {n: since for n, since in self.waiting_since.items() if n in here}
        found = invited(
            here, slow, number, size=self._size, waiting_since=waiting, within=self._within
        )
        for name in found.names:
            self.asked.setdefault(name, []).append(number)
            self.waiting_since.pop(name, None)
        for name in found.left_out:
            self.left_out.setdefault(name, []).append(number)
            self.waiting_since.setdefault(name, number)
        return found


@given(
    num_names=st.integers(1, 12),
    size=st.none() | st.integers(1, 12),
    within=st.integers(1, 7),
    slow_in=st.lists(st.integers(0, 2**12 - 1), min_size=30, max_size=30),
)
def test_a_client_that_is_left_out_is_invited_within_so_many_rounds(
    num_names: int, size: int | None, within: int, slow_in: list[int]
) -> None:
    """Whoever else is slow meanwhile, and however large the sample and the walk are.

    A bit of ``slow_in`` is a name: to draw thirty sets of names takes most of a minute.
    """
    names = [str(n) for n in range(num_names)]
    fleet = Fleet(size, within)
    for number, bits in enumerate(slow_in, start=1):
        slow = {name: 2.0 for n, name in enumerate(names) if bits >> n & 1}
        fleet.round(number, names, slow)
    for name, rounds in fleet.left_out.items():
        for first in rounds:
            if first + within - 1 <= 30:
                assert any(first < r < first + within for r in fleet.asked.get(name, []))


@given(within=st.integers(2, 7), away=st.sets(st.integers(1, 40)))
def test_a_client_that_was_away_in_its_round_is_invited_when_it_is_back(
    within: int, away: set[int]
) -> None:
    fleet = Fleet(None, within)
    slow = {"slow": 2.0}
    for number in range(1, 41):
        here = ["fast"] if number in away else ["fast", "slow"]
        fleet.round(number, here, slow)
        since = fleet.waiting_since.get("slow")
        if number not in away and since is not None:
            assert number - since < within - 1


def test_within_one_round_no_client_is_ever_left_out() -> None:
    for number in range(1, 20):
        assert invited(["a", "b"], {"a": 9.0, "b": 9.0}, number, within=1).left_out == {}


def test_slow_clients_are_not_all_invited_in_the_same_round() -> None:
    names = [str(n) for n in range(1000)]
    fleet = Fleet(None, 10)
    slow = dict.fromkeys(names[1:], 2.0)
    counts = [len(fleet.round(number, names, slow).exceptions) for number in range(1, 21)]
    # 100 of 999 a round on the average; a binomial count's deviation is 9.5, four of them 38.
    assert all(abs(count - 99.9) <= 38 for count in counts)
    assert sum(counts) == 2 * 999


def test_an_exception_has_its_reason() -> None:
    names = ["fast", "slow"]
    found = [invited(names, {"slow": 2.0}, number, within=10) for number in range(1, 11)]
    (asked,) = [one.exceptions["slow"] for one in found if one.exceptions]
    assert asked == "one example, asked once in 10 rounds though slow is slow"
    assert all(one.left_out == {"slow": "slow is slow"} for one in found if not one.exceptions)


def test_if_too_few_are_fast_enough_the_fastest_slow_clients_are_invited() -> None:
    slow = {"a": 8.0, "b": 2.0, "c": 4.0}
    rounds = [invited(["a", "b", "c", "d"], slow, number, needed=3) for number in range(1, 11)]
    for found in rounds:
        assert len(found.names) >= 3
    plain = [one for one in rounds if "once" not in str(one.exceptions)]
    assert plain
    for found in plain:
        assert found.names == ["b", "c", "d"]
        why = "one example, as 3 devices are needed though b is slow"
        assert found.exceptions["b"] == why
        assert found.left_out == {"a": "a is slow"}


# Weights of updates.


def test_with_dataset_weighting_an_update_weighs_what_its_device_owns() -> None:
    assert dataset_weights({"a": 10, "b": 300}) == {"a": 10, "b": 300}


def test_no_client_weighs_more_than_a_thousand_median_clients() -> None:
    weights = dataset_weights({"a": 7, "b": 8, "c": 9, "liar": 2**40})
    assert weights == {"a": 7, "b": 8, "c": 9, "liar": 8 * MAX_MEDIANS}
