"""The server's half of secure aggregation up to the masks: a state for each phase.

A phase says whom it asks what (``requests``), takes their replies one by one (``take``), and is
closed when all have answered or the time is up (``close``): that gives the next phase, or aborts
the round. Phases are frozen, so a reply that is refused leaves no trace. Network, clock and disk
are the caller's, who stores the session's number before it sends the first request.

Until phase 2 a device that leaves costs nothing: nobody has masked yet, and U2 is made of those who
are still there. What the server learns here: public keys, ciphertexts, commitments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from headwater.common.errors import (
    CorruptUpdate,
    HeadwaterError,
    SessionMismatch,
    SignatureRefused,
    TooFewSurvivors,
    WrongShare,
)
from headwater.common.secagg.keys import agree, new_key_pair
from headwater.common.secagg.protocol import (
    DealtShare,
    KeysAdvertised,
    KeysWanted,
    Member,
    Reply,
    Request,
    Roster,
    SharesChecked,
    SharesDealt,
    SharesDelivered,
)
from headwater.common.secagg.session import Session, session_of
from headwater.server.secagg.mask_phases import MaskPhase
from headwater.server.secagg.parameters import (
    SessionSetup,
    check_enough,
    check_reply,
    parameters_of,
)


def open_session(opening: SessionSetup) -> KeysPhase:
    """Open a session among the devices that have an update."""
    return KeysPhase(opening=opening, keys={})


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysPhase:
    """Phase 0: who takes part, and with which keys."""

    opening: SessionSetup
    keys: Mapping[str, KeysAdvertised]

    def requests(self) -> dict[str, Request]:
        """Return whom to ask what."""
        opening = self.opening
        wanted = KeysWanted(
            run=opening.run,
            round=opening.number.round,
            attempt=opening.number.attempt,
            mode=opening.mode,
        )
        return dict.fromkeys(opening.planned_weights, wanted)

    def take(self, sender: str, reply: Reply) -> KeysPhase:
        """Take a device's keys.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``admitted``.
            CorruptUpdate: somebody advertised one of the keys before.
            BadPublicKey: one is of low order.
            SignatureRefused: it is not signed, in active mode. Whether the signature is right the
                server cannot say: the devices hold the allow-list.
        """
        keys = check_reply(
            reply,
            KeysAdvertised,
            sender=sender,
            awaited=self.opening.planned_weights,
            there=self.keys,
        )
        known = {key for k in self.keys.values() for key in (k.mask_key, k.sharing_key)}
        if keys.mask_key == keys.sharing_key or known & {keys.mask_key, keys.sharing_key}:
            raise CorruptUpdate(f"{sender}: a key that was advertised before")
        for key in (keys.mask_key, keys.sharing_key):
            agree(
                new_key_pair().private,
                key,
                session=bytes(32),
                purpose="share",
                ends=("server", sender),
            )
        if self.opening.mode == "active" and keys.signature is None:
            raise SignatureRefused(f"{sender}: its keys are not signed, in active mode")
        return replace(self, keys={**self.keys, sender: keys})

    def close(self) -> DealPhase:
        """Fix U1 and the parameters.

        Raises:
            TooFewSurvivors: fewer members than a session needs.
            NoSuchGraph: none is dense enough for so many, under the assumptions.
        """
        check_enough(self.keys, self.opening, what="advertised keys")
        members = [
            Member(
                name=name,
                mask_key=keys.mask_key,
                sharing_key=keys.sharing_key,
                has_aes=keys.has_aes,
                signature=keys.signature,
                planned_weight=self.opening.planned_weights[name],
            )
            for name, keys in sorted(self.keys.items())
        ]
        parameters = parameters_of(self.opening, members)
        session = session_of(parameters, members, model_digest=self.opening.model_digest)
        return DealPhase(opening=self.opening, session=session, dealt={})


@dataclass(frozen=True, kw_only=True, slots=True)
class DealPhase:
    """Phase 1: everybody shares its secrets out."""

    opening: SessionSetup
    session: Session
    dealt: Mapping[str, SharesDealt]

    def requests(self) -> dict[str, Request]:
        """Return whom to ask what."""
        members = self.session.members
        roster = Roster(parameters=self.session.parameters, members=tuple(members.values()))
        return dict.fromkeys(members, roster)

    def take(self, sender: str, reply: Reply) -> DealPhase:
        """Take what a device dealt.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``admitted``.
            SessionMismatch: its model, or what reached it of the roster, is another.
            CorruptUpdate: not one share for each of its holders, in their order.
        """
        dealt = check_reply(
            reply, SharesDealt, sender=sender, awaited=self.session.members, there=self.dealt
        )
        if dealt.session != self.session.digest:
            raise SessionMismatch(
                f"{sender}: shares for session {dealt.session.hex()[:16]}, this is "
                f"{self.session.digest.hex()[:16]}: it has another model, or saw another roster"
            )
        ends = tuple((share.dealer, share.holder) for share in dealt.shares)
        if ends != tuple((sender, holder) for holder in self.session.holders(sender)):
            raise CorruptUpdate(f"{sender}: not one share for each of its holders, in their order")
        return replace(self, dealt={**self.dealt, sender: dealt})

    def close(self) -> CheckPhase:
        """Pass the shares on to those who dealt themselves.

        Raises:
            TooFewSurvivors: too few dealt.
        """
        check_enough(self.dealt, self.opening, what="dealt shares")
        return CheckPhase(opening=self.opening, session=self.session, dealt=self.dealt, checked={})


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckPhase:
    """Between the phases: everybody opens its shares, and names the dealers of bad ones."""

    opening: SessionSetup
    session: Session
    dealt: Mapping[str, SharesDealt]
    checked: Mapping[str, frozenset[str]]

    def requests(self) -> dict[str, Request]:
        """Return whom to ask what."""
        shares: dict[str, list[DealtShare]] = {name: [] for name in self.dealt}
        for dealt in self.dealt.values():
            for share in dealt.shares:
                if share.holder in shares:
                    shares[share.holder].append(share)
        return {name: SharesDelivered(shares=tuple(found)) for name, found in shares.items()}

    def take(self, sender: str, reply: Reply) -> CheckPhase:
        """Take a device's complaints, or that it has none.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``admitted``.
            CorruptUpdate: it complains of a device that dealt it nothing.
        """
        checked = check_reply(
            reply, SharesChecked, sender=sender, awaited=self.dealt, there=self.checked
        )
        dealers = self.dealt.keys() & set(self.session.holders(sender)) - {sender}
        if not dealers.issuperset(checked.bad_dealers):
            raise CorruptUpdate(f"{sender}: it complains of a device that dealt it nothing")
        return replace(self, checked={**self.checked, sender: frozenset(checked.bad_dealers)})

    @property
    def complaints(self) -> dict[str, frozenset[str]]:
        """Who found whose shares bad."""
        return {name: bad for name, bad in self.checked.items() if bad}

    @property
    def left(self) -> dict[str, HeadwaterError]:
        """Who answered and is not in U2 even so, and why: it is to blame for bad shares.

        Whoever is left with fewer than t holders leaves too, until nobody is: in a sparse graph a
        neighbourhood may thin out although the cohort is large enough.
        """
        left = resolve_complaints(self.complaints)
        members = sorted(self.checked.keys() - left.keys())
        while short := self.session.short_of_holders(members, present=members):
            threshold = self.session.parameters.threshold
            why = f"fewer than {threshold} of its holders are left"
            left |= {name: TooFewSurvivors(f"{name}: {why}") for name in short}
            members = sorted(set(members) - set(short))
        return left

    def close(self) -> MaskPhase:
        """Fix U2: those who answered, but for those who ``left``.

        Raises:
            TooFewSurvivors: too few are left.
        """
        left = self.left
        members = sorted(self.checked.keys() - left.keys())
        check_enough(members, self.opening, what="can mask an update")
        return MaskPhase.of(
            opening=self.opening, session=self.session, dealt=self.dealt, members=members, left=left
        )


def resolve_complaints(complaints: Mapping[str, Iterable[str]]) -> dict[str, HeadwaterError]:
    """Return who leaves so that no complaint (holder -> dealers) is left, and why.

    Of holder and dealer one is at fault, and nobody else can tell which. Whoever is part of most
    complaints leaves first, of two that are level the dealer. So a dealer whose shares are bad
    leaves alone, however many complain; and a holder that complains of many leaves itself, where
    a rule against dealers would let one liar empty the session.
    """
    edges = {(holder, dealer) for holder, dealers in complaints.items() for dealer in dealers}
    left: dict[str, HeadwaterError] = {}
    while edges:
        dealers = {dealer for _, dealer in edges}
        count = Counter(end for edge in edges for end in edge)
        worst = max(count, key=lambda name: (count[name], name in dealers, name))
        others = sorted({end for edge in edges if worst in edge for end in edge} - {worst})
        left[worst] = WrongShare(
            f"{worst}: between it and {', '.join(others[:5])} there are bad shares"
        )
        edges = {edge for edge in edges if worst not in edge}
    return left
