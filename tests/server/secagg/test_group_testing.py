"""Group testing over rounds names liars, never an honest device, and opens no small sum."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from headwater.server.secagg.group_testing import (
    QUIET_ROUNDS,
    Suspicion,
    after_round,
    from_json,
    groups,
    to_json,
)


def names(count: int) -> list[str]:
    return [f"d{number:03d}" for number in range(count)]


def search(
    num_devices: int,
    lies: Callable[[str, int], bool],
    *,
    least: int,
    rounds: int,
) -> dict[str, int]:
    """Run rounds in which ``lies`` says which devices lie; return who was named, and when."""
    suspicion, named = Suspicion(), dict[str, int]()
    for number in range(rounds):
        left = [name for name in names(num_devices) if name not in named]
        seed = f"{number}".encode()
        found = groups(left, suspicion, least=least, seed=seed)
        members = [name for group in found for name in group]
        assert len(set(members)) == len(members)
        assert set(members) <= set(left)
        assert all(len(group) >= min(least, len(left)) for group in found)
        is_false = [any(lies(name, number) for name in group) for group in found]
        suspicion, culprits = after_round(
            suspicion,
            good=[group for group, false in zip(found, is_false, strict=True) if not false],
            false=[group for group, false in zip(found, is_false, strict=True) if false],
        )
        named |= dict.fromkeys(culprits, number)
        assert from_json(to_json(suspicion)) == suspicion
    return named


@given(st.integers(6, 300), st.data())
def test_a_constant_liar_is_named_within_log2_n_rounds_of_its_first_lie(
    num_devices: int, data: st.DataObject
) -> None:
    liar = data.draw(st.sampled_from(names(num_devices)))
    rounds = 1 + math.ceil(math.log2(num_devices))
    named = search(num_devices, lambda name, _: name == liar, least=3, rounds=rounds)
    assert set(named) == {liar}


@given(st.integers(3, 40), st.integers(3, 12), st.data())
def test_no_honest_device_is_named_however_one_liar_behaves(
    num_devices: int, least: int, data: st.DataObject
) -> None:
    liar = data.draw(st.sampled_from(names(num_devices)))
    rounds = data.draw(st.lists(st.booleans(), min_size=1, max_size=40))
    named = search(
        num_devices,
        lambda name, number: name == liar and rounds[number],
        least=least,
        rounds=len(rounds),
    )
    assert set(named) <= {liar}


@given(st.integers(4, 40), st.integers(2, 4), st.integers(3, 20), st.data())
def test_no_honest_device_is_named_if_several_liars_always_lie(
    num_devices: int, num_liars: int, least: int, data: st.DataObject
) -> None:
    liars = data.draw(
        st.sets(st.sampled_from(names(num_devices)), min_size=num_liars, max_size=num_liars)
    )
    named = search(num_devices, lambda name, _: name in liars, least=least, rounds=30)
    assert set(named) <= liars


def test_all_of_a_few_constant_liars_are_named() -> None:
    liars = {"d001", "d017", "d033"}
    named = search(60, lambda name, _: name in liars, least=3, rounds=30)
    assert set(named) == liars


@given(st.integers(4, 30), st.data())
def test_a_liar_is_named_also_where_there_is_room_for_one_group(
    num_devices: int, data: st.DataObject
) -> None:
    least = data.draw(st.integers(max(3, num_devices // 2 + 1), num_devices - 1))
    liar = data.draw(st.sampled_from(names(num_devices)))
    named = search(num_devices, lambda name, _: name == liar, least=least, rounds=400)
    assert set(named) == {liar}


def test_no_more_devices_than_the_least_are_never_divided() -> None:
    assert search(3, lambda name, _: name == "d001", least=3, rounds=30) == {}


def test_a_liar_that_is_quiet_for_long_is_forgotten() -> None:
    suspicion, _ = after_round(Suspicion(), good=[], false=[names(8)])
    for _ in range(QUIET_ROUNDS):
        assert suspicion.suspects
        suspicion, named = after_round(suspicion, good=[names(2)], false=[])
        assert not named
    assert suspicion == Suspicion()


def test_groups_that_their_devices_refuse_grow_until_they_open() -> None:
    suspicion, _ = after_round(Suspicion(), good=[], false=[names(15)])
    own_minimum = 10
    for _ in range(4):
        found = groups(names(15), suspicion, least=3, seed=b"")
        if len(found[0]) >= own_minimum:
            break
        suspicion, _ = after_round(suspicion, good=[], false=[], aborted=found)
    assert [len(group) for group in found] == [own_minimum]
    assert suspicion.suspects == set(names(15))


def test_without_a_false_sum_all_devices_are_one_group() -> None:
    suspicion, named = after_round(Suspicion(), good=[names(8)], false=[], aborted=[])
    assert (suspicion, named) == (Suspicion(), frozenset())
    assert groups(names(8), suspicion, least=3, seed=b"") == [tuple(names(8))]
