"""The states of a device in a secure session, one for each phase, and which secrets each still has.

Secrets are in memory only, behind reprs that show nothing, and a phase hands on none that no later
phase needs; what erasing can mean in Python is said in ``headwater.common.secagg.protocol.secret``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg.types import Participant, SessionRecord
from headwater.common.secagg.keys import KeyPair
from headwater.common.secagg.masking import Stream
from headwater.common.secagg.protocol import KeysReply, KeysRequest, UnmaskReply
from headwater.common.secagg.rotation import Rotation
from headwater.common.secagg.secret import Secret
from headwater.common.secagg.session import SessionView


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitingRoster:
    """Behind phase 0: two fresh key pairs."""

    device: Participant
    record: SessionRecord
    wanted: KeysRequest
    keys: KeysReply
    mask_pair: KeyPair
    sharing_pair: KeyPair

    def secrets(self) -> Iterator[Secret]:
        yield from (self.mask_pair.private, self.sharing_pair.private)


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitingShares:
    """Behind phase 1: the session is known, and the own secrets are shared out."""

    device: Participant
    record: SessionRecord
    session: SessionView
    mask_pair: KeyPair
    sharing_pair: KeyPair
    self_seed: Secret

    def secrets(self) -> Iterator[Secret]:
        yield from (self.mask_pair.private, self.sharing_pair.private, self.self_seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class DealerShares:
    """What a device holds of a dealer: a share of each of its two secrets."""

    mask_key: Secret
    self_seed: Secret


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitingMaskRequest:
    """Before phase 2: the others' shares are here, and good but for ``bad_dealers``."""

    device: Participant
    record: SessionRecord
    session: SessionView
    mask_pair: KeyPair
    self_seed: Secret
    held: Mapping[str, DealerShares]
    bad_dealers: frozenset[str]

    def secrets(self) -> Iterator[Secret]:
        yield from (self.mask_pair.private, self.self_seed)
        yield from _both(self.held)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyToMask:
    """In phase 2, when everything was checked and nothing is masked yet."""

    device: Participant
    record: SessionRecord
    holding: AwaitingMaskRequest
    members: tuple[str, ...]
    streams: tuple[Stream, ...]
    rotation: Rotation | None
    bounds: NDArray[np.float32] | None = field(repr=False)

    def mask_secrets(self) -> Iterator[Secret]:
        """Yield what the masks are made from: nobody needs it once the update is masked."""
        yield from (stream.key for stream in self.streams)
        yield from (self.holding.mask_pair.private, self.holding.self_seed)

    def secrets(self) -> Iterator[Secret]:
        yield from self.mask_secrets()
        yield from _both(self.holding.held)


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitingUnmask:
    """Behind phase 2: the update is masked; only the others' shares are still needed."""

    device: Participant
    record: SessionRecord
    session: SessionView
    members: tuple[str, ...]
    held: Mapping[str, DealerShares]

    def secrets(self) -> Iterator[Secret]:
        yield from _both(self.held)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionFinished:
    """Behind phase 4: nothing is left to tell."""

    device: Participant
    record: SessionRecord
    session: SessionView
    members: tuple[str, ...]
    answer: UnmaskReply = field(repr=False)

    def secrets(self) -> Iterator[Secret]:
        yield from ()


SessionState = (
    AwaitingRoster
    | AwaitingShares
    | AwaitingMaskRequest
    | ReadyToMask
    | AwaitingUnmask
    | SessionFinished
)


def _both(held: Mapping[str, DealerShares]) -> Iterator[Secret]:
    for share in held.values():
        yield from (share.mask_key, share.self_seed)


def erase(state: SessionState) -> None:
    """Overwrite whatever secrets a state still has."""
    for secret in state.secrets():
        secret.erase()
