"""Identities sign, and allow-lists verify signatures and refuse malformed entries."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import IdentityProblem, IdentityUnknown, SignatureRefused
from headwater.common.secagg.identity import AllowList, SigningIdentity


def test_a_signature_verifies_under_the_identity_s_line() -> None:
    ann = SigningIdentity.new("ann")
    allowed = AllowList.parse(f"# the greenhouse\n{ann.line} # ann's laptop\n\n")
    allowed.verify("ann", b"keys", ann.sign(b"keys"))


@given(st.binary(max_size=64), st.integers(0, 63), st.integers(1, 255))
def test_no_other_message_name_or_signature_verifies(message: bytes, at: int, flip: int) -> None:
    ann, bob = SigningIdentity.new("ann"), SigningIdentity.new("bob")
    allowed = AllowList.parse(f"{ann.line}\n{bob.line}")
    signature = ann.sign(message)
    changed = bytearray(signature)
    changed[at] ^= flip
    for name, text, mark in (
        ("ann", message + b"!", signature),
        ("bob", message, signature),
        ("ann", message, bytes(changed)),
        ("ann", message, b""),
        ("ann", message, None),
    ):
        with pytest.raises(SignatureRefused, match=name):
            allowed.verify(name, text, mark)
    with pytest.raises(IdentityUnknown, match="carl"):
        allowed.verify("carl", message, signature)


def test_an_identity_read_from_pem_signs_the_same() -> None:
    ann = SigningIdentity.new("ann")
    again = SigningIdentity.from_pem("ann", ann.to_pem())
    assert again.sign(b"keys") == ann.sign(b"keys")
    assert again.line == ann.line


def test_an_identity_s_repr_shows_only_its_public_key() -> None:
    ann = SigningIdentity.new("ann")
    key = serialization.load_pem_private_key(ann.to_pem(), password=None)
    secret = key.private_bytes(
        serialization.Encoding.Raw,
        serialization.PrivateFormat.Raw,
        serialization.NoEncryption(),
    )
    shown = repr(ann)
    assert ann.line in shown
    for form in (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1]):
        assert form not in shown


def test_other_keys_than_ed25519_are_refused() -> None:
    other = generate_private_key(SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for pem in (b"", b"-----BEGIN NONSENSE-----", other):
        with pytest.raises(IdentityProblem, match="ann"):
            SigningIdentity.from_pem("ann", pem)
    with pytest.raises(IdentityProblem, match="is not a valid"):
        SigningIdentity.new("ann smith")


KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann", "line 1.*1 words"),
        (f"ann {KEY} extra", "3 words"),
        ("ann notbase64!", "not base64"),
        (f"ann {base64.b64encode(bytes(31)).decode()}", "31 bytes"),
        (f"../ann {KEY}", "is not a valid"),
        (f"ann {KEY}\nann {base64.b64encode(bytes(32)).decode()}", "line 2.*ann is there twice"),
        (f"ann {KEY}\n\nbob {KEY}", "line 3.*bob has the key of ann"),
    ],
)
def test_a_malformed_line_is_named(text: str, said: str) -> None:
    with pytest.raises(IdentityProblem, match=said):
        AllowList.parse(text)
