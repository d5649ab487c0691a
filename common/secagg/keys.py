"""The keys of a secure session: key pairs, key agreement, sealed shares and commitments.

X25519 key pairs (RFC 7748), fresh in each session. HKDF-SHA256 (RFC 5869), whose salt is the
session's digest and whose info names the purpose and both ends, so that a key has one purpose
between two devices in one session. ChaCha20-Poly1305 (RFC 8439) around the shares on their way
through the server. A device that was shown another model, roster or parameter set has another
session digest, and therefore other keys.

What the server learns: public keys, ciphertexts and commitments. It can check a guess against a
commitment, but a share is uniform and as long as its secret: 256 bits cannot be guessed. This
module does not say whose a public key is; in active mode the devices' identities sign them.

A byte string that is hashed or authenticated is a list of length-prefixed fields: no two lists
encode alike.
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
"""The purpose of an agreed key; a pairwise mask's key is the same from both ends."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPair:
    """An X25519 key pair; ``private`` is the 32-byte seed that Shamir shares can reconstruct."""

    private: Secret
    public: bytes


def new_key_pair(random: Callable[[int], bytes] = os.urandom) -> KeyPair:
    """Generate a fresh key pair; ``random`` gives the 32 bytes of its seed."""
    private = Secret(random(KEY_BYTES))
    return KeyPair(private=private, public=public_key_of(private))


def public_key_of(private: Secret) -> bytes:
    """Return the 32-byte public key, against which a reconstructed private key is checked.

    X25519 fixes five bits of the seed, so 32 seeds have the same public key.
    """
    return private.cached_form(X25519PrivateKey.from_private_bytes).public_key().public_bytes_raw()


def agree(
    private: Secret, peer_public: bytes, *, session: bytes, purpose: Purpose, ends: tuple[str, str]
) -> Secret:
    """Return the 32-byte key that two devices share for one purpose in one session.

    ``ends`` are (from, to). For a pairwise mask both orders give the same key; for shares each
    direction has its own.

    Raises:
        BadPublicKey: not 32 bytes, or of low order, so that the result would be no secret.
    """
    try:
        peer = X25519PublicKey.from_public_bytes(peer_public)
        # Loading a key costs as much as an exchange, so it is loaded once for all peers.
        shared = private.cached_form(X25519PrivateKey.from_private_bytes).exchange(peer)
    except ValueError as error:
        raise BadPublicKey(
            f"the public key between {ends[0]} and {ends[1]} is invalid: {len(peer_public)} bytes, "
            f"expected {KEY_BYTES}, or of low order"
        ) from error
    if purpose == "pairwise mask":
        ends = (min(ends), max(ends))
    return _derive(shared, session=session, purpose=purpose, names=ends)


def self_mask_key(seed: Secret, *, session: bytes, name: str) -> Secret:
    """Return the 32-byte key of a device's self mask, derived from its shared 32-byte seed."""
    return _derive(seed.reveal(), session=session, purpose="self mask", names=(name,))


def pairwise_sign(own: str, peer: str) -> Literal[1, -1]:
    """Return the sign with which ``own`` adds its pairwise mask with ``peer``.

    +1 for the name that sorts first and -1 for the other, so that the two cancel.

    Raises:
        ValueError: ``own`` and ``peer`` are equal.
    """
    if own == peer:
        raise ValueError(f"{own} has no pairwise mask with itself")
    return 1 if own < peer else -1


def seal(
    key: Secret,
    share: Buffer,
    *,
    session: bytes,
    ends: tuple[str, str],
    random: Callable[[int], bytes] = os.urandom,
) -> bytes:
    """Seal a share for its holder; session and (from, to) are authenticated with it.

    Returns nonce, ciphertext and tag: ``SEAL_OVERHEAD_BYTES`` more than the share. The nonce is
    random although a key of ``agree`` should seal only one message: a second message would
    otherwise reveal the first.
    """
    nonce = random(NONCE_BYTES)
    cipher = ChaCha20Poly1305(key.reveal())
    return nonce + cipher.encrypt(nonce, share, _fields(b"sealed", session, *ends))


def unseal(key: Secret, sealed: bytes, *, session: bytes, ends: tuple[str, str]) -> Secret:
    """Open a sealed share.

    Raises:
        SealBroken: another key, session or (from, to), or changed or missing bytes.
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
            return Secret.take(share)
    raise SealBroken(
        f"the share that {ends[0]} sealed for {ends[1]} does not open ({len(sealed)} bytes): it "
        "was changed in transit, or sealed in another session"
    )


def commitment(*, tag: str, session: bytes, ends: tuple[str, str], share: Buffer) -> bytes:
    """Return SHA-256(tag, session, from, to, share)[:16], which binds a dealer to a share.

    ``tag`` names the kind of value, so that a share of one secret cannot pass as a share of
    another. 128 bits: a dealer that wants two shares with one commitment must try 2^64.
    """
    return hashlib.sha256(_fields(b"commitment", tag, session, *ends, share)).digest()[
        :COMMITMENT_BYTES
    ]


def _derive(material: Buffer, *, session: bytes, purpose: str, names: tuple[str, ...]) -> Secret:
    """Derive a key by HKDF-SHA256 with the session as salt."""
    if len(session) != SESSION_BYTES:
        raise ValueError(f"a session's digest has {SESSION_BYTES} bytes, not {len(session)}")
    key = bytearray(KEY_BYTES)
    info = _fields(purpose, *names)
    HKDF(hashes.SHA256(), KEY_BYTES, salt=session, info=info).derive_into(material, key)
    return Secret.take(key)


def _fields(*fields: str | Buffer) -> bytes:
    """Join fields after the domain, each with a four-byte length prefix."""
    encoded = [field.encode() if isinstance(field, str) else bytes(field) for field in fields]
    return b"".join(len(field).to_bytes(4, "big") + field for field in (DOMAIN, *encoded))
