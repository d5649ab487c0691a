"""A session as all members with the same roster see it: members, digest, graph, signed messages.

The graph is drawn from the session's digest, which depends on the fresh keys of all members, so the
server cannot choose a device's neighbours. (With colluding devices it can generate new keys and try
again: N tries take log2 N bits off the graph's failure bounds.)

Each byte string that is hashed or signed is a list of length-prefixed fields under its own tag: no
two lists encode alike, and a signature of one kind is never valid as another kind.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headwater.common.secagg.graph import neighbours
from headwater.common.secagg.protocol import KeysReply, KeysRequest, Member, Parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionView:
    """Members sorted by name, the digest that salts every key, and the graph of neighbours."""

    parameters: Parameters
    members: Mapping[str, Member]
    digest: bytes
    graph: Mapping[str, tuple[str, ...]] | None = field(repr=False)

    def neighbours(self, name: str) -> tuple[str, ...]:
        """Return the members with whom a member shares a pairwise mask."""
        if self.graph is None:
            return tuple(other for other in self.members if other != name)
        return self.graph[name]

    def holders(self, dealer: str) -> tuple[str, ...]:
        """Return the holders of a dealer's shares; the holder at index i has those at x = i + 1.

        In a complete graph the dealer is one of its own n holders (Bonawitz et al.); in a sparse
        graph its k neighbours are the holders (Bell et al.). Holding is mutual, so these are also
        the dealers whose shares it holds itself.
        """
        return tuple(self.members) if self.graph is None else self.graph[dealer]

    def short_of_holders(self, dealers: Iterable[str], *, present: Iterable[str]) -> list[str]:
        """Return the dealers with fewer than t holders present."""
        available, threshold = frozenset(present), self.parameters.threshold
        if self.graph is None:  # all dealers have the same holders
            return list(dealers) if len(available & self.members.keys()) < threshold else []
        return [d for d in dealers if sum(h in available for h in self.graph[d]) < threshold]


def session_of(
    parameters: Parameters, members: Iterable[Member], *, model_digest: bytes
) -> SessionView:
    """Return the session of these parameters, members and model."""
    by_name = {m.name: m for m in sorted(members, key=lambda member: member.name)}
    digest = session_digest(parameters, by_name.values(), model_digest=model_digest)
    k = parameters.num_neighbours
    graph = None if k is None else _graph(tuple(by_name), k, digest)
    return SessionView(parameters=parameters, members=by_name, digest=digest, graph=graph)


@functools.lru_cache(maxsize=2)
def _graph(names: tuple[str, ...], k: int, seed: bytes) -> Mapping[str, tuple[str, ...]]:
    """Return the graph; cached, as a process that simulates many devices needs it for each."""
    return neighbours(names, num_neighbours=k, seed=seed)


def framed(*fields: str | bytes | int) -> bytes:
    """Join length-prefixed fields, so that no two lists of fields encode alike."""
    parts = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def keys_message(wanted: KeysRequest, keys: KeysReply | Member) -> bytes:
    """Return the bytes that an identity signs in phase 0."""
    return framed(
        "headwater keys",
        wanted.run,
        wanted.round,
        wanted.attempt,
        keys.name,
        keys.mask_key,
        keys.sharing_key,
        int(keys.has_aes),
        *_carried(keys),
    )


def _carried(keys: KeysReply | Member) -> tuple[int, ...]:
    """Return the carried weight; nothing if there is none, as devices that know of none sign."""
    return (keys.carried_weight,) if keys.carried_weight else ()


def survivors_digest(*, session: bytes, survived: Iterable[str], dropped: Iterable[str]) -> bytes:
    """Return the digest of a survivor set, independent of the order of names."""
    sets = (framed(*sorted(survived)), framed(*sorted(dropped)))
    return hashlib.sha256(framed("headwater survivors", session, *sets)).digest()


def survivors_message(digest: bytes) -> bytes:
    """Return the bytes that an identity signs in phase 3."""
    return framed("headwater survivors signed", digest)


def session_digest(
    parameters: Parameters, members: Iterable[Member], *, model_digest: bytes
) -> bytes:
    """Return the digest that salts every derived key, over all that the members must agree on.

    ``SHA-256(canonical parameters, SHA-256(model bytes), SHA-256(sorted roster))``: a member that
    was shown anything else derives other keys, opens no share, and its masks do not cancel.
    """
    canonical = json.dumps(
        parameters.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    entries = (
        framed(m.name, m.mask_key, m.sharing_key, m.planned_weight, int(m.has_aes), *_carried(m))
        for m in sorted(members, key=lambda member: member.name)
    )
    roster = hashlib.sha256(framed(*entries)).digest()
    return hashlib.sha256(framed("headwater session", canonical, model_digest, roster)).digest()
