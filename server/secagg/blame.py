"""Decides which clients made a secure session fail.

One client that violates the protocol could abort every round. A client at fault for an aborted
round is therefore excluded from the round's further attempts and from the following rounds
(``headwater.server.planning.exclusions``).

A hostile client may also accuse honest ones, so a few accusations exclude nobody:

=========================  ========================================================================
evidence from              a client is at fault if
=========================  ========================================================================
the server                 the server's own check rejected its reply, other than for being late; or
                           correct shares reconstruct a secret that differs from what it published
                           (``DealerCheated``)
more than a third          more than a third of the members refused its keys or found its shares
                           bad: if fewer than a third are dishonest, at least one of them is honest
its own accusations        it found the shares of more than a third bad: not all of them lie
=========================  ========================================================================

A client is not at fault for leaving, for silence or for an error that it reports: honest clients
cause these too. ``server.secagg.group_testing`` finds who masked an impossible number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headwater.common.errors import (
    DealerCheated,
    HeadwaterError,
    IdentityUnknown,
    LateUpdate,
    RoundAborted,
    SignatureRefused,
)
from headwater.common.secagg.protocol import accused_in

MAX_REASON_CHARACTERS = 200

ACCUSING = (IdentityUnknown, SignatureRefused)


class Evidence:
    """Events of one session up to its abort."""

    def __init__(self) -> None:
        self.members: frozenset[str] = frozenset()
        self.has_masked = False
        """Whether a client may have masked its update, which then cannot enter another session."""
        self._rejected: dict[str, HeadwaterError] = {}
        self._accused: dict[str, frozenset[str]] = {}
        self._complaints: dict[str, frozenset[str]] = {}

    def add_rejected(self, name: str, error: HeadwaterError) -> None:
        """Record that the server's own check rejected a client's reply."""
        if not isinstance(error, LateUpdate):
            self._rejected[name] = error

    def add_client_error(self, name: str, error: HeadwaterError) -> None:
        """Record a client's error; some errors accuse other members."""
        if isinstance(error, ACCUSING):
            self._accused[name] = accused_in(str(error))

    def add_complaints(self, complaints: Mapping[str, Collection[str]]) -> None:
        """Record the complaints of bad shares (holder -> dealers)."""
        self._complaints = {holder: frozenset(dealers) for holder, dealers in complaints.items()}

    def at_fault(self, aborted: RoundAborted) -> dict[str, str]:
        """Return the clients at fault for an aborted session, and why."""
        reasons = {name: f"{error.code}: {error}" for name, error in self._rejected.items()}
        if isinstance(aborted, DealerCheated):
            reasons |= dict.fromkeys(aborted.dealers, f"{aborted.code}: {aborted}")
        for kind, claims in (("keys", self._accused), ("shares", self._complaints)):
            for name in sorted(self.members):
                accusers = {accuser for accuser, names in claims.items() if name in names} - {name}
                if self._is_enough(accusers):
                    reasons.setdefault(
                        name, f"{len(accusers)} of {len(self.members)} devices refused its {kind}"
                    )
        for holder, dealers in self._complaints.items():
            if self._is_enough(dealers - reasons.keys()):
                reasons.setdefault(
                    holder,
                    f"it complained of the shares of {len(dealers)} of {len(self.members)} devices",
                )
        return {name: reason[:MAX_REASON_CHARACTERS] for name, reason in reasons.items()}

    def _is_enough(self, names: Collection[str]) -> bool:
        return 3 * len(set(names) & self.members) > len(self.members)
