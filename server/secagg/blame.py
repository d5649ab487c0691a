"""Who made a secure session fail, and for how long it has no part in what follows.

One device that does not keep to the protocol could abort every round. A device that is found to be
at fault for an aborted round is therefore excluded from its further attempts and from the following
rounds (``headwater.server.planning.exclusions``).

A hostile device may also accuse others, so nobody is left out on the word of a few:

=========================  ========================================================================
found out by               because
=========================  ========================================================================
the server                 its answer was refused by the server's own check, and not for being late;
                           or good shares open something else than it published (``DealerCheated``)
more than a third          more than a third of the members refuse the session for its keys, or
                           found its shares bad: one of them at least is honest, where fewer than a
                           third are not
its own accusations        it found the shares of more than a third bad: they do not all lie
=========================  ========================================================================

Nobody answers for leaving, for silence, for an error of its own, or for a masked sum that cannot
be: these are an honest device's mishaps as well, or hidden by the masks.
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
    """What a session showed, up to where it was aborted."""

    def __init__(self) -> None:
        self.members: frozenset[str] = frozenset()
        self.has_masked = False
        """Whether a device may have masked its update, so that it can go into no other session."""
        self._rejected: dict[str, HeadwaterError] = {}
        self._accused: dict[str, frozenset[str]] = {}
        self._complaints: dict[str, frozenset[str]] = {}

    def rejected(self, name: str, error: HeadwaterError) -> None:
        """Take note that the server's own check refused a device's answer."""
        if not isinstance(error, LateUpdate):
            self._rejected[name] = error

    def refused(self, name: str, error: HeadwaterError) -> None:
        """Take note of a device's error; some accuse other members."""
        if isinstance(error, ACCUSING):
            self._accused[name] = accused_in(str(error))

    def complained(self, complaints: Mapping[str, Collection[str]]) -> None:
        """Take note whose shares devices found bad (holder -> dealers)."""
        self._complaints = {holder: frozenset(dealers) for holder, dealers in complaints.items()}

    def culprits(self, aborted: RoundAborted) -> dict[str, str]:
        """Return who is at fault for an aborted session, and why."""
        found = {name: f"{error.code}: {error}" for name, error in self._rejected.items()}
        if isinstance(aborted, DealerCheated):
            found |= dict.fromkeys(aborted.dealers, f"{aborted.code}: {aborted}")
        for kind, claims in (("keys", self._accused), ("shares", self._complaints)):
            for name in sorted(self.members):
                accusers = {who for who, names in claims.items() if name in names} - {name}
                if self._is_enough(accusers):
                    found.setdefault(
                        name, f"{len(accusers)} of {len(self.members)} devices refused its {kind}"
                    )
        for holder, dealers in self._complaints.items():
            if self._is_enough(dealers - found.keys()):
                found.setdefault(
                    holder,
                    f"it complained of the shares of {len(dealers)} of {len(self.members)} devices",
                )
        return {name: why[:MAX_REASON_CHARACTERS] for name, why in found.items()}

    def _is_enough(self, names: Collection[str]) -> bool:
        return 3 * len(set(names) & self.members) > len(self.members)
