"""What the server chooses for a secure session, and what it holds every reply against."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import TypeVar

from headwater.common.errors import LateUpdate, TooFewSurvivors, UnexpectedUpdate
from headwater.common.secagg.fixed_point import Encoding, RingBits, plan_encoding
from headwater.common.secagg.graph import SECURITY_BITS, Mode, ceil_fraction, graph_size
from headwater.common.secagg.protocol import (
    LEAST_MEMBERS,
    MAX_COMPLETE,
    NUM_CLIPPED,
    PHASES,
    WEIGHT,
    Member,
    Parameters,
    Reply,
    SessionNumber,
    complete_threshold,
    most_clipped,
)
from headwater.common.secagg.rotation import rotated_encoding
from headwater.common.secagg.scalars import Scalar, plan_scalar

R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSetup:
    """What the server chose for a session before it knows who takes part.

    ``planned_weights`` are of the devices that said they have an update, by name. ``bounds`` are
    the largest absolute values of the numbers that ride along beside weight and clipped count.
    ``corrupted`` and ``dropout`` are the shares that a sparse graph must bear, but for a chance of
    2^-``bits``.
    """

    run: int
    number: SessionNumber
    mode: Mode
    model_digest: bytes
    num_values: int
    planned_weights: Mapping[str, int]
    clip: float
    ring_bits: RingBits = 32
    bounds: Mapping[str, float] = field(default_factory=dict)
    rotation_seed: bytes | None = None
    bounds_digest: bytes | None = None
    min_members: int = LEAST_MEMBERS
    min_survivors: float = 0.7
    corrupted: float = 0.1
    dropout: float = 0.1
    bits: int = SECURITY_BITS

    @property
    def least_members(self) -> int:
        """How many members a session has at least, in every phase."""
        return max(LEAST_MEMBERS, self.min_members)

    def least_survivors(self, num_shared: int) -> int:
        """Return how many of those who shared must survive, for the devices to agree."""
        return ceil_fraction(self.min_survivors, num_shared)


def parameters_of(opening: SessionSetup, members: Iterable[Member]) -> Parameters:
    """Return the parameters of a session of these members.

    The complete graph's thresholds hold up to ``MAX_COMPLETE`` members, those of a k-regular graph
    above.
    """
    rows = list(members)
    num_members = len(rows)
    weights = [member.planned_weight for member in rows]
    if num_members <= MAX_COMPLETE:
        k, t = None, complete_threshold(num_members, opening.mode)
    else:
        size = graph_size(
            num_members,
            corrupted=opening.corrupted,
            dropout=opening.dropout,
            mode=opening.mode,
            security_bits=opening.bits,
        )
        k, t = size.num_neighbours, size.threshold
    has_aes = all(member.has_aes for member in rows)
    return Parameters(
        run=opening.run,
        round=opening.number.round,
        attempt=opening.number.attempt,
        mode=opening.mode,
        threshold=t,
        num_neighbours=k,
        cipher="aes256-ctr" if has_aes else "chacha20",
        num_values=opening.num_values,
        encoding=_encoding(opening, sum(weights)),
        scalars=tuple(_scalars(opening, num_members, max(weights))),
        rotation_seed=opening.rotation_seed,
        bounds_digest=opening.bounds_digest,
    )


def _encoding(opening: SessionSetup, planned_weight: int) -> Encoding:
    if opening.ring_bits == 16:
        return rotated_encoding(max_weight=planned_weight)
    return plan_encoding(max_weight=planned_weight, clip=opening.clip)


def _scalars(opening: SessionSetup, num_devices: int, largest_weight: int) -> Iterable[Scalar]:
    num_clips = most_clipped(opening.num_values, len(opening.bounds) + 2)
    for name, most in ((WEIGHT, largest_weight), (NUM_CLIPPED, num_clips)):
        yield plan_scalar(name, bound=float(most), num_devices=num_devices, is_count=True)
    for name, bound in sorted(opening.bounds.items()):
        yield plan_scalar(name, bound=bound, num_devices=num_devices)


def check_reply(
    reply: Reply, kind: type[R], *, sender: str, awaited: Container[str], there: Container[str]
) -> R:
    """Return a reply if it is of this phase, and its sender's first.

    Raises:
        LateUpdate: it belongs to a phase that was closed; its sender was declared dropped.
        UnexpectedUpdate: nobody asked for it, it is here already, or it names somebody else.
    """
    if not isinstance(reply, kind):
        order: list[type] = [phase.reply for phase in PHASES]
        is_late = order.index(type(reply)) < order.index(kind)
        error = LateUpdate if is_late else UnexpectedUpdate
        raise error(f"{sender}: a {type(reply).__name__} where a {kind.__name__} is awaited")
    if reply.name != sender:
        raise UnexpectedUpdate(f"{sender}: a {kind.__name__} under the name of {reply.name}")
    if sender in there:
        raise UnexpectedUpdate(f"{sender}: its {kind.__name__} is here already")
    if sender not in awaited:
        raise UnexpectedUpdate(f"{sender}: no {kind.__name__} of it is awaited")
    return reply


def check_enough(names: Sized, opening: SessionSetup, *, what: str) -> None:
    """Abort if fewer are left than any session needs.

    Raises:
        TooFewSurvivors: saying so.
    """
    count = len(names)
    if count < opening.least_members:
        raise TooFewSurvivors(
            f"{opening.number}: {count} devices {what}, at least {opening.least_members} must"
        )
