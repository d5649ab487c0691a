"""The states of a client's secure session, named for the message that each one waits for.

A state holds exactly the secrets that later phases need. Secrets are in memory only, and their repr
shows nothing. ``common.secagg.secret`` says what erasing can mean in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg.types import Participant, SessionRecord
from headwater.common.secagg.hadamard_rotation import Rotation
from headwater.common.secagg.keys import KeyPair
from headwater.common.secagg.masking import Stream
from headwater.common.secagg.protocol import KeysReply, KeysRequest, UnmaskReply
from headwater.common.secagg.secret import Secret
from headwater.common.secagg.session import SessionView


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitingRoster:
    """After phase 0: the client made two key pairs."""

    device: Participant
    record: SessionRecord
    request: KeysRequest
    keys: KeysReply
    mask_pair: KeyPair
    sharing_pair: KeyPair

    def secrets(self) -> Iterator[Secret]:
        yield from (self.mask_pair.private, self.sharing_pair.private)


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitingShares:
    """After phase 1: the session is known, and the client has sent shares of its two secrets."""

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
    """One dealer's shares at this client: a share of each of the dealer's two secrets."""

    mask_key: Secret
    self_seed: Secret


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitingMaskRequest:
    """Before phase 2: the client has opened its shares; those of ``bad_dealers`` were not good."""

    device: Participant
    record: SessionRecord
    session: SessionView
    mask_pair: KeyPair
    self_seed: Secret
    shares: Mapping[str, DealerShares]
    bad_dealers: frozenset[str]

    def secrets(self) -> Iterator[Secret]:
        yield from (self.mask_pair.private, self.self_seed)
        yield from _secrets_of(self.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyToMask:
    """In phase 2: all checks passed, and nothing is masked yet."""

    device: Participant
    record: SessionRecord
    previous: AwaitingMaskRequest
    members: tuple[str, ...]
    streams: tuple[Stream, ...]
    rotation: Rotation | None
    bounds: NDArray[np.float32] | None = field(repr=False)
    noise_sigma: int | None = None
    """The parameter of the noise that the device adds; None if the session needs none."""

    def mask_secrets(self) -> Iterator[Secret]:
        """Yield the secrets that the masks are made from; masking is their last use."""
        yield from (stream.key for stream in self.streams)
        yield from (self.previous.mask_pair.private, self.previous.self_seed)

    def secrets(self) -> Iterator[Secret]:
        yield from self.mask_secrets()
        yield from _secrets_of(self.previous.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitingUnmask:
    """After phase 2: the update is masked; only the other members' shares are still needed."""

    device: Participant
    record: SessionRecord
    session: SessionView
    members: tuple[str, ...]
    shares: Mapping[str, DealerShares]

    def secrets(self) -> Iterator[Secret]:
        yield from _secrets_of(self.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionFinished:
    """After phase 4: the client has revealed its shares, and repeats only that reply."""

    device: Participant
    record: SessionRecord
    session: SessionView
    members: tuple[str, ...]
    reply: UnmaskReply = field(repr=False)

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


def _secrets_of(shares: Mapping[str, DealerShares]) -> Iterator[Secret]:
    for pair in shares.values():
        yield from (pair.mask_key, pair.self_seed)


def erase(state: SessionState) -> None:
    """Overwrite the secrets that a state still holds."""
    for secret in state.secrets():
        secret.erase()
