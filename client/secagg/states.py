"""The states of a device in a secure session, one for each phase, and which secrets each still has.

Secrets are in memory only, behind reprs that show nothing, and a phase hands on none that no later
phase needs; what erasing can mean in Python is said in ``headwater.common.secagg.protocol.secret``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg.types import Device, Record
from headwater.common.secagg.keys import KeyPair
from headwater.common.secagg.masking import Stream
from headwater.common.secagg.protocol import KeysAdvertised, KeysWanted, SharesRevealed
from headwater.common.secagg.rotation import Rotation
from headwater.common.secagg.secret import Secret
from headwater.common.secagg.session import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class Advertised:
    """Behind phase 0: two fresh key pairs."""

    device: Device
    record: Record
    wanted: KeysWanted
    keys: KeysAdvertised
    mask_pair: KeyPair
    sharing_pair: KeyPair

    def secrets(self) -> Iterator[Secret]:
        yield from (self.mask_pair.private, self.sharing_pair.private)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealt:
    """Behind phase 1: the session is known, and the own secrets are shared out."""

    device: Device
    record: Record
    session: Session
    mask_pair: KeyPair
    sharing_pair: KeyPair
    self_seed: Secret

    def secrets(self) -> Iterator[Secret]:
        yield from (self.mask_pair.private, self.sharing_pair.private, self.self_seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldShare:
    """What a device holds of a dealer: a share of each of its two secrets."""

    mask_key: Secret
    self_seed: Secret


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Before phase 2: the others' shares are here, and good but for ``bad_dealers``."""

    device: Device
    record: Record
    session: Session
    mask_pair: KeyPair
    self_seed: Secret
    held: Mapping[str, HeldShare]
    bad_dealers: frozenset[str]

    def secrets(self) -> Iterator[Secret]:
        yield from (self.mask_pair.private, self.self_seed)
        yield from _both(self.held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """In phase 2, when everything was checked and nothing is masked yet."""

    device: Device
    record: Record
    holding: Holding
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
class Masked:
    """Behind phase 2: the update is masked; only the others' shares are still needed."""

    device: Device
    record: Record
    session: Session
    members: tuple[str, ...]
    held: Mapping[str, HeldShare]

    def secrets(self) -> Iterator[Secret]:
        yield from _both(self.held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Revealed:
    """Behind phase 4: nothing is left to tell."""

    device: Device
    record: Record
    session: Session
    members: tuple[str, ...]
    answer: SharesRevealed = field(repr=False)

    def secrets(self) -> Iterator[Secret]:
        yield from ()


State = Advertised | Dealt | Holding | Ready | Masked | Revealed


def _both(held: Mapping[str, HeldShare]) -> Iterator[Secret]:
    for share in held.values():
        yield from (share.mask_key, share.self_seed)


def erase(state: State) -> None:
    """Overwrite whatever secrets a state still has."""
    for secret in state.secrets():
        secret.erase()
