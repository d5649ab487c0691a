"""The protocol of secure aggregation: phases, parameters, thresholds and messages.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
figures 1 and 4: every device adds a self mask, and for each neighbour a pairwise mask that cancels
in the sum. Secret shares of the mask seeds let the server remove the masks that dropouts leave in
the sum. Above ``MAX_COMPLETE`` members the neighbours are those of a k-regular graph (Bell et al.,
"Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020, algorithm 2).

U1 are the members that advertised keys, U2 those that shared secrets, U3 those that sent a masked
update.

==============  ============================  ===================================================
phase           the server sends              a device replies
==============  ============================  ===================================================
advertise_keys  ``KeysRequest``                ``KeysReply``: two fresh X25519 keys, signed
share_keys      ``Roster``: U1                ``SharesReply``: sealed shares and commitments
check_shares    ``CheckRequest``           ``CheckReply``: whose shares are bad
masked_update   ``MaskRequest``: U2            ``MaskReply``, with the masked vector
consistency     ``SurvivorsRequest``: U3         ``SurvivorsReply`` (active mode only)
unmask          ``UnmaskRequest``: U3, U2-U3   ``UnmaskReply``: one share for each, of one kind
==============  ============================  ===================================================

``check_shares`` is not in the papers: it finds bad shares before any device has masked, and a
member that leaves until then costs nothing. Training is over before a session opens. No message has
a weight, a loss or a norm in clear: those are masked numbers (``common.secagg.masked_numbers``).

docs/secure-aggregation.md says what the server learns, and which adversaries it withstands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from headwater.common.messages import Name, Natural, WireMessage
from headwater.common.phases import Phase
from headwater.common.secagg.fixed_point import Encoding
from headwater.common.secagg.graph import Mode, ceil_fraction
from headwater.common.secagg.keys import (
    COMMITMENT_BYTES,
    KEY_BYTES,
    SEAL_OVERHEAD_BYTES,
    SESSION_BYTES,
)
from headwater.common.secagg.masking import Cipher
from headwater.common.secagg.scalar_encoding import LongSum, Scalar
from headwater.common.secagg.shamir import MAX_HOLDERS

MAX_COMPLETE = 64
"""The largest session with a complete graph, in which all members are neighbours."""

SEED_BYTES = KEY_BYTES
MASK_KEY_SHARE, SELF_SEED_SHARE, SELF_SEED = "mask key share", "self seed share", "self seed"
"""Tags of commitments: the kind of value committed to."""

WEIGHT, NUM_CLIPPED = "weight", "num_clipped"
"""The masked numbers of every session; the caller adds others."""

RunId = Annotated[int, Field(ge=0, lt=2**64)]
Key = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Digest = Annotated[bytes, Field(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
Signature = Annotated[bytes, Field(min_length=64, max_length=64)]
Commitment = Annotated[bytes, Field(min_length=COMMITMENT_BYTES, max_length=COMMITMENT_BYTES)]
SEALED_BYTES = 2 * SEED_BYTES + SEAL_OVERHEAD_BYTES
Sealed = Annotated[bytes, Field(min_length=SEALED_BYTES, max_length=SEALED_BYTES, repr=False)]
Share = Annotated[bytes, Field(min_length=SEED_BYTES, max_length=SEED_BYTES)]
Weight = Annotated[int, Field(ge=1, le=2**53)]
Carried = Annotated[
    int, Field(ge=1, le=2**53, description="the weight of earlier updates that it adds to this one")
]
Holders = Annotated[int, Field(ge=1, le=MAX_HOLDERS)]
MAX_SCALARS = 128


class SecureMessage(WireMessage):
    """The base of these messages: bytes travel as base64, and no error quotes a field's value."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        ser_json_bytes="base64",
        val_json_bytes="base64",
        hide_input_in_errors=True,
    )


@dataclass(frozen=True, order=True, slots=True)
class SessionNumber:
    """A session's number in its run: strictly increasing, persisted before the server sends it."""

    round: int
    attempt: int

    def __str__(self) -> str:
        return f"round {self.round}, attempt {self.attempt}"


def next_number(last: SessionNumber | None, *, round_number: int) -> SessionNumber:
    """Return the next session's number: the next attempt if the round had a session before."""
    if last is None or last.round < round_number:
        return SessionNumber(round_number, 1)
    return SessionNumber(last.round, last.attempt + 1)


class SessionHeader(SecureMessage):
    """The fields that name a session and its mode."""

    run: RunId
    round: Natural
    attempt: Natural
    mode: Mode

    @property
    def number(self) -> SessionNumber:
        """The session's number in the run."""
        return SessionNumber(self.round, self.attempt)


