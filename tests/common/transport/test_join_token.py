"""Join tokens: parsing returns the encoded token or refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import JoinTokenBroken
from headwater.common.transport.join_token import PREFIX, JoinToken

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}x", fullmatch=True)


def token(name: str = "pi", address: str = "river.example.org:8501") -> JoinToken:
    return JoinToken.new(
        address=address, fingerprint=bytes(range(32)), name=name, expires_at=1_800_000_000
    )


@given(name=NAMES, port=st.integers(1, 65_535), expires_at=st.integers(0, 2**40 - 1))
def test_an_encoded_token_is_parsed_to_itself(name: str, port: int, expires_at: int) -> None:
    made = JoinToken.new(
        address=f"[::1]:{port}", fingerprint=bytes(32), name=name, expires_at=expires_at
    )
    assert JoinToken.parse(made.encode()) == made


def test_line_breaks_in_a_token_are_ignored() -> None:
    made = token()
    text = made.encode()
    assert JoinToken.parse(f" {text[:40]}\n{text[40:]}\n") == made


@given(data=st.data())
def test_a_token_with_a_character_changed_or_missing_is_refused(data: st.DataObject) -> None:
    text = token().encode()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(
        st.sampled_from(["", "A", "z", "-", "=", "é"]).filter(lambda c: c != text[at])
    )
    with pytest.raises(JoinTokenBroken):
        JoinToken.parse(text[:at] + other + text[at + 1 :])


@given(st.text())
def test_any_other_text_is_refused_as_broken(text: str) -> None:
    with pytest.raises(JoinTokenBroken):
        JoinToken.parse(text)
    with pytest.raises(JoinTokenBroken):
        JoinToken.parse(PREFIX + text)


@pytest.mark.parametrize("name", ["", "a b", "../x", "ca", "server-key", "x" * 65])
def test_a_token_with_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(JoinTokenBroken):
        JoinToken.parse(token(name).encode())


@pytest.mark.parametrize("address", ["", "river", "river:", ":1", "river:70000"])
def test_a_token_with_an_incomplete_address_is_refused(address: str) -> None:
    with pytest.raises(JoinTokenBroken):
        JoinToken.parse(token(address=address).encode())


def test_neither_a_repr_nor_an_error_shows_the_secret() -> None:
    made = token()
    assert made.secret.hex() not in repr(made)
    assert "secret" not in repr(made)
    text = made.encode()
    with pytest.raises(JoinTokenBroken) as refusal:
        JoinToken.parse(text[:-1])
    assert text[20:40] not in str(refusal.value)


def test_each_token_has_its_own_secret_and_the_server_stores_only_a_hash() -> None:
    first, second = token(), token()
    assert first.secret != second.secret
    assert first.secret_digest != first.secret
