"""A secure session's parameters, and the checks that every reply and every phase must pass."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TypeVar

from headwater.common.errors import (
    LateUpdate,
    NoSuchGraph,
    TooFewSurvivors,
    UnexpectedUpdate,
)
from headwater.common.privacy.clip_bit import bit_scalar
from headwater.common.privacy.noise_shares import check_room, private_clip
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.fixed_point import Encoding, RingBits, plan_encoding
from headwater.common.secagg.graph import SECURITY_BITS, Mode, ceil_fraction, graph_size
from headwater.common.secagg.hadamard_rotation import rotated_encoding
from headwater.common.secagg.protocol import (
    MAX_COMPLETE,
    NUM_CLIPPED,
    PHASES,
    WEIGHT,
    Member,
    Parameters,
    Reply,
    SessionNumber,
    complete_threshold,
    max_clipped,
)
from headwater.common.secagg.scalar_encoding import Scalar, plan_scalar, plan_sums
from headwater.common.settings.rounds import MIN_MEMBERS
from headwater.common.terms import SumOf

R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSetup:
    """The server's choices for a session before it knows which clients advertise keys.

    ``planned_weights`` has an entry for each client with an update. ``added_weights`` are those of
    all clients whose sums are added to this session's in the ring; None: the session's own.
    ``bounds`` are the largest absolute values of the masked numbers other than weight and clipped
    count, ``sums`` the sums beside the model's. ``corrupted`` and ``dropout`` are the fractions of
    clients that a sparse graph must tolerate, except with probability 2^-``SECURITY_BITS``.
    """

    run: int
    number: SessionNumber
    mode: Mode
    model_digest: bytes
    plan_digest: bytes
    num_values: int
    planned_weights: Mapping[str, int]
    added_weights: tuple[int, ...] | None = None
    clip: float
    ring_bits: RingBits = 32
    bounds: Mapping[str, float] = field(default_factory=dict)
    rotation_seed: bytes | None = None
    bounds_digest: bytes | None = None
    min_members: int = MIN_MEMBERS
    min_survivors: float = 0.7
    corrupted: float = 0.1
    dropout: float = 0.1
    privacy: PrivacyTerms | None = None
    sums: Mapping[str, SumOf] = field(default_factory=dict)

    @property
    def least_members(self) -> int:
        """The smallest number of members in any phase."""
        return max(MIN_MEMBERS, self.min_members)

    def least_survivors(self, num_shared: int) -> int:
        """Return how many of ``num_shared`` members must survive; the clients require it too."""
        return ceil_fraction(self.min_survivors, num_shared)


@functools.lru_cache(maxsize=1024)
def most_members(
    num_ready: int, *, least: int, mode: Mode, corrupted: float, dropout: float
) -> int:
    """Return how many of so many ready clients a session takes: all, if there is a graph of them.

    There is none from some number on, as no client has more than 255 neighbours; and a few smaller
    numbers have none, as so many corrupted and dropped clients are rounded up. Bisection then finds
    a number that has a graph, while the next one has none.

    Raises:
        NoSuchGraph: the session would have fewer than ``least`` members.
    """

    def has_graph(number: int) -> bool:
        try:
            graph_size(
                number, corrupted=corrupted, dropout=dropout, mode=mode, security_bits=SECURITY_BITS
            )
        except NoSuchGraph:
            return False
        return True

    if num_ready <= MAX_COMPLETE or has_graph(num_ready):
        return num_ready
    found, too_many = MAX_COMPLETE, num_ready
    while too_many - found > 1:
        middle = (found + too_many) // 2
        if has_graph(middle):
            found = middle
        else:
            too_many = middle
    if found < least:
        raise NoSuchGraph(
            f"{num_ready} devices are ready, and a session may have {found} of them, but needs "
            f"{least}: no sparse graph of more devices tolerates {corrupted:.1%} corrupted and "
            f"{dropout:.1%} dropped out in {mode} mode"
        )
    return found


def parameters_of(setup: SessionSetup, members: Iterable[Member]) -> Parameters:
    """Return the parameters of a session of these members.

    The graph is complete up to ``MAX_COMPLETE`` members, and k-regular above.
    """
    rows = list(members)
    num_members = len(rows)
    weights = list(setup.added_weights or (member.planned_weight for member in rows))
    if num_members <= MAX_COMPLETE:
        k, t = None, complete_threshold(num_members, setup.mode)
    else:
        size = graph_size(
            num_members,
            corrupted=setup.corrupted,
            dropout=setup.dropout,
            mode=setup.mode,
            security_bits=SECURITY_BITS,
        )
        k, t = size.num_neighbours, size.threshold
    has_aes = all(member.has_aes for member in rows)
    return Parameters(
        run=setup.run,
        round=setup.number.round,
        attempt=setup.number.attempt,
        mode=setup.mode,
        plan=setup.plan_digest,
        threshold=t,
        num_neighbours=k,
        cipher="aes256-ctr" if has_aes else "chacha20",
        num_values=setup.num_values,
        encoding=_encoding(setup, weights, num_members),
        scalars=tuple(_scalars(setup, len(weights), max(weights))),
        sums=plan_sums(setup.sums, num_devices=len(weights)),
        rotation_seed=setup.rotation_seed,
        bounds_digest=setup.bounds_digest,
    )


def _encoding(setup: SessionSetup, weights: Sequence[int], num_members: int) -> Encoding:
    terms, planned_weight = setup.privacy, sum(weights)
    ring_weight = len(weights) * max(weights)  # all members have the same bound
    if terms is not None:
        most_groups = len(weights) // MIN_MEMBERS if setup.added_weights else 1
        clip = private_clip(terms, weights, setup.num_values, num_sums=most_groups)
        encoding = plan_encoding(max_weight=planned_weight, clip=clip)
        check_room(terms, encoding, num_values=setup.num_values, num_members=num_members)
        return encoding
    if setup.ring_bits < 32:
        return rotated_encoding(max_weight=ring_weight, ring_bits=setup.ring_bits)
    return plan_encoding(max_weight=ring_weight, clip=setup.clip, ring_bits=setup.ring_bits)


def _scalars(setup: SessionSetup, num_devices: int, max_weight: int) -> Iterable[Scalar]:
    terms = setup.privacy
    has_bits = terms is not None and terms.bit_multiplier is not None
    num_clips = max_clipped(setup.num_values, len(setup.bounds) + 2 + has_bits)
    for name, bound in ((WEIGHT, max_weight), (NUM_CLIPPED, num_clips)):
        yield plan_scalar(name, bound=float(bound), num_devices=num_devices, is_count=True)
    for name, limit in sorted(setup.bounds.items()):
        yield plan_scalar(name, bound=limit, num_devices=num_devices)
    if terms is not None and has_bits:
        yield bit_scalar(terms, num_devices=num_devices)


def check_reply(
    reply: Reply, kind: type[R], *, sender: str, awaited: Container[str], received: Container[str]
) -> R:
    """Return a reply if it belongs to this phase and is the sender's first.

    Raises:
        LateUpdate: it belongs to an earlier phase; its sender has been declared dropped.
        UnexpectedUpdate: it is not awaited, was received before, or names another sender.
    """
    if not isinstance(reply, kind):
        order: list[type] = [phase.reply for phase in PHASES]
        is_late = order.index(type(reply)) < order.index(kind)
        error = LateUpdate if is_late else UnexpectedUpdate
        raise error(f"{sender}: sent a {type(reply).__name__}, expected a {kind.__name__}")
    if reply.name != sender:
        raise UnexpectedUpdate(f"{sender}: sent a {kind.__name__} under the name of {reply.name}")
    if sender in received:
        raise UnexpectedUpdate(f"{sender}: its {kind.__name__} was received before")
    if sender not in awaited:
        raise UnexpectedUpdate(f"{sender}: the session awaits no {kind.__name__} from it")
    return reply


def check_enough(names: Sized, setup: SessionSetup, *, what: str) -> None:
    """Check that at least ``least_members`` remain; ``what`` says what they did.

    Raises:
        TooFewSurvivors: fewer remain.
    """
    count = len(names)
    if count < setup.least_members:
        raise TooFewSurvivors(
            f"{setup.number}: {count} devices {what}, at least {setup.least_members} must"
        )
