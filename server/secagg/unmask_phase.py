"""The server's unmasking phase: it collects shares and removes the masks from the sum.

The shares reconstruct the survivors' (U3) self masks and the pairwise masks that they shared with
the dropped clients (U2 - U3). Each share is checked on its own against its dealer's commitment, and
each secret against what its owner published, so a wrong one identifies its sender without a search.

The server learns the sum over U3 and, of each client, at most one secret: the self mask's seed of a
survivor, the mask key of a dropped client. docs/secure-aggregation.md names the adversaries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headwater.common.errors import CorruptUpdate, DealerCheated, TooFewSurvivors, WrongShare
from headwater.common.secagg.fixed_point import UNSIGNED, RingVector
from headwater.common.secagg.keys import (
    agree,
    commitment,
    pairwise_sign,
    public_key_of,
    self_mask_key,
)
from headwater.common.secagg.masking import SCALARS, SUMS, VECTOR, Stream, mask_in_place
from headwater.common.secagg.protocol import (
    MASK_KEY_SHARE,
    SEED_BYTES,
    SELF_SEED,
    SELF_SEED_SHARE,
    Parameters,
    Reply,
    Request,
    SharesReply,
    UnmaskReply,
    UnmaskRequest,
)
from headwater.common.secagg.scalar_encoding import decode_scalars, num_elements
from headwater.common.secagg.secret import Secret
from headwater.common.secagg.session import SessionView
from headwater.common.secagg.shamir import combine
from headwater.server.secagg.parameters import SessionSetup, check_reply

Dealt = Mapping[str, SharesReply]


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedSum:
    """The sum of the masked vectors, numbers and sums; the arrays are changed in place."""

    vector_P: RingVector = field(repr=False)
    scalars: NDArray[np.uint64] = field(repr=False)
    sums_S: NDArray[np.uint64] = field(repr=False)
    first_seen: list[int] = field(default_factory=list, repr=False)
    """The histogram of the first vector that arrived, as the server sees it: masked."""

    @staticmethod
    def zeros(parameters: Parameters) -> MaskedSum:
        """Return an empty sum of these parameters' sizes."""
        dtype = UNSIGNED[parameters.encoding.ring_bits]
        vector_P: RingVector = np.zeros(parameters.num_values, dtype)
        return MaskedSum(
            vector_P=vector_P,
            scalars=np.zeros(len(parameters.scalars), np.uint64),
            sums_S=np.zeros(num_elements(parameters.sums), np.uint64),
        )

    @property
    def reply_bytes(self) -> int:
        """The bytes that each device sends beside its numbers."""
        return self.vector_P.nbytes + self.sums_S.nbytes


