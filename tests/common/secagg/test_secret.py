"""What a secret does not do: show itself, travel, or outlive its session."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable

import pytest

from headwater.common.errors import SecretErased
from headwater.common.secagg.secret import Secret

PLANTED = b"a planted secret of 32 bytes, ok"


@pytest.mark.parametrize("show", [repr, str, "{}".format, lambda s: repr([s]), lambda s: f"{s!r}"])
def test_no_way_of_printing_shows_the_bytes(show: Callable[[Secret], str]) -> None:
    shown = show(Secret(PLANTED))
    assert PLANTED.decode() not in shown
    assert PLANTED.hex() not in shown
    assert "Secret(...)" in shown


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_neither_copied_nor_pickled(duplicate: Callable[[Secret], object]) -> None:
    with pytest.raises(TypeError, match="never pickled or copied"):
        duplicate(Secret(PLANTED))


def test_it_does_not_turn_into_bytes_by_itself() -> None:
    with pytest.raises(TypeError):
        bytes(Secret(PLANTED))  # type: ignore[call-overload]


def test_it_is_revealed_read_only() -> None:
    view = Secret(PLANTED).reveal()
    assert view == PLANTED
    with pytest.raises(TypeError):
        view[0] = 0


def test_it_keeps_bytes_of_its_own() -> None:
    given = bytearray(PLANTED)
    secret = Secret(given)
    given[0] = 0
    assert secret.reveal() == PLANTED


def test_erasing_clears_the_bytes_that_were_taken_over_and_every_view() -> None:
    buffer = bytearray(PLANTED)
    secret = Secret.over(buffer)
    view = secret.reveal()
    secret.erase()
    assert buffer == view == bytes(len(PLANTED))
    assert secret.is_erased
    assert repr(secret) == "Secret(erased)"
    secret.erase()


def test_an_erased_secret_is_not_used_again() -> None:
    secret = Secret(PLANTED)
    secret.erase()
    with pytest.raises(SecretErased):
        secret.reveal()


def test_what_it_is_made_into_is_kept_until_it_is_erased() -> None:
    secret = Secret(PLANTED)
    assert secret.made_into(bytearray) is secret.made_into(bytearray)
    assert secret.made_into(bytearray) == PLANTED
    secret.erase()
    with pytest.raises(SecretErased):
        secret.made_into(bytearray)


def test_erasing_lets_what_it_was_made_into_go() -> None:
    class Key:
        """Something that can be watched."""

    secret = Secret(PLANTED)
    watched = weakref.ref(secret.made_into(lambda _: Key()))
    assert watched() is not None
    secret.erase()
    assert watched() is None
