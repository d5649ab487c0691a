"""A secret is never printed, never pickled, and can be erased."""

from __future__ import annotations

import copy
import pickle
import signal
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.common.errors import SecretErased
from headwater.common.secagg.secret import Secret
from tests.commands import python

PLANTED = b"a planted secret of 32 bytes, ok"


@pytest.mark.parametrize("show", [repr, str, "{}".format, lambda s: repr([s]), lambda s: f"{s!r}"])
def test_printing_never_shows_the_bytes(show: Callable[[Secret], str]) -> None:
    shown = show(Secret(PLANTED))
    assert PLANTED.decode() not in shown
    assert PLANTED.hex() not in shown
    assert "Secret(...)" in shown


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_secret_is_neither_copied_nor_pickled(duplicate: Callable[[Secret], object]) -> None:
    with pytest.raises(TypeError, match="never pickled or copied"):
        duplicate(Secret(PLANTED))


def test_a_secret_does_not_convert_to_bytes() -> None:
    with pytest.raises(TypeError):
        bytes(Secret(PLANTED))  # type: ignore[call-overload]


def test_the_revealed_view_is_read_only() -> None:
    view = Secret(PLANTED).reveal()
    assert view == PLANTED
    with pytest.raises(TypeError):
        view[0] = 0


def test_a_secret_copies_the_bytes_it_is_given() -> None:
    given = bytearray(PLANTED)
    secret = Secret(given)
    given[0] = 0
    assert secret.reveal() == PLANTED


def test_erasing_clears_a_taken_buffer_and_every_view() -> None:
    buffer = bytearray(PLANTED)
    secret = Secret.take(buffer)
    view = secret.reveal()
    secret.erase()
    assert buffer == view == bytes(len(PLANTED))
    assert secret.is_erased
    assert repr(secret) == "Secret(erased)"
    secret.erase()


def test_an_erased_secret_cannot_be_used() -> None:
    secret = Secret(PLANTED)
    secret.erase()
    with pytest.raises(SecretErased):
        secret.reveal()


def test_the_cached_form_is_kept_until_the_secret_is_erased() -> None:
    secret = Secret(PLANTED)
    assert secret.cached_form(bytearray) is secret.cached_form(bytearray)
    assert secret.cached_form(bytearray) == PLANTED
    secret.erase()
    with pytest.raises(SecretErased):
        secret.cached_form(bytearray)


def test_erasing_releases_the_cached_form() -> None:
    class Key:
        """Something that can be watched."""

    secret = Secret(PLANTED)
    watched = weakref.ref(secret.cached_form(lambda _: Key()))
    assert watched() is not None
    secret.erase()
    assert watched() is None


CRASHES = """
import os, resource, sys
from headwater.common.secagg.identity import SigningIdentity
from headwater.common.secagg.secret import Secret

resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))
keep = Secret(b"a" * 32) if sys.argv[1] == "secret" else SigningIdentity.new("pi")
print(resource.getrlimit(resource.RLIMIT_CORE)[0], flush=True)
os.chdir(sys.argv[2])
os.abort()
"""


@pytest.mark.parametrize("what", ["secret", "identity"])
def test_a_process_that_holds_a_key_leaves_no_core_file(what: str, tmp_path: Path) -> None:
    done = python("-c", CRASHES, what, tmp_path, status=-signal.SIGABRT)
    assert done.stdout.strip() in ("0", "1")
    assert list(tmp_path.iterdir()) == []
