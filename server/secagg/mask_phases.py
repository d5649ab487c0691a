"""The server's half of secure aggregation from the masked vectors to the survivor set.

A masked vector is checked whole and folded into one vector of the ring; after that it is gone. Who
came in time is U3: survivors all, whatever happens to them later, and a vector that comes after the
set was fixed is refused: the others may have given shares of its owner's mask key by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headwater.common.errors import CorruptUpdate, HeadwaterError, SessionMismatch, TooFewSurvivors
from headwater.common.secagg.fixed_point import RingVector
from headwater.common.secagg.protocol import (
    MaskReply,
    MaskRequest,
    Reply,
    Request,
    SurvivorsReply,
    SurvivorsRequest,
    signatures_needed,
)
from headwater.common.secagg.session import SessionView
from headwater.server.secagg.parameters import SessionSetup, check_enough, check_reply
from headwater.server.secagg.unmask_phase import Dealt, MaskedSum, UnmaskPhase, check_holders


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskPhase:
    """Phase 2: the masked vectors come in."""

    opening: SessionSetup
    session: SessionView
    dealt: Dealt = field(repr=False)
    members: tuple[str, ...]
    left: Mapping[str, HeadwaterError]
    total: MaskedSum
    arrived: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        *,
        opening: SessionSetup,
        session: SessionView,
        dealt: Dealt,
        members: Sequence[str],
        left: Mapping[str, HeadwaterError],
    ) -> MaskPhase:
        """Begin with an empty sum; ``left`` is who is not in U2 any more, and why."""
        chosen = session.parameters
        vector_P: RingVector = (
            np.zeros(chosen.num_values, np.uint16)
            if chosen.encoding.ring_bits == 16
            else np.zeros(chosen.num_values, np.uint32)
        )
        total = MaskedSum(vector_P=vector_P, scalars=np.zeros(len(chosen.scalars), np.uint64))
        return cls(
            opening=opening,
            session=session,
            dealt=dealt,
            members=tuple(members),
            left=left,
            total=total,
        )

    def requests(self) -> dict[str, Request]:
        """Return whom to ask what."""
        return dict.fromkeys(self.members, MaskRequest(members=self.members))

    def take(
        self, sender: str, reply: Reply, vector: memoryview | bytes | None = None
    ) -> MaskPhase:
        """Fold a masked vector, after all of it was checked; only the sum remembers it.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``admitted``.
            SessionMismatch: it was masked in another session.
            CorruptUpdate: vector or numbers are not as long as they should be.
        """
        head = check_reply(
            reply, MaskReply, sender=sender, awaited=self.members, there=self.arrived
        )
        if head.session != self.session.digest:
            raise SessionMismatch(f"{sender}: its update was masked in another session")
        total = self.total
        for what, found, expected in (
            ("masked vector", len(vector or b""), total.vector_P.nbytes),
            ("masked numbers", len(head.scalars), total.scalars.nbytes),
        ):
            if found != expected:
                raise CorruptUpdate(f"{sender}: {what} of {found:,} bytes, expected {expected:,}")
        masked_P = np.frombuffer(vector or b"", total.vector_P.dtype.newbyteorder("<"))
        np.add(total.vector_P, masked_P, out=total.vector_P)
        np.add(total.scalars, np.frombuffer(head.scalars, "<u8"), out=total.scalars)
        return replace(self, arrived=self.arrived | {sender})

    def close(self) -> SignPhase | UnmaskPhase:
        """Fix U3: from here on a vector that comes late is refused.

        Raises:
            TooFewSurvivors: fewer than the devices would agree to, or than could open every mask.
        """
        survived = tuple(sorted(self.arrived))
        dropped = tuple(sorted(set(self.members) - self.arrived))
        check_enough(survived, self.opening, what="sent a masked update")
        least = self.opening.least_survivors(len(self.members))
        if len(survived) < least:
            raise TooFewSurvivors(
                f"{self.opening.number}: {len(survived)} of {len(self.members)} devices sent a "
                f"masked update, at least {least} must"
            )
        check_holders(self.session, self.members, present=survived)
        if self.opening.mode == "active":
            return SignPhase(
                opening=self.opening,
                session=self.session,
                dealt=self.dealt,
                total=self.total,
                survived=survived,
                dropped=dropped,
            )
        return UnmaskPhase(
            opening=self.opening,
            session=self.session,
            dealt=self.dealt,
            total=self.total,
            survived=survived,
            dropped=dropped,
            signed=None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SignPhase:
    """Phase 3, active mode: everybody signs the survivor set."""

    opening: SessionSetup
    session: SessionView
    dealt: Dealt = field(repr=False)
    total: MaskedSum
    survived: tuple[str, ...]
    dropped: tuple[str, ...]
    signed: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def requests(self) -> dict[str, Request]:
        """Return whom to ask what."""
        told = SurvivorsRequest(survived=self.survived, dropped=self.dropped)
        return dict.fromkeys(self.survived, told)

    def take(self, sender: str, reply: Reply) -> SignPhase:
        """Take a signature, which the other devices will verify: they hold the allow-list.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``admitted``.
        """
        told = check_reply(
            reply, SurvivorsReply, sender=sender, awaited=self.survived, there=self.signed
        )
        return replace(self, signed={**self.signed, sender: told.signature})

    def close(self) -> UnmaskPhase:
        """Pass the signatures on; those who signed are asked for their shares.

        Raises:
            TooFewSurvivors: too few signed for the devices to go on, or to open every mask.
        """
        needed = signatures_needed(
            self.session.parameters.threshold,
            len(self.session.members),
            corrupted=self.opening.corrupted,
        )
        if len(self.signed) < needed:
            raise TooFewSurvivors(
                f"{self.opening.number}: {len(self.signed)} devices signed the survivor set, "
                f"{needed} must"
            )
        everybody = (*self.survived, *self.dropped)
        check_holders(self.session, everybody, present=tuple(self.signed))
        return UnmaskPhase(
            opening=self.opening,
            session=self.session,
            dealt=self.dealt,
            total=self.total,
            survived=self.survived,
            dropped=self.dropped,
            signed=self.signed,
        )
