"""The keys of a session: published test vectors, and one purpose per key."""

from __future__ import annotations

import hashlib
import hmac
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import BadPublicKey, SealBroken
from headwater.common.secagg.keys import (
    DOMAIN,
    SEAL_OVERHEAD_BYTES,
    Purpose,
    agree,
    commitment,
    new_key_pair,
    pairwise_sign,
    public_key_of,
    seal,
    self_mask_key,
    unseal,
)
from headwater.common.secagg.secret import Secret

# RFC 7748, section 6.1.
ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
ALICE_PUBLIC = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
BOB_PUBLIC = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
SHARED = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")

SESSION, OTHER_SESSION = bytes(range(32)), bytes(range(1, 33))
P = 2**255 - 19


def fields(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in (DOMAIN, *parts))


def hkdf_sha256(material: bytes, *, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for 32 bytes: extract, then one block of expand."""
    extracted = hmac.digest(salt, material, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def key_of(
    private: bytes = ALICE,
    public: bytes = BOB_PUBLIC,
    *,
    session: bytes = SESSION,
    purpose: Purpose = "share",
    ends: tuple[str, str] = ("alice", "bob"),
) -> bytes:
    key = agree(Secret(private), public, session=session, purpose=purpose, ends=ends)
    return bytes(key.reveal())


def test_public_keys_are_those_of_rfc_7748() -> None:
    assert public_key_of(Secret(ALICE)) == ALICE_PUBLIC
    assert new_key_pair(lambda _: BOB).public == BOB_PUBLIC


def test_the_key_is_hkdf_of_the_shared_secret_of_rfc_7748() -> None:
    info = fields(b"share", b"alice", b"bob")
    assert key_of() == hkdf_sha256(SHARED, salt=SESSION, info=info)


def test_both_devices_derive_the_same_key() -> None:
    for purpose in ("share", "pairwise mask"):
        assert key_of(ALICE, BOB_PUBLIC, purpose=purpose) == key_of(
            BOB, ALICE_PUBLIC, purpose=purpose
        )


def test_the_key_of_a_pairwise_mask_is_the_same_from_both_ends() -> None:
    assert key_of(purpose="pairwise mask", ends=("alice", "bob")) == key_of(
        purpose="pairwise mask", ends=("bob", "alice")
    )


def test_every_purpose_session_direction_and_pair_has_its_own_key() -> None:
    keys = [
        key_of(),
        key_of(purpose="pairwise mask"),
        key_of(session=OTHER_SESSION),
        key_of(ends=("bob", "alice")),
        key_of(ends=("alice", "carol")),
        key_of(ends=("alic", "ebob")),
        key_of(private=bytes(reversed(ALICE))),
        bytes(self_mask_key(Secret(SHARED), session=SESSION, name="alice").reveal()),
        bytes(self_mask_key(Secret(SHARED), session=SESSION, name="bob").reveal()),
        bytes(self_mask_key(Secret(SHARED), session=OTHER_SESSION, name="bob").reveal()),
    ]
    assert len(set(keys)) == len(keys)


def test_fresh_key_pairs_differ() -> None:
    assert len({new_key_pair().public for _ in range(20)}) == 20


@pytest.mark.parametrize(
    "public",
    [
        b"",
        bytes(31),
        bytes(33),
        # The points of order 1, 2, 4 and 8 (RFC 7748, section 7): the result is zero for any key.
        *(u.to_bytes(32, "little") for u in (0, 1, P - 1, P, P + 1)),
        bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
        bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    ],
)
def test_public_keys_of_low_order_or_wrong_length_are_refused(public: bytes) -> None:
    with pytest.raises(BadPublicKey, match="alice and bob"):
        key_of(public=public)


def test_a_session_digest_has_32_bytes() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        key_of(session=b"1")


@given(st.text(max_size=5), st.text(max_size=5))
def test_the_two_ends_of_a_pairwise_mask_have_opposite_signs(own: str, peer: str) -> None:
    if own == peer:
        with pytest.raises(ValueError, match="itself"):
            pairwise_sign(own, peer)
    else:
        assert pairwise_sign(own, peer) + pairwise_sign(peer, own) == 0


@given(st.binary(max_size=100))
def test_a_sealed_share_opens_to_itself(share: bytes) -> None:
    key = Secret(ALICE)
    sealed = seal(key, share, session=SESSION, ends=("a", "b"))
    assert len(sealed) == len(share) + SEAL_OVERHEAD_BYTES
    assert unseal(key, sealed, session=SESSION, ends=("a", "b")).reveal() == share


def test_a_share_sealed_for_another_purpose_does_not_open() -> None:
    key, ends = Secret(ALICE), ("a", "b")
    sealed = seal(key, b"share", session=SESSION, ends=ends)
    for other_key, session, other_ends in (
        (Secret(BOB), SESSION, ends),
        (key, OTHER_SESSION, ends),
        (key, SESSION, ("b", "a")),
        (key, SESSION, ("a", "")),
    ):
        with pytest.raises(SealBroken, match="does not open"):
            unseal(other_key, sealed, session=session, ends=other_ends)


def test_a_changed_or_truncated_share_does_not_open() -> None:
    key = Secret(ALICE)
    sealed = seal(key, b"share", session=SESSION, ends=("a", "b"))
    changed = [
        sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in range(len(sealed))
    ]
    for wrong in (*changed, *(sealed[:n] for n in range(len(sealed))), sealed + b"\x00"):
        with pytest.raises(SealBroken):
            unseal(key, wrong, session=SESSION, ends=("a", "b"))


def test_two_seals_of_one_share_differ() -> None:
    key = Secret(ALICE)
    sealed = {seal(key, b"share", session=SESSION, ends=("a", "b")) for _ in range(20)}
    assert len(sealed) == 20


def test_a_commitment_is_the_digest_of_the_specification() -> None:
    found = commitment(tag="seed", session=SESSION, ends=("a", "b"), share=b"share")
    expected = fields(b"commitment", b"seed", SESSION, b"a", b"b", b"share")
    assert found == hashlib.sha256(expected).digest()[:16]


def test_no_two_lists_of_fields_have_one_commitment() -> None:
    parts = ("", "a", "aa")
    found = [
        commitment(tag=tag, session=session, ends=(dealer, holder), share=share.encode())
        for tag, dealer, holder, share in itertools.product(parts, repeat=4)
        for session in (b"", SESSION)
    ]
    assert len(set(found)) == len(found)


def test_a_key_pair_s_repr_shows_only_its_public_half() -> None:
    shown = repr(new_key_pair(lambda _: ALICE))
    assert repr(ALICE_PUBLIC) in shown
    assert repr(ALICE)[2:-1] not in shown
    assert ALICE.hex() not in shown
