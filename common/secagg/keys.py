"""The keys of a secure session, from key pairs to sealed shares.

X25519 key pairs (RFC 7748), fresh in each session; HKDF-SHA256 (RFC 5869) whose salt is the
session's digest and whose info names the purpose and both ends, so that a key serves one purpose
between two devices in one session and none other; ChaCha20-Poly1305 (RFC 8439) around the shares on
their way through the server. A device that was shown another model, roster or parameter set has
another session digest, and so other keys throughout.

What the server learns: public keys, ciphertexts and commitments. What it can guess it can check
against a commitment, but a share is as long as its secret and uniform: 256 bits are not guessed.
Whose a public key is, is not said here: in active mode the devices' identities sign them.

A byte string that is hashed or authenticated is a list of fields, each behind its length: no two
lists read the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from headwater.common.errors import BadPublicKey, SealBroken
from headwater.common.secagg.secret import Secret

KEY_BYTES = 32
SESSION_BYTES = 32
COMMITMENT_BYTES = 16
NONCE_BYTES, TAG_BYTES = 12, 16
SEAL_OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES

DOMAIN = b"headwater secure aggregation 1"

Purpose = Literal["pairwise mask", "share"]
"""What two devices agree on a key for; the key of a pairwise mask is the same from both ends."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPair:
    """An X25519 key pair; ``private`` is the 32-byte seed, which Shamir shares can bring back."""

    private: Secret
    public: bytes


def new_key_pair(random: Callable[[int], bytes] = os.urandom) -> KeyPair:
    """Make a fresh key pair; ``random`` gives the 32 bytes of its seed."""
    private = Secret(random(KEY_BYTES))
    return KeyPair(private=private, public=public_key_of(private))


def public_key_of(private: Secret) -> bytes:
    """Return the 32-byte public key: what a reconstructed private key is checked against.

    The five bits of the seed that X25519 fixes do not tell in it, so 32 seeds have one public key.
    """
    return private.made_into(X25519PrivateKey.from_private_bytes).public_key().public_bytes_raw()


def agree(
    private: Secret, peer_public: bytes, *, session: bytes, purpose: Purpose, ends: tuple[str, str]
) -> Secret:
    """Return the 32-byte key that two devices have in common for one purpose in one session.

    ``ends`` are (from, to). For a pairwise mask both orders give the same key; for shares each
    direction has its own.

    Raises:
        BadPublicKey: it is not of 32 bytes, or of low order: the result would be no secret.
    """
    try:
        peer = X25519PublicKey.from_public_bytes(peer_public)
        # Loading a key costs as much as an exchange: it is done once for all peers.
        shared = private.made_into(X25519PrivateKey.from_private_bytes).exchange(peer)
    except ValueError as error:
        raise BadPublicKey(
            f"the public key between {ends[0]} and {ends[1]} is no point that a key pair has; "
            f"{len(peer_public)} bytes of the expected {KEY_BYTES}"
        ) from error
    if purpose == "pairwise mask":
        ends = (min(ends), max(ends))
    return _derive(shared, session=session, purpose=purpose, names=ends)


def self_mask_key(seed: Secret, *, session: bytes, name: str) -> Secret:
    """Return the 32-byte key of a device's self mask, from the 32-byte seed that it shares."""
    return _derive(seed.reveal(), session=session, purpose="self mask", names=(name,))


def pairwise_sign(own: str, peer: str) -> Literal[1, -1]:
    """Return the sign with which ``own`` adds the mask that it has in common with ``peer``.

    +1 for the name that sorts first and -1 for the other, so that the two cancel.

    Raises:
        ValueError: a name with itself.
    """
    if own == peer:
        raise ValueError(f"{own} has no mask in common with itself")
    return 1 if own < peer else -1


def seal(
    key: Secret,
    share: Buffer,
    *,
    session: bytes,
    ends: tuple[str, str],
    random: Callable[[int], bytes] = os.urandom,
) -> bytes:
    """Seal a share for its holder; the session and (from, to) are authenticated beside it.

    Returns nonce, ciphertext and tag: ``SEAL_OVERHEAD_BYTES`` more than the share. The nonce is
    random although a key of ``agree`` seals one message only: a second one would then not open the
    first.
    """
    nonce = random(NONCE_BYTES)
    cipher = ChaCha20Poly1305(key.reveal())
    return nonce + cipher.encrypt(nonce, share, _fields(b"sealed", session, *ends))


def unseal(key: Secret, sealed: bytes, *, session: bytes, ends: tuple[str, str]) -> Secret:
    """Open what ``seal`` closed.

    Raises:
        SealBroken: another key, session or (from, to), or bytes that were changed or are missing.
    """
    share = bytearray(max(len(sealed) - SEAL_OVERHEAD_BYTES, 0))
    nonce, rest = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
    if len(rest) >= TAG_BYTES:
        try:
            ChaCha20Poly1305(key.reveal()).decrypt_into(
                nonce, rest, _fields(b"sealed", session, *ends), share
            )
        except InvalidTag:
            pass
        else:
            return Secret.over(share)
    raise SealBroken(
        f"the share that {ends[0]} sealed for {ends[1]} does not open ({len(sealed)} bytes): it "
        "was changed on the way, or sealed in another session"
    )


def commitment(*, tag: str, session: bytes, ends: tuple[str, str], share: Buffer) -> bytes:
    """Return SHA-256(tag, session, from, to, share)[:16], which binds a dealer to a share.

    ``tag`` says what was committed to, so that a share of one secret cannot pass as that of
    another. 128 bits: a dealer who wants two shares under one commitment has to try 2^64.
    """
    return hashlib.sha256(_fields(b"commitment", tag, session, *ends, share)).digest()[
        :COMMITMENT_BYTES
    ]


def _derive(material: Buffer, *, session: bytes, purpose: str, names: tuple[str, ...]) -> Secret:
    """HKDF-SHA256 with the session as its salt."""
    if len(session) != SESSION_BYTES:
        raise ValueError(f"a session's digest has {SESSION_BYTES} bytes, not {len(session)}")
    key = bytearray(KEY_BYTES)
    info = _fields(purpose, *names)
    HKDF(hashes.SHA256(), KEY_BYTES, salt=session, info=info).derive_into(material, key)
    return Secret.over(key)


def _fields(*fields: str | Buffer) -> bytes:
    """Join fields, each behind its length in four bytes, behind the domain."""
    encoded = [field.encode() if isinstance(field, str) else bytes(field) for field in fields]
    return b"".join(len(field).to_bytes(4, "big") + field for field in (DOMAIN, *encoded))
