"""Secure aggregation as both sides agree on it: phases, parameters, thresholds and messages.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
figures 1 and 4: every device adds a self mask, and with each neighbour a pairwise mask that cancels
in the sum; shares of the seeds let the others take off what a dropout leaves behind. Above
``MAX_COMPLETE`` members the neighbours are those of a k-regular graph (Bell et al., "Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020, algorithm 2).

==============  ============================  ===================================================
phase           the server asks               a device answers
==============  ============================  ===================================================
advertise_keys  ``KeysRequest``                ``KeysReply``: two fresh X25519 keys, signed
share_keys      ``Roster``: U1                ``SharesReply``: sealed shares and commitments
check_shares    ``CheckRequest``           ``CheckReply``: whose shares are bad
masked_update   ``MaskRequest``: U2            ``MaskReply``, and the masked vector beside it
consistency     ``SurvivorsRequest``: U3         ``SurvivorsReply`` (active mode only)
unmask          ``UnmaskRequest``: U3, U2-U3   ``UnmaskReply``: one share for each, of one kind
==============  ============================  ===================================================

``check_shares`` is not in the papers: bad shares are found before anybody has masked, and whoever
leaves until then costs nothing. Training is over before a session opens, and no head carries a
weight, a loss or a norm: those are further masked numbers.

What the server learns, and against whom the protocol stands: docs/security.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from headwater.common.messages import Name, Natural, WireMessage
from headwater.common.secagg.fixed_point import Encoding
from headwater.common.secagg.graph import Mode, ceil_fraction
from headwater.common.secagg.keys import (
    COMMITMENT_BYTES,
    KEY_BYTES,
    SEAL_OVERHEAD_BYTES,
    SESSION_BYTES,
)
from headwater.common.secagg.masking import Cipher
from headwater.common.secagg.scalars import Scalar
from headwater.common.secagg.shamir import MAX_HOLDERS

MAX_COMPLETE = 64
"""Members up to which the server makes everybody everybody's neighbour."""

LEAST_MEMBERS = 3
"""Of a sum of two, each of the two can subtract its own update."""

SEED_BYTES = KEY_BYTES
MASK_KEY_SHARE, SELF_SEED_SHARE, SELF_SEED = "mask key share", "self seed share", "self seed"
"""What a commitment is to."""

WEIGHT, NUM_CLIPPED = "weight", "num_clipped"
"""The masked numbers that every session has; others are the caller's."""

