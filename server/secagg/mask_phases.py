"""The server's phases of secure aggregation from the masked vectors to the survivor set.

A masked vector is checked as a whole and added to one vector of the ring; only the sum is kept. The
senders that were in time form U3 and remain survivors whatever happens to them later. A later
vector is refused: other clients may already have revealed shares of its sender's mask key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from headwater.common.errors import CorruptUpdate, SessionMismatch, TooFewSurvivors
from headwater.common.estimates.ring_histogram import ring_histogram
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
    """Phase 2: clients send their masked vectors."""

    setup: SessionSetup
    session: SessionView
    dealt: Dealt = field(repr=False)
    members: tuple[str, ...]
    total: MaskedSum
    arrived: frozenset[str] = frozenset()

    def requests(self) -> dict[str, Request]:
        """Return the request to each client."""
        return dict.fromkeys(self.members, MaskRequest(members=self.members))

    def take(
        self, sender: str, reply: Reply, vector: memoryview | bytes | None = None
    ) -> MaskPhase:
        """Add a masked vector to the sum, after it was checked as a whole.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``check_reply``.
            SessionMismatch: the vector was masked in another session.
            CorruptUpdate: the vector, the sums behind it or the numbers have the wrong length.
        """
        head = check_reply(
            reply, MaskReply, sender=sender, awaited=self.members, received=self.arrived
        )
        if head.session != self.session.digest:
            raise SessionMismatch(f"{sender}: its update was masked in another session")
        total = self.total
        for what, num_bytes, expected in (
            ("masked vector", len(vector or b""), total.reply_bytes),
            ("masked numbers", len(head.scalars), total.scalars.nbytes),
        ):
            if num_bytes != expected:
                raise CorruptUpdate(
                    f"{sender}: {what} of {num_bytes:,} bytes, expected {expected:,}"
                )
        memory, end = memoryview(vector or b""), total.vector_P.nbytes
        masked_P = np.frombuffer(memory[:end], total.vector_P.dtype.newbyteorder("<"))
        if not total.first_seen:
            total.first_seen.extend(ring_histogram(masked_P))
        np.add(total.vector_P, masked_P, out=total.vector_P)
        np.add(total.scalars, np.frombuffer(head.scalars, "<u8"), out=total.scalars)
        np.add(total.sums_S, np.frombuffer(memory[end:], "<u8"), out=total.sums_S)
        return replace(self, arrived=self.arrived | {sender})

    def close(self) -> SignPhase | UnmaskPhase:
        """Fix U3; a vector that arrives later is refused.

        Raises:
            TooFewSurvivors: fewer than the clients accept, or than can remove every mask.
        """
        survived = tuple(sorted(self.arrived))
        dropped = tuple(sorted(set(self.members) - self.arrived))
        check_enough(survived, self.setup, what="sent a masked update")
        least = self.setup.least_survivors(len(self.members))
        if len(survived) < least:
            raise TooFewSurvivors(
                f"{self.setup.number}: {len(survived)} of {len(self.members)} devices sent a "
                f"masked update, at least {least} must"
            )
        check_holders(self.session, self.members, present=survived)
        if self.setup.mode == "active":
            return SignPhase(
                setup=self.setup,
                session=self.session,
                dealt=self.dealt,
                total=self.total,
                survived=survived,
                dropped=dropped,
            )
        return UnmaskPhase(
            setup=self.setup,
            session=self.session,
            dealt=self.dealt,
            total=self.total,
            survived=survived,
            dropped=dropped,
            signed=None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SignPhase:
    """Phase 3, in active mode only: each survivor signs the survivor set."""

    setup: SessionSetup
    session: SessionView
    dealt: Dealt = field(repr=False)
    total: MaskedSum
    survived: tuple[str, ...]
    dropped: tuple[str, ...]
    signed: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def requests(self) -> dict[str, Request]:
        """Return the request to each client."""
        request = SurvivorsRequest(survived=self.survived, dropped=self.dropped)
        return dict.fromkeys(self.survived, request)

    def take(self, sender: str, reply: Reply) -> SignPhase:
        """Add a signature; the other clients verify it, because only they have the allow-list.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``check_reply``.
        """
        signed = check_reply(
            reply, SurvivorsReply, sender=sender, awaited=self.survived, received=self.signed
        )
        return replace(self, signed={**self.signed, sender: signed.signature})

    @property
    def num_needed(self) -> int:
        """The number of signatures without which the session is aborted."""
        return signatures_needed(
            self.session.parameters.threshold,
            len(self.session.members),
            corrupted=self.setup.corrupted,
        )

    def close(self) -> UnmaskPhase:
        """Return the phase that asks the signers for shares and passes them all signatures.

        Raises:
            TooFewSurvivors: too few signed for the clients to continue, or to remove every mask.
        """
        if len(self.signed) < self.num_needed:
            raise TooFewSurvivors(
                f"{self.setup.number}: {len(self.signed)} devices signed the survivor set, "
                f"{self.num_needed} must"
            )
        dealers = (*self.survived, *self.dropped)
        check_holders(self.session, dealers, present=tuple(self.signed))
        return UnmaskPhase(
            setup=self.setup,
            session=self.session,
            dealt=self.dealt,
            total=self.total,
            survived=self.survived,
            dropped=self.dropped,
            signed=self.signed,
        )