def check_holders(session: SessionView, dealers: Sequence[str], *, present: Sequence[str]) -> None:
    """Check that enough holders remain to reconstruct each dealer's secret.

    Raises:
        TooFewSurvivors: too few remain for one dealer or more.
    """
    short = session.short_of_holders(dealers, present=present)
    if short:
        raise TooFewSurvivors(
            f"{session.parameters.number}: fewer than {session.parameters.threshold} holders "
            f"remain of {len(short)} devices' secrets, among them {short[0]}'s"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmaskPhase:
    """Phase 4: clients reveal the shares that unmask the sum."""

    setup: SessionSetup
    session: SessionView
    dealt: Dealt = field(repr=False)
    total: MaskedSum
    survived: tuple[str, ...]
    dropped: tuple[str, ...]
    signed: Mapping[str, bytes] | None = field(repr=False)
    revealed: Mapping[str, UnmaskReply] = field(default_factory=dict, repr=False)

    @property
    def recipients(self) -> tuple[str, ...]:
        """The clients that are asked: in active mode those that signed (U4), else the survivors."""
        return self.survived if self.signed is None else tuple(sorted(self.signed))

    @property
    def can_unmask(self) -> bool:
        """Whether enough shares have arrived to stop waiting."""
        dealers = (*self.survived, *self.dropped)
        return not self.session.short_of_holders(dealers, present=self.revealed)

    def requests(self) -> dict[str, Request]:
        """Return the request to each client."""
        request = UnmaskRequest(
            survived=self.survived, dropped=self.dropped, signatures=dict(self.signed or {})
        )
        return dict.fromkeys(self.recipients, request)

    def take(self, sender: str, reply: Reply) -> UnmaskPhase:
        """Add a holder's shares if each is the one that its dealer committed to.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``check_reply``.
            CorruptUpdate: they are not one share of the right kind per dealer.
            WrongShare: a share is not the one that was dealt. The holder saw the commitment before
                phase 2 and did not complain.
        """
        shares = check_reply(
            reply, UnmaskReply, sender=sender, awaited=self.recipients, received=self.revealed
        )
        dealers = set(self.session.holders(sender))
        for revealed, expected, tag in (
            (shares.self_seed_shares, self.survived, SELF_SEED_SHARE),
            (shares.mask_key_shares, self.dropped, MASK_KEY_SHARE),
        ):
            if revealed.keys() != dealers & set(expected):
                raise CorruptUpdate(f"{sender}: expected one {tag} for each of its dealers")
            for dealer, share in revealed.items():
                self._check_share(sender, dealer, share, tag)
        return replace(self, revealed={**self.revealed, sender: shares})

    def _check_share(self, holder: str, dealer: str, share: bytes, tag: str) -> None:
        holders = self.session.holders(dealer)  # sorted, like the shares that it dealt
        dealt = self.dealt[dealer].shares[bisect_left(holders, holder)]
        expected = dealt.key_commitment if tag == MASK_KEY_SHARE else dealt.seed_commitment
        ends = (dealer, holder)
        if commitment(tag=tag, session=self.session.digest, ends=ends, share=share) != expected:
            raise WrongShare(f"{holder}: its {tag} of {dealer} is not the share that was dealt")

    def _check(self, secrets: Mapping[str, Secret], cheated: list[str]) -> None:
        """Erase the secrets and name the dealers that cheated, if there are any."""
        if not cheated:
            return
        for secret in secrets.values():
            secret.erase()
        names = tuple(sorted(cheated))
        raise DealerCheated(
            f"{self.session.parameters.number}: the shares that {', '.join(names)} dealt do not "
            "reconstruct what was published",
            dealers=names,
        )

    def close(self, *, num_threads: int = 1) -> UnmaskedSum:
        """Reconstruct the secrets, remove the masks and decode the numbers.

        Raises:
            TooFewSurvivors: too few holders answered.
            DealerCheated: a secret differs from what its owner published; ``dealers`` names them.
        """
        dealers = (*self.survived, *self.dropped)
        check_holders(self.session, dealers, present=tuple(self.revealed))
        keys = _secrets(self, self.dropped, tag=MASK_KEY_SHARE)
        self._check(keys, _false_keys(self, keys))  # before any self seed is reconstructed
        seeds = _secrets(self, self.survived, tag=SELF_SEED_SHARE)
        self._check(seeds, _false_seeds(self, seeds))
        streams = [*_self_masks(self, seeds), *_remaining_pairwise_masks(self, keys)]
        chosen, total = self.session.parameters, self.total
        mask_in_place(
            total.vector_P,
            streams,
            remove=True,
            cipher=chosen.cipher,
            part=VECTOR,
            num_threads=num_threads,
        )
        mask_in_place(total.scalars, streams, remove=True, cipher=chosen.cipher, part=SCALARS)
        mask_in_place(total.sums_S, streams, remove=True, cipher=chosen.cipher, part=SUMS)
        for secret in (*seeds.values(), *keys.values(), *(stream.key for stream in streams)):
            secret.erase()
        return UnmaskedSum(
            session=self.session,
            vector_P=total.vector_P,
            numbers=decode_scalars(total.scalars, chosen.scalars),
            sums_S=total.sums_S,
            survived=self.survived,
            dropped=self.dropped,
            first_seen=tuple(total.first_seen),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmaskedSum:
    """The cohort's unmasked sums, still in the ring, and the sums of the masked numbers."""

    session: SessionView
    vector_P: RingVector = field(repr=False)
    numbers: Mapping[str, float]
    sums_S: NDArray[np.uint64] = field(repr=False)
    survived: tuple[str, ...]
    dropped: tuple[str, ...]
    first_seen: tuple[int, ...] = ()
    """The histogram of one member's vector as it arrived, masked (``ring_histogram``)."""


def _secrets(state: UnmaskPhase, dealers: Sequence[str], *, tag: str) -> dict[str, Secret]:
    """Return each dealer's secret, reconstructed from t of its shares.

    Dealers with the same holders at the same x are combined in one call; in a complete graph these
    are all dealers.
    """
    threshold = state.session.parameters.threshold
    groups: dict[tuple[tuple[int, str], ...], list[str]] = {}
    for dealer in dealers:
        present = (
            (x, holder)
            for x, holder in enumerate(state.session.holders(dealer), start=1)
            if holder in state.revealed
        )
        chosen = tuple(pair for pair, _ in zip(present, range(threshold), strict=False))
        groups.setdefault(chosen, []).append(dealer)
    secrets: dict[str, Secret] = {}
    for chosen, group in groups.items():
        rows = {
            x: b"".join(_share(state.revealed[holder], dealer, tag) for dealer in group)
            for x, holder in chosen
        }
        joined = combine(rows)
        for place, dealer in enumerate(group):
            secrets[dealer] = Secret(joined[place * SEED_BYTES : (place + 1) * SEED_BYTES])
    return secrets


def _share(revealed: UnmaskReply, dealer: str, tag: str) -> bytes:
    shares = revealed.self_seed_shares if tag == SELF_SEED_SHARE else revealed.mask_key_shares
    return shares[dealer]


def _false_keys(state: UnmaskPhase, keys: Mapping[str, Secret]) -> list[str]:
    """Return the dealers whose mask key is not that of the public key that they advertised."""
    members = state.session.members
    return [name for name, key in keys.items() if public_key_of(key) != members[name].mask_key]


def _false_seeds(state: UnmaskPhase, seeds: Mapping[str, Secret]) -> list[str]:
    """Return the dealers whose self seed is not the one that they committed to.

    A commitment is to the whole seed, so this can be known only of a reconstructed one.
    """
    digest = state.session.digest
    return [
        name
        for name, seed in seeds.items()
        if commitment(tag=SELF_SEED, session=digest, ends=(name, name), share=seed.reveal())
        != state.dealt[name].seed_commitment
    ]


def _self_masks(state: UnmaskPhase, seeds: Mapping[str, Secret]) -> list[Stream]:
    session = state.session.digest
    return [
        Stream(key=self_mask_key(seed, session=session, name=name), sign=1)
        for name, seed in seeds.items()
    ]


def _remaining_pairwise_masks(state: UnmaskPhase, keys: Mapping[str, Secret]) -> list[Stream]:
    """Return the masks that survivors share with dropped neighbours, with their signs."""
    session, survived = state.session, frozenset(state.survived)
    return [
        Stream(
            key=agree(
                key,
                session.members[survivor].mask_key,
                session=session.digest,
                purpose="pairwise mask",
                ends=(name, survivor),
            ),
            sign=pairwise_sign(survivor, name),
        )
        for name, key in keys.items()
        for survivor in session.neighbours(name)
        if survivor in survived
    ]