RunId = Annotated[int, Field(ge=0, lt=2**64)]
Key = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Digest = Annotated[bytes, Field(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Signature = Annotated[bytes, Field(min_length=64, max_length=64)]
Commitment = Annotated[bytes, Field(min_length=COMMITMENT_BYTES, max_length=COMMITMENT_BYTES)]
SEALED_BYTES = 2 * SEED_BYTES + SEAL_OVERHEAD_BYTES
Sealed = Annotated[bytes, Field(min_length=SEALED_BYTES, max_length=SEALED_BYTES, repr=False)]
Share = Annotated[bytes, Field(min_length=SEED_BYTES, max_length=SEED_BYTES)]
Weight = Annotated[int, Field(ge=1, le=2**53)]
Holders = Annotated[int, Field(ge=1, le=MAX_HOLDERS)]
MAX_SCALARS = 64


class SecureMessage(WireMessage):
    """A head of secure aggregation: bytes travel as base64, and no error quotes what it holds."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        hide_input_in_errors=True,
    )


@dataclass(frozen=True, order=True, slots=True)
class SessionNumber:
    """Which session of a run: strictly increasing, and persisted by the server before it sends."""

    round: int
    attempt: int

    def __str__(self) -> str:
        return f"round {self.round}, attempt {self.attempt}"


def next_number(last: SessionNumber | None, *, round_number: int) -> SessionNumber:
    """Return the number of the next session: a further attempt if the round had one before."""
    if last is None or last.round < round_number:
        return SessionNumber(round_number, 1)
    return SessionNumber(last.round, last.attempt + 1)


class Parameters(SecureMessage):
    """What the server chose for a session; every device holds it against its own floor."""

    run: RunId
    round: Natural
    attempt: Natural
    mode: Mode
    threshold: Holders
    num_neighbours: Holders | None = Field(None, description="not set: the complete graph")
    cipher: Cipher = "chacha20"
    num_values: Natural = Field(description="P, the coordinates of the vector")
    encoding: Encoding
    scalars: Annotated[tuple[Scalar, ...], Field(max_length=MAX_SCALARS)]
    rotation_seed: Digest | None = Field(None, description="of a 16-bit ring's rotation")
    bounds_digest: Digest | None = Field(None, description="of that rotation's block bounds")

    @property
    def number(self) -> SessionNumber:
        """Which session of the run this is."""
        return SessionNumber(self.round, self.attempt)


class Member(SecureMessage):
    """A device's entry in the roster."""

    name: Name
    mask_key: Key
    sharing_key: Key
    planned_weight: Weight = Field(description="the largest weight that its plan allows")
    has_aes: bool = False
    signature: Signature | None = Field(None, repr=False)


class KeysRequest(SecureMessage):
    """Phase 0, server: a session opens."""

    run: RunId
    round: Natural
    attempt: Natural
    mode: Mode

    @property
    def number(self) -> SessionNumber:
        """Which session of the run this is."""
        return SessionNumber(self.round, self.attempt)


class KeysReply(SecureMessage):
    """Phase 0, device: two fresh public keys, in active mode signed by its identity."""

    name: Name
    mask_key: Key
    sharing_key: Key
    has_aes: bool = False
    signature: Signature | None = Field(None, repr=False)


class Roster(SecureMessage):
    """Phase 1, server: U1 and the parameters; the session's digest is made from it."""

    parameters: Parameters
    members: tuple[Member, ...]


class DealtShare(SecureMessage):
    """A mask key's share and a self seed's, sealed to their holder, and commitments to both."""

    dealer: Name
    holder: Name
    sealed: Sealed
    key_commitment: Commitment
    seed_commitment: Commitment


class SharesReply(SecureMessage):
    """Phase 1, device: one share for each of its holders."""

    name: Name
    session: Digest
    seed_commitment: Commitment = Field(description="to the self seed itself")
    shares: Annotated[tuple[DealtShare, ...], Field(max_length=MAX_HOLDERS)]


class CheckRequest(SecureMessage):
    """Between the phases, server: what was dealt to one device."""

    shares: Annotated[tuple[DealtShare, ...], Field(max_length=MAX_HOLDERS)]


class CheckReply(SecureMessage):
    """Between the phases, device: whose shares do not open, or are not what was committed to."""

    name: Name
    bad_dealers: Annotated[tuple[Name, ...], Field(max_length=MAX_HOLDERS)] = ()


class MaskRequest(SecureMessage):
    """Phase 2, server: U2, within which the pairwise masks run."""

    members: tuple[Name, ...]


class MaskReply(SecureMessage):
    """Phase 2, device: beside the masked vector, its masked numbers (little-endian uint64)."""

    name: Name
    session: Digest
    scalars: Annotated[bytes, Field(max_length=8 * MAX_SCALARS, repr=False)]


class SurvivorsRequest(SecureMessage):
    """Phase 3, server: U3, and those of U2 that are not in it."""

    survived: tuple[Name, ...]
    dropped: tuple[Name, ...]


class SurvivorsReply(SecureMessage):
    """Phase 3, device: its signature over the session, U2 and U3."""

    name: Name
    signature: Signature = Field(repr=False)


class UnmaskRequest(SecureMessage):
    """Phase 4, server: the same sets again, in active mode with the signatures on them."""

    survived: tuple[Name, ...]
    dropped: tuple[Name, ...]
    signatures: dict[Name, Signature] = Field(default_factory=dict, repr=False)


class UnmaskReply(SecureMessage):
    """Phase 4, device: for each dealer whose share it holds, the share of one secret."""

    name: Name
    self_seed_shares: dict[Name, Share] = Field(repr=False)
    mask_key_shares: dict[Name, Share] = Field(repr=False)


Request = KeysRequest | Roster | CheckRequest | MaskRequest | SurvivorsRequest | UnmaskRequest
Reply = KeysReply | SharesReply | CheckReply | MaskReply | SurvivorsReply | UnmaskReply


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A phase: the action under which it travels, and its two messages."""

    action: str
    request: type[Request]
    reply: type[Reply]


PHASES = (
    Phase(action="advertise_keys", request=KeysRequest, reply=KeysReply),
    Phase(action="share_keys", request=Roster, reply=SharesReply),
    Phase(action="check_shares", request=CheckRequest, reply=CheckReply),
    Phase(action="masked_update", request=MaskRequest, reply=MaskReply),
    Phase(action="consistency", request=SurvivorsRequest, reply=SurvivorsReply),
    Phase(action="unmask", request=UnmaskRequest, reply=UnmaskReply),
)


def complete_threshold(num_members: int, mode: Mode) -> int:
    """Return the least t of a complete graph: floor(n/2) + 1, in active mode floor(2n/3) + 1.

    Each holder reveals one of a device's two shares. With t > n/2 no split of n honest holders
    yields both secrets; with t > 2n/3 none does even if a third of the holders reveal both shares
    (2t > n + n/3).

    =======  ===========  ======
    members  semi-honest  active
    =======  ===========  ======
    3        2            3
    10       6            7
    64       33           43
    =======  ===========  ======
    """
    return (2 * num_members) // 3 + 1 if mode == "active" else num_members // 2 + 1


def signatures_needed(threshold: int, num_members: int, *, corrupted: float) -> int:
    """Return how many signatures on one survivor set prove that no other set has as many.

    The quorum is (n + C) // 2 + 1 of all n members, where C = ceil(corrupted n). Two sets of so
    many signers overlap in more than C members, so in an honest member, and that signs only once.
    It is never below the threshold t, and t alone would not do: in a sparse graph t may be smaller
    than C. A complete graph with C <= n/3 needs no more than t: 2t > n + n/3.
    """
    return max(threshold, (num_members + ceil_fraction(corrupted, num_members)) // 2 + 1)


def most_clipped(num_values: int, num_scalars: int) -> int:
    """Return how many clips one device can count: of every coordinate and every masked number."""
    return num_values + num_scalars


MAX_ACCUSED = 5
"""Names in an accusation: of up to 128 characters each, in a text of at most 1,000."""


def accusation(names: Sequence[str], what: str) -> str:
    """Return an error text that accuses members of a session; at most the first five are named.

    An error travels as its code and its text, over every kind of link, so the accused names come
    first in the text. ``server.secagg.blame`` decides whether and when an accusation counts.
    """
    return f"{', '.join(names[:MAX_ACCUSED])}: {what}"


def accused_in(text: str) -> frozenset[str]:
    """Return the names that a text accuses; of any other text, words that are nobody's name."""
    return frozenset(text.partition(": ")[0].split(", ")[:MAX_ACCUSED])
