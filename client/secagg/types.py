"""What a device brings into a secure session: who it is, what it insists on, what it remembers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from headwater.common.secagg.fixed_point import LARGEST_CLIP, LEAST_CLIP
from headwater.common.secagg.graph import SECURITY_BITS, Mode
from headwater.common.secagg.identity import AllowList, SigningIdentity
from headwater.common.secagg.protocol import LEAST_MEMBERS, WEIGHT, SessionNumber


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The device's own settings, below which no server's choice may go.

    ``corrupted`` and ``dropout`` are the shares of the members that the device assumes to collude
    with the server and to vanish, ``bits`` is -log2 of the failure it bears: they decide which
    sparse graphs are dense enough.
    ``min_survivors`` is the share of those who dealt shares that must be in the sum.
    """

    mode: Mode = "semi-honest"
    min_members: int = LEAST_MEMBERS
    min_survivors: float = 0.7
    corrupted: float = 0.1
    dropout: float = 0.1
    bits: int = SECURITY_BITS
    ring_bits: frozenset[int] = frozenset({16, 32})
    min_clip: float = LEAST_CLIP
    max_clip: float = LARGEST_CLIP


@dataclass(frozen=True, kw_only=True, slots=True)
class Participant:
    """A device that has an update of one round, and would give it into a session.

    ``update_id`` names the examples that were summed and the model: the same for the same sum, also
    after a restart. ``planned_weight`` is the largest weight that its plan allows.
    """

    name: str
    run: int
    round: int
    model_digest: bytes
    num_values: int
    planned_weight: int
    update_id: str
    floor: Floor = Floor()
    identity: SigningIdentity | None = None
    allow_list: AllowList | None = None
    has_aes: bool = False
    random: Callable[[int], bytes] = field(default=os.urandom, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """What must outlive the process, for one run; there is no secret in it.

    It is stored before the answer that it belongs to is sent. ``answered`` is the session's digest
    and that of the survivor set for which the device has signed or revealed shares, in hex.
    """

    highest: SessionNumber | None = None
    masked: str | None = None
    answered: tuple[str, str] | None = None

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> SessionRecord:
        """Read back what ``dataclasses.asdict`` wrote, also when it went through JSON."""
        highest, answered = plain["highest"], plain["answered"]
        return cls(
            highest=None if highest is None else SessionNumber(**highest),
            masked=plain["masked"],
            answered=None if answered is None else (answered[0], answered[1]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmaskedUpdate:
    """A finished update before it is masked; the vector's memory is masked in place.

    ``numbers`` are all that rides along but ``num_clipped``, by the names in the parameters.
    """

    values_P: Tensor = field(repr=False)
    numbers: Mapping[str, float | int] = field(repr=False)

    @property
    def weight(self) -> int:
        """What the vector was summed over."""
        return int(self.numbers[WEIGHT])
