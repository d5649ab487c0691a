"""A position in an epoch follows its examples when the data grow, shrink or are renumbered."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.growing_data.known_examples import KnownExamples
from headwater.client.growing_data.position_change import change_between, moved
from headwater.client.training.sampler import SamplerPosition, window
from headwater.common.errors import TaskError

NAME = "pi"


class Named:
    def __init__(self, names: Any, number: int | None = None) -> None:
        self.example_names = names
        self._number = len(names) if number is None else number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, position: int) -> int:
        return position


def known(names: list[str], epoch: int = 0) -> KnownExamples:
    return KnownExamples.of(Named(names), epoch=epoch)


def taken(
    place: SamplerPosition, names: list[str], quota: int
) -> tuple[list[str], SamplerPosition]:
    found = window(place, quota=quota, run_seed=3, name=NAME, num_examples=len(names))
    return [names[at] for at in found.positions], found.after(quota)


def rest_of_epoch(place: SamplerPosition, names: list[str]) -> list[str]:
    place = place.of_existing(len(names))
    return taken(place, names, place.num_left(len(names)))[0]


folders = st.lists(st.sampled_from("abcdefghijklmnop"), min_size=1, max_size=16, unique=True)


@given(folders, folders, st.integers(0, 40), st.booleans())
def test_no_example_is_used_twice_in_an_epoch_and_none_that_stays_is_missed(
    names: list[str], later: list[str], num_used: int, is_new_epoch: bool
) -> None:
    """The epoch is that in which the data were opened, or the next one, which a window began."""
    place, used_by_epoch = SamplerPosition(), dict[int, set[str]]()
    for _ in range(num_used):
        epoch = place.epoch
        found, place = taken(place, names, 1)
        used_by_epoch.setdefault(epoch, set()).update(found)
    used = used_by_epoch.get(place.epoch, set())
    opened = place.epoch if not is_new_epoch else place.epoch - 1
    before, after = known(names, opened), known(later, place.epoch)
    place_after = moved(place, before, after, run_seed=3, name=NAME)
    stayed = set(names) & set(later) - used
    joins = is_new_epoch or not used
    wanted = stayed | (set(later) - set(names) if joins else set())
    if wanted:
        assert place_after.epoch == place.epoch
        rest = rest_of_epoch(place_after, later)
        assert sorted(rest) == sorted(wanted)
    else:
        assert place_after == SamplerPosition(epoch=place.epoch + 1)
    _, next_epoch = taken(place_after, later, len(rest_of_epoch(place_after, later)))
    assert sorted(rest_of_epoch(next_epoch, later)) == sorted(later)


def test_data_that_did_not_change_leave_the_position() -> None:
    names = list("abcdefg")
    place = SamplerPosition(epoch=2, offset=5, skipped=(1, 3))
    before, after = known(names, 2), known(names, 2)
    assert before.is_same(after)
    assert moved(place, before, after, run_seed=3, name=NAME) == place


def test_joined_and_left_examples_are_counted_by_their_names() -> None:
    change = change_between(known(list("abcd")), known(list("cxbyz")))
    assert (change.num_joined, change.num_left) == (3, 2)


@pytest.mark.parametrize(("before", "after", "joined", "left"), [(3, 5, 2, 0), (5, 3, 0, 2)])
def test_examples_without_names_are_known_by_their_numbers(
    before: int, after: int, joined: int, left: int
) -> None:
    change = change_between(
        KnownExamples(epoch=0, number=before), KnownExamples(epoch=0, number=after)
    )
    assert (change.num_joined, change.num_left) == (joined, left)


@pytest.mark.parametrize("names", [["a", "b"], []])
def test_known_examples_are_read_back_as_they_were_written(names: list[str]) -> None:
    found = known(names, 4)
    read = KnownExamples.from_json(found.to_json())
    assert (read.epoch, read.is_same(found)) == (4, True)
    hashes = [hashlib.sha256(name.encode()).digest()[:8] for name in names]
    assert read.hashes is not None
    assert read.hashes.astype("<u8").tobytes() == b"".join(hashes)
    unnamed = KnownExamples(epoch=1, number=3)
    assert KnownExamples.from_json(unnamed.to_json()).is_same(unnamed)


@pytest.mark.parametrize("names", [["a", "a"], ["a"], ["a", 2], np.array(["a", "b", "c"])])
def test_names_that_name_no_example_or_two_are_refused(names: Any) -> None:
    with pytest.raises(TaskError, match="example_names"):
        KnownExamples.of(Named(names, 2), epoch=0)
