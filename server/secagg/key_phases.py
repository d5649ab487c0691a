"""The server's phases of secure aggregation before the masks: keys, shares, checked shares.

Each phase is an immutable state: ``requests`` returns its message to each client, ``take`` adds one
reply, and ``close``, called when all have answered or time is up, returns the next phase or aborts
the round. A refused reply leaves the state unchanged. The caller handles network, clock and disk,
and stores the session's number before it sends the first request.

Before phase 2 a client may leave at no cost: no update is masked yet, and U2 consists of the
remaining clients. The server learns public keys, ciphertexts and commitments here.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from headwater.common.errors import (
    CorruptUpdate,
    HeadwaterError,
    SessionMismatch,
    SessionRefused,
    SignatureRefused,
    TooFewSurvivors,
    WrongShare,
)
from headwater.common.secagg.keys import agree, new_key_pair
from headwater.common.secagg.protocol import (
    CheckReply,
    CheckRequest,
    DealtShare,
    KeysReply,
    KeysRequest,
    Member,
    Reply,
    Request,
    Roster,
    SharesReply,
)
from headwater.common.secagg.session import SessionView, session_of
from headwater.server.secagg.mask_phases import MaskPhase
from headwater.server.secagg.parameters import (
    SessionSetup,
    check_enough,
    check_reply,
    most_members,
    parameters_of,
)
from headwater.server.secagg.unmask_phase import MaskedSum


def open_session(setup: SessionSetup) -> KeysPhase:
    """Return the first phase of a session."""
    return KeysPhase(setup=setup, keys={})


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysPhase:
    """Phase 0: clients advertise their keys."""

    setup: SessionSetup
    keys: Mapping[str, KeysReply]

    def requests(self) -> dict[str, Request]:
        """Return the request to each client."""
        setup = self.setup
        request = KeysRequest(
            run=setup.run,
            round=setup.number.round,
            attempt=setup.number.attempt,
            mode=setup.mode,
        )
        return dict.fromkeys(setup.planned_weights, request)

    def take(self, sender: str, reply: Reply) -> KeysPhase:
        """Add a client's keys.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``check_reply``.
            CorruptUpdate: one of the keys was advertised before.
            BadPublicKey: a key is of low order.
            SignatureRefused: the keys are not signed, in active mode. The server cannot check the
                signature, because only the clients have the allow-list.
        """
        keys = check_reply(
            reply,
            KeysReply,
            sender=sender,
            awaited=self.setup.planned_weights,
            received=self.keys,
        )
        known = {key for k in self.keys.values() for key in (k.mask_key, k.sharing_key)}
        if keys.mask_key == keys.sharing_key or known & {keys.mask_key, keys.sharing_key}:
            raise CorruptUpdate(f"{sender}: one of its keys was advertised before")
        for key in (keys.mask_key, keys.sharing_key):
            agree(
                new_key_pair().private,
                key,
                session=bytes(32),
                purpose="share",
                ends=("server", sender),
            )
        if self.setup.mode == "active" and keys.signature is None:
            raise SignatureRefused(f"{sender}: its keys are not signed, in active mode")
        return replace(self, keys={**self.keys, sender: keys})

    @property
    def excluded(self) -> dict[str, HeadwaterError]:
        """The clients that answered but are not in U1, as there is no graph of so many members.

        Each session excludes others.

        Raises:
            NoSuchGraph: too few would remain.
        """
        setup, num_ready = self.setup, len(self.keys)
        number = most_members(
            num_ready,
            least=setup.least_members,
            mode=setup.mode,
            corrupted=setup.corrupted,
            dropout=setup.dropout,
        )
        if number == num_ready:
            return {}
        reason = SessionRefused(
            f"{setup.number}: {num_ready} devices are ready, and there is no mask graph of so "
            f"many: the session has {number} of them"
        )
        seed = str(setup.number).encode()
        order = sorted(self.keys, key=lambda name: hashlib.sha256(seed + name.encode()).digest())
        return dict.fromkeys(order[number:], reason)

    def close(self) -> DealPhase:
        """Fix U1, the clients that answered and are not ``excluded``, and the parameters.

        Raises:
            TooFewSurvivors: fewer members than a session needs.
            NoSuchGraph: see ``excluded``.
        """
        check_enough(self.keys, self.setup, what="advertised keys")
        excluded = self.excluded
        members = [
            Member(
                name=name,
                mask_key=keys.mask_key,
                sharing_key=keys.sharing_key,
                has_aes=keys.has_aes,
                signature=keys.signature,
                planned_weight=self.setup.planned_weights[name],
                carried_weight=keys.carried_weight,
            )
            for name, keys in sorted(self.keys.items())
            if name not in excluded
        ]
        parameters = parameters_of(self.setup, members)
        session = session_of(parameters, members, model_digest=self.setup.model_digest)
        return DealPhase(setup=self.setup, session=session, dealt={})


@dataclass(frozen=True, kw_only=True, slots=True)
class DealPhase:
    """Phase 1: each client sends shares of its secrets to its holders."""

    setup: SessionSetup
    session: SessionView
    dealt: Mapping[str, SharesReply]

    def requests(self) -> dict[str, Request]:
        """Return the request to each client."""
        members = self.session.members
        roster = Roster(parameters=self.session.parameters, members=tuple(members.values()))
        return dict.fromkeys(members, roster)

    def take(self, sender: str, reply: Reply) -> DealPhase:
        """Add the shares that a client dealt.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``check_reply``.
            SessionMismatch: the client has another model or received another roster.
            CorruptUpdate: they are not one share per holder, in the holders' order.
        """
        dealt = check_reply(
            reply, SharesReply, sender=sender, awaited=self.session.members, received=self.dealt
        )
        if dealt.session != self.session.digest:
            raise SessionMismatch(
                f"{sender}: sent shares for session {dealt.session.hex()[:16]}, expected "
                f"{self.session.digest.hex()[:16]}: it has another model or another roster"
            )
        ends = tuple((share.dealer, share.holder) for share in dealt.shares)
        if ends != tuple((sender, holder) for holder in self.session.holders(sender)):
            raise CorruptUpdate(f"{sender}: expected one share per holder, in the holders' order")
        return replace(self, dealt={**self.dealt, sender: dealt})

    def close(self) -> CheckPhase:
        """Return the phase that delivers the shares to the holders that dealt shares themselves.

        Raises:
            TooFewSurvivors: too few clients dealt shares.
        """
        check_enough(self.dealt, self.setup, what="dealt shares")
        return CheckPhase(setup=self.setup, session=self.session, dealt=self.dealt, checked={})


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckPhase:
    """Between phases 1 and 2: each client opens its shares and names the dealers of bad ones."""

    setup: SessionSetup
    session: SessionView
    dealt: Mapping[str, SharesReply]
    checked: Mapping[str, frozenset[str]]

    def requests(self) -> dict[str, Request]:
        """Return the request to each client."""
        shares: dict[str, list[DealtShare]] = {name: [] for name in self.dealt}
        for dealt in self.dealt.values():
            for share in dealt.shares:
                if share.holder in shares:
                    shares[share.holder].append(share)
        return {name: CheckRequest(shares=tuple(received)) for name, received in shares.items()}

    def take(self, sender: str, reply: Reply) -> CheckPhase:
        """Add a client's complaints, of which there may be none.

        Raises:
            LateUpdate, UnexpectedUpdate: see ``check_reply``.
            CorruptUpdate: it complains of a client that dealt it no share.
        """
        checked = check_reply(
            reply, CheckReply, sender=sender, awaited=self.dealt, received=self.checked
        )
        dealers = self.dealt.keys() & set(self.session.holders(sender)) - {sender}
        if not dealers.issuperset(checked.bad_dealers):
            raise CorruptUpdate(f"{sender}: it complains of a device that dealt it no share")
        return replace(self, checked={**self.checked, sender: frozenset(checked.bad_dealers)})

    @property
    def complaints(self) -> dict[str, frozenset[str]]:
        """The dealers of bad shares, by complaining holder."""
        return {name: bad for name, bad in self.checked.items() if bad}

    @property
    def excluded(self) -> dict[str, HeadwaterError]:
        """The clients that answered but are not in U2, and why: a complaint concerns them.

        A client with fewer than t remaining holders is excluded too, repeatedly: in a sparse graph
        a neighbourhood may become too small although the cohort is large enough.
        """
        excluded = resolve_complaints(self.complaints)
        members = sorted(self.checked.keys() - excluded.keys())
        while short := self.session.short_of_holders(members, present=members):
            threshold = self.session.parameters.threshold
            reason = f"fewer than {threshold} of its holders remain"
            excluded |= {name: TooFewSurvivors(f"{name}: {reason}") for name in short}
            members = sorted(set(members) - set(short))
        return excluded

    def close(self) -> MaskPhase:
        """Fix U2, the clients that answered and are not ``excluded``.

        Raises:
            TooFewSurvivors: too few remain.
        """
        members = tuple(sorted(self.checked.keys() - self.excluded.keys()))
        check_enough(members, self.setup, what="can mask an update")
        return MaskPhase(
            setup=self.setup,
            session=self.session,
            dealt=self.dealt,
            members=members,
            total=MaskedSum.zeros(self.session.parameters),
        )


def resolve_complaints(complaints: Mapping[str, Iterable[str]]) -> dict[str, HeadwaterError]:
    """Return the clients to exclude so that no complaint (holder -> dealers) remains, and why.

    Either the holder or the dealer is at fault, and no third client can tell which. The client with
    the most complaints is excluded first, in a tie the dealer. A dealer of bad shares is therefore
    excluded alone, however many complain, and so is a holder that complains of many. A rule that
    always excludes the dealer would let one liar empty the session.
    """
    edges = {(holder, dealer) for holder, dealers in complaints.items() for dealer in dealers}
    excluded: dict[str, HeadwaterError] = {}
    while edges:
        dealers = {dealer for _, dealer in edges}
        count = Counter(end for edge in edges for end in edge)
        worst = max(count, key=lambda name: (count[name], name in dealers, name))
        others = sorted({end for edge in edges if worst in edge for end in edge} - {worst})
        excluded[worst] = WrongShare(
            f"{worst}: between it and {', '.join(others[:5])} shares are bad"
        )
        edges = {edge for edge in edges if worst not in edge}
    return excluded
