"""A client's inputs to a secure session: its update, security floor and session record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.fixed_point import MAX_CLIP, MIN_CLIP
from headwater.common.secagg.graph import SECURITY_BITS, Mode
from headwater.common.secagg.identity import AllowList, SigningIdentity
from headwater.common.secagg.protocol import WEIGHT, SessionNumber
from headwater.common.settings.rounds import MIN_MEMBERS
from headwater.common.terms import SumOf


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """The client's own minimum security settings. It refuses a session with weaker parameters.

    ``corrupted`` and ``dropout`` are the fractions of members that the client assumes to collude
    with the server and to drop out, ``bits`` is -log2 of the failure probability that it accepts:
    the three decide which sparse graphs are dense enough.
    ``min_survivors`` is the fraction of U2 that must be in the sum. ``max_share`` is the largest
    part of the session's weight that may be the client's own, and 2^``member_bits`` the fewest
    steps of the ring that each member must have for a coordinate.
    """

    mode: Mode = "semi-honest"
    min_members: int = MIN_MEMBERS
    min_survivors: float = 0.7
    max_share: float = 0.6
    member_bits: int = 4
    corrupted: float = 0.1
    dropout: float = 0.1
    bits: int = SECURITY_BITS
    ring_bits: frozenset[int] = frozenset({8, 16, 32, 64})
    min_clip: float = MIN_CLIP
    max_clip: float = MAX_CLIP


@dataclass(frozen=True, kw_only=True, slots=True)
class Participant:
    """A client with one update, in the secure sessions of one round.

    ``update_id`` names the model and the examples that were summed: the same sum has the same id,
    also after a restart. ``examples`` are the numbers of those examples in the client's data.
    ``num_planned`` are the examples that the plan asked for, whatever became of them.
    ``other_subjects`` are the digests of what else the sums are of (``Terms.other_subjects``).
    ``planned_weight`` is the largest weight that the client's plan allows, ``carried_weight`` that
    of earlier updates, of which the vector has a part (``client.compression.error_feedback``).
    ``sums`` are those that the plan asks for beside the model's.
    """

    name: str
    run: int
    round: int
    model_digest: bytes
    other_subjects: tuple[bytes, ...] = ()
    plan_digest: bytes
    num_values: int
    planned_weight: int
    carried_weight: int = 0
    update_id: str
    examples: tuple[int, ...] = field(default=(), repr=False)
    num_planned: int = 0
    floor: Floor = Floor()
    identity: SigningIdentity | None = None
    allow_list: AllowList | None = None
    has_aes: bool = False
    privacy: PrivacyTerms | None = None
    sums: Mapping[str, SumOf] = field(default_factory=dict)
    random: Callable[[int], bytes] = field(default=os.urandom, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """What must outlive the process, for one run; it holds no secret.

    A record is stored before the reply that it belongs to is sent. ``highest`` is the last session
    that was opened, ``masked`` the id of the last masked update. ``answered`` is the digest of the
    session and of the survivor set that the client signed or revealed shares for, in hex.
    """

    highest: SessionNumber | None = None
    masked: str | None = None
    answered: tuple[str, str] | None = None

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> SessionRecord:
        """Build a record from the output of ``dataclasses.asdict``, also after JSON."""
        highest, answered = plain["highest"], plain["answered"]
        return cls(
            highest=None if highest is None else SessionNumber(**highest),
            masked=plain["masked"],
            answered=None if answered is None else (answered[0], answered[1]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmaskedUpdate:
    """A finished update before it is masked. Masking happens in the memory of ``values_P``.

    ``numbers`` are all masked numbers except ``num_clipped``, by their names in the parameters.
    """

    values_P: Tensor = field(repr=False)
    numbers: Mapping[str, float | int] = field(repr=False)
    sums_S: Tensor = field(default_factory=lambda: torch.zeros(0), repr=False)
    """The sums beside the model's, one after the other in the plan's order, in float32."""

    @property
    def weight(self) -> int:
        """The update's weight: what the vector was summed over."""
        return int(self.numbers[WEIGHT])


def read_record(plain: Mapping[str, Any] | None) -> SessionRecord:
    """Return the record of a run's secure sessions; empty if there is no entry."""
    return SessionRecord() if plain is None else SessionRecord.of(plain)
