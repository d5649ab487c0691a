"""The keys of a session of secure aggregation, from key pairs to sealed shares.

X25519 key pairs (RFC 7748), fresh for each session; HKDF-SHA256 (RFC 5869) salted with the session's
digest, whose info names the purpose and both ends, so that a key serves one purpose between two
devices in one session and none other; ChaCha20-Poly1305 (RFC 8439) around the shares on their way
through the server. A device that was shown another model, roster or parameter set has another
session digest, and so other keys throughout.

What the server learns: public keys, ciphertexts and commitments. The commitments are to shares of
random secrets with 256 bits of entropy each, so they cannot be found by trial. Out of scope here:
whose a public key is (the identities of active mode sign it).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from common.secret import Secret

KEY_BYTES = 32
SESSION_BYTES = 32
COMMITMENT_BYTES = 16
SEAL_OVERHEAD_BYTES = 12 + 16  # nonce and tag

Purpose = Literal["pairwise mask", "self mask", "share"]
"""What a key is for; "pairwise mask" is symmetrical in its ends, the others are not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPair:
    """An X25519 key pair; ``private`` is the 32-byte seed, which Shamir shares can bring back."""

    private: Secret
    public: bytes


def new_key_pair(random: Callable[[int], bytes] = os.urandom) -> KeyPair:
    """Make a fresh key pair."""
    raise NotImplementedError


def public_key_of(private: Secret) -> bytes:
    """Return the 32-byte public key: what a reconstructed private key is checked against."""
    raise NotImplementedError


def agree(
    private: Secret,
    peer_public: bytes,
    *,
    session: bytes,
    purpose: Purpose,
    ends: tuple[str, str],
) -> Secret:
    """Return the 32-byte key that two devices share for one purpose in one session.

    ``ends`` are (from, to). For "pairwise mask" both orders give the same key, for "share" each
    direction has its own.

    Raises:
        BadPublicKey: it is not 32 bytes, or of low order (the agreement would be known to all).
    """
    raise NotImplementedError


def self_mask_key(seed: Secret, *, session: bytes, name: str) -> Secret:
    """Return the 32-byte key of a device's self mask."""
    raise NotImplementedError


def pairwise_sign(own: str, peer: str) -> Literal[1, -1]:
    """Return the sign with which ``own`` adds the mask that it shares with ``peer``.

    +1 for the name that sorts first, -1 for the other, so that the two cancel.

    Raises:
        ValueError: a name with itself.
    """
    raise NotImplementedError


def seal(
    key: Secret,
    share: bytes | bytearray | memoryview,
    *,
    session: bytes,
    ends: tuple[str, str],
    random: Callable[[int], bytes] = os.urandom,
) -> bytes:
    """Seal a share for its holder; the session and (from, to) are authenticated beside it.

    Returns nonce, ciphertext and tag: ``SEAL_OVERHEAD_BYTES`` more than the share.
    """
    raise NotImplementedError


def unseal(key: Secret, sealed: bytes, *, session: bytes, ends: tuple[str, str]) -> Secret:
    """Open what ``seal`` closed.

    Raises:
        SealBroken: another key, session or (from, to), or bytes that were changed.
    """
    raise NotImplementedError


def commitment(
    *,
    tag: str,
    session: bytes,
    ends: tuple[str, str],
    share: bytes | bytearray | memoryview,
) -> bytes:
    """Return SHA-256(tag, session, from, to, share)[:16], which binds a dealer to a share.

    ``tag`` says what was committed to. Each field is preceded by its length, so that no two lists
    of fields read the same.
    """
    raise NotImplementedError