class Parameters(SessionHeader):
    """The server's choices for a session; each device checks them against its own minimum."""

    plan: Digest = Field(description="of what all plans have in common (plan_digest)")
    threshold: Holders
    num_neighbours: Holders | None = Field(None, description="None: the complete graph")
    cipher: Cipher = "chacha20"
    num_values: Natural = Field(description="P, the coordinates of the vector")
    encoding: Encoding
    scalars: Annotated[tuple[Scalar, ...], Field(max_length=MAX_SCALARS)]
    sums: Annotated[
        tuple[LongSum, ...],
        Field(max_length=MAX_SCALARS, description="the sums beside the model's, as in the plan"),
    ] = ()
    rotation_seed: Digest | None = Field(None, description="seed of a 16-bit ring's rotation")
    bounds_digest: Digest | None = Field(None, description="digest of that rotation's block bounds")


class Member(SecureMessage):
    """A device's entry in the roster."""

    name: Name
    mask_key: Key
    sharing_key: Key
    planned_weight: Weight = Field(description="the largest weight that its plan allows")
    carried_weight: Carried | None = None
    has_aes: bool = False
    signature: Signature | None = Field(None, repr=False)


class KeysRequest(SessionHeader):
    """Phase 0, server: a session opens."""


class KeysReply(SecureMessage):
    """Phase 0, device: two fresh public keys, signed by its identity in active mode."""

    name: Name
    mask_key: Key
    sharing_key: Key
    carried_weight: Carried | None = None
    has_aes: bool = False
    signature: Signature | None = Field(None, repr=False)


class Roster(SecureMessage):
    """Phase 1, server: the parameters and U1; the session's digest is computed from them."""

    parameters: Parameters
    members: tuple[Member, ...]


class DealtShare(SecureMessage):
    """One share of the mask key and one of the self seed, sealed to a holder; and commitments."""

    dealer: Name
    holder: Name
    sealed: Sealed
    key_commitment: Commitment
    seed_commitment: Commitment


class SharesReply(SecureMessage):
    """Phase 1, device: one pair of shares for each of its holders."""

    name: Name
    session: Digest
    seed_commitment: Commitment = Field(description="to the self seed itself")
    shares: Annotated[tuple[DealtShare, ...], Field(max_length=MAX_HOLDERS)]


class CheckRequest(SecureMessage):
    """Between phases 1 and 2, server: the shares dealt to one device."""

    shares: Annotated[tuple[DealtShare, ...], Field(max_length=MAX_HOLDERS)]


class CheckReply(SecureMessage):
    """Between phases 1 and 2, device: dealers whose shares do not open or match."""

    name: Name
    bad_dealers: Annotated[tuple[Name, ...], Field(max_length=MAX_HOLDERS)] = ()


class MaskRequest(SecureMessage):
    """Phase 2, server: U2, the members with pairwise masks."""

    members: tuple[Name, ...]


class MaskReply(SecureMessage):
    """Phase 2, device: its masked numbers (little-endian uint64).

    The masked vector is sent with it, and behind the vector the masked sums beside the model's.
    """

    name: Name
    session: Digest
    scalars: Annotated[bytes, Field(max_length=8 * MAX_SCALARS, repr=False)]


class SurvivorsRequest(SecureMessage):
    """Phase 3, server: U3, and the members of U2 that are not in it."""

    survived: tuple[Name, ...]
    dropped: tuple[Name, ...]


class SurvivorsReply(SecureMessage):
    """Phase 3, device: its signature over the session, U2 and U3."""

    name: Name
    signature: Signature = Field(repr=False)


class UnmaskRequest(SecureMessage):
    """Phase 4, server: the same two sets, with their signatures in active mode."""

    survived: tuple[Name, ...]
    dropped: tuple[Name, ...]
    signatures: dict[Name, Signature] = Field(default_factory=dict, repr=False)


class UnmaskReply(SecureMessage):
    """Phase 4, device: for each dealer whose shares it holds, the share of one secret."""

    name: Name
    self_seed_shares: dict[Name, Share] = Field(repr=False)
    mask_key_shares: dict[Name, Share] = Field(repr=False)


Request = KeysRequest | Roster | CheckRequest | MaskRequest | SurvivorsRequest | UnmaskRequest
Reply = KeysReply | SharesReply | CheckReply | MaskReply | SurvivorsReply | UnmaskReply


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


def max_clipped(num_values: int, num_scalars: int) -> int:
    """Return the most clips that one device can count: each coordinate and each masked number."""
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
