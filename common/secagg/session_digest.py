"""What members of a session hash and sign: the session itself, their keys, the survivor set.

Every byte string here is a list of fields, each behind its length, under a tag of its own: no two
lists read the same, and no signature can be taken for one of another kind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from headwater.common.secagg.protocol import KeysAdvertised, KeysWanted, Member, Parameters


def framed(*fields: str | bytes | int) -> bytes:
    """Join fields, each behind its length, so that no two lists of fields read the same."""
    parts = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def keys_message(wanted: KeysWanted, keys: KeysAdvertised | Member) -> bytes:
    """Return what an identity signs in phase 0."""
    return framed(
        "headwater keys",
        wanted.run,
        wanted.round,
        wanted.attempt,
        keys.name,
        keys.mask_key,
        keys.sharing_key,
        int(keys.has_aes),
    )


def survivors_digest(*, session: bytes, survived: Iterable[str], dropped: Iterable[str]) -> bytes:
    """Return the digest of a survivor set, whatever the order of the names."""
    sets = (framed(*sorted(survived)), framed(*sorted(dropped)))
    return hashlib.sha256(framed("headwater survivors", session, *sets)).digest()


def survivors_message(digest: bytes) -> bytes:
    """Return what an identity signs in phase 3."""
    return framed("headwater survivors signed", digest)


def session_digest(
    parameters: Parameters, members: Iterable[Member], *, model_digest: bytes
) -> bytes:
    """Return the digest that salts every derived key, from all that the members must agree on.

    ``SHA-256(canonical parameters, SHA-256(model bytes), SHA-256(sorted roster))``: who was shown
    anything else derives other keys, opens no share, and its masks do not cancel.
    """
    canonical = json.dumps(
        parameters.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    entries = (
        framed(m.name, m.mask_key, m.sharing_key, m.planned_weight, int(m.has_aes))
        for m in sorted(members, key=lambda member: member.name)
    )
    roster = hashlib.sha256(framed(*entries)).digest()
    return hashlib.sha256(framed("headwater session", canonical, model_digest, roster)).digest()
