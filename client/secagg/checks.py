"""Everything that a device checks before it answers in a secure session, in one place.

A hostile server can make a session fail, as it can by being silent; it must not be able to make a
device show its update. Each line of ``CHECKS`` is one way to try, and the named error that refuses
it; tests/attacks/test_hostile_secagg_server.py tries them all. A refusal comes before the answer,
so what the server holds by then opens nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg.types import Participant, SessionRecord, UnmaskedUpdate
from headwater.common.errors import (
    BadPublicKey,
    BothSharesAsked,
    CohortTooSmall,
    ComplaintIgnored,
    CountOutOfRange,
    HeadwaterError,
    IdentityUnknown,
    MaskingTooWeak,
    ModelMismatch,
    NonFiniteUpdate,
    OutOfPhase,
    RingCanWrap,
    RosterRefused,
    SessionMismatch,
    SessionReplayed,
    SignatureRefused,
    SurvivorsChanged,
    SurvivorsNotAgreed,
    SurvivorsRefused,
    ThresholdTooHigh,
    ThresholdTooLow,
    UpdateAlreadyMasked,
)
from headwater.common.secagg.fixed_point import check_finite
from headwater.common.secagg.protocol import (
    LEAST_MEMBERS,
    NUM_CLIPPED,
    CheckRequest,
    Parameters,
    SurvivorsRequest,
    UnmaskRequest,
    share_of,
    signatures_needed,
)
from headwater.common.secagg.session import SessionView, survivors_digest, survivors_message


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What must hold in which phase, and the error that says it does not."""

    name: str
    action: str
    error: type[HeadwaterError]
    holds: str


def _rows(*rows: tuple[str, str, type[HeadwaterError], str]) -> tuple[Check, ...]:
    return tuple(Check(name=n, action=a, error=e, holds=h) for n, a, e, h in rows)


# fmt: off
CHECKS = _rows(
    ("new session", "advertise_keys", SessionReplayed,
     "the session is newer than any that it has seen, and of its update's round"),
    ("fresh update", "advertise_keys", UpdateAlreadyMasked,
     "the update went into no session before"),
    ("own mode", "advertise_keys", MaskingTooWeak,
     "the mode is no weaker than its own, and it has what active mode takes"),
    ("same session", "share_keys", SessionReplayed,
     "the roster is of the run, round, attempt and mode of its keys"),
    ("enough members", "share_keys", CohortTooSmall,
     "there are 3 members, and its own minimum"),
    ("unique members", "share_keys", RosterRefused,
     "no name and no key stands twice"),
    ("own entry", "share_keys", RosterRefused,
     "its entry is exactly what it advertised, with its own plan's weight"),
    ("known members", "share_keys", IdentityUnknown,
     "every member is on its allow-list (active)"),
    ("signed keys", "share_keys", SignatureRefused,
     "every member's identity signed its keys for this session (active)"),
    ("sharing keys", "share_keys", BadPublicKey,
     "no sharing key leads to an agreement that everybody can compute"),
    ("threshold", "share_keys", ThresholdTooLow,
     "t, and k of a sparse graph, meet the rule for n"),
    ("reachable threshold", "share_keys", ThresholdTooHigh,
     "t holders can be left after the dropouts that it assumes"),
    ("whole vector", "share_keys", ModelMismatch,
     "all its coordinates are masked"),
    ("ring and clip", "share_keys", MaskingTooWeak,
     "ring, clip bound, cipher, graph and masked counts are within its floor"),
    ("no overflow", "share_keys", RingCanWrap,
     "the sum of all planned weights fits the ring"),
    ("own dealers", "check_shares", RosterRefused,
     "shares are its own, from its dealers, once each"),
    ("same model", "check_shares", SessionMismatch,
     "a share of another opens: the others saw the same model and roster"),
    ("complaints", "masked_update", ComplaintIgnored,
     "no dealer stays whose share was bad"),
    ("maskers", "masked_update", RosterRefused,
     "U2 is of those who dealt, once each, and it is in U2"),
    ("enough maskers", "masked_update", CohortTooSmall,
     "U2 has 3 members, its own minimum, and t of its holders"),
    ("mask keys", "masked_update", BadPublicKey,
     "no mask key leads to an agreement that everybody can compute"),
    ("own numbers", "masked_update", ModelMismatch,
     "the masked numbers are those that its task gives"),
    ("own weight", "masked_update", CountOutOfRange,
     "its weight is within its plan"),
    ("finite", "masked_update", NonFiniteUpdate,
     "the vector and the numbers are finite"),
    ("block bounds", "masked_update", SessionMismatch,
     "a 16-bit ring's bounds are those that all agreed on"),
    ("one share each", "consistency, unmask", BothSharesAsked,
     "nobody both survived and dropped"),
    ("survivors", "consistency, unmask", SurvivorsRefused,
     "survived and dropped are U2, once each, and it survived"),
    ("enough survivors", "consistency, unmask", SurvivorsRefused,
     "3 survived, its own minimum, and its own share of U2"),
    ("holders", "consistency, unmask", SurvivorsRefused,
     "of each survivor t holders survived"),
    ("one survivor set", "consistency, unmask", SurvivorsChanged,
     "it is the only one of the session that it answers"),
    ("signed survivors", "unmask", SurvivorsNotAgreed,
     "enough members signed exactly this set (active)"),
    ("order", "any", OutOfPhase,
     "the message is the one that it awaits"),
)
# fmt: on


def check_unmasked(device: Participant, record: SessionRecord) -> None:
    """Check that the update went into no session before."""
    if record.masked == device.update_id:
        raise UpdateAlreadyMasked(
            f"{device.name}: the update {device.update_id} was masked before, in {record.highest}"
        )


def check_delivery(delivered: CheckRequest, session: SessionView, device: Participant) -> None:
    """Check that the shares are this device's, from its own dealers, once each."""
    dealers = [share.dealer for share in delivered.shares]
    if len(set(dealers)) != len(dealers) or not set(dealers) <= set(session.holders(device.name)):
        raise RosterRefused(f"{device.name}: shares from dealers that are not its own, or twice")
    if any(share.holder != device.name for share in delivered.shares):
        raise RosterRefused(f"{device.name}: shares for another holder")


def check_opened(
    good: Iterable[str], bad: Iterable[str], session: SessionView, device: Participant
) -> None:
    """Check that it is not this device itself that is in another session than the others."""
    num_good, num_bad = len(set(good) - {device.name}), len(set(bad))
    if device.name in set(bad) or (num_bad and not num_good):
        raise SessionMismatch(
            f"{device.name}: no share of {num_bad} opens in session {session.digest.hex()[:16]}: "
            "the others were shown another model, another roster or other parameters"
        )


def check_members(
    members: Sequence[str],
    *,
    session: SessionView,
    opened: Iterable[str],
    bad_dealers: frozenset[str],
    device: Participant,
) -> None:
    """Check U2: with whom the pairwise masks will cancel."""
    chosen, held = frozenset(members), frozenset(opened)
    if len(chosen) != len(members) or not chosen <= session.members.keys():
        raise RosterRefused(f"{device.name}: U2 names somebody twice, or from outside the roster")
    if device.name not in chosen:
        raise RosterRefused(f"{device.name}: it is asked to mask, and is not in U2")
    if chosen & bad_dealers:
        raise ComplaintIgnored(
            f"{device.name}: {', '.join(sorted(chosen & bad_dealers))} gave it bad shares and stays"
        )
    missing = (chosen & set(session.holders(device.name))) - held
    if missing:
        raise RosterRefused(f"{device.name}: no shares came from {', '.join(sorted(missing)[:3])}")
    least = max(LEAST_MEMBERS, device.floor.min_members)
    if len(chosen) < least or session.short_of_holders([device.name], present=chosen):
        raise CohortTooSmall(
            f"{device.name}: {len(chosen)} members would mask; at least {least} must, and "
            f"{session.parameters.threshold} of its own holders"
        )


def check_update(trained: UnmaskedUpdate, chosen: Parameters, device: Participant) -> None:
    """Check the update itself, before anything of it is changed."""
    names = {scalar.name for scalar in chosen.scalars} - {NUM_CLIPPED}
    if names != trained.numbers.keys():
        raise ModelMismatch(
            f"{device.name}: masked numbers {sorted(names)}, the update has "
            f"{sorted(trained.numbers)}"
        )
    if trained.values_P.numel() != device.num_values:
        raise ModelMismatch(
            f"{device.name}: {trained.values_P.numel():,} coordinates, expected "
            f"{device.num_values:,}"
        )
    if not 0 < trained.weight <= device.planned_weight:
        raise CountOutOfRange(
            f"{device.name}: the weight is not within its plan's {device.planned_weight:,}"
        )
    if not all(math.isfinite(value) for value in trained.numbers.values()):
        raise NonFiniteUpdate(f"{device.name}: a sum that would ride along is not finite")
    check_finite(trained.values_P.numpy())


def check_bounds(
    bounds: NDArray[np.float32] | None, chosen: Parameters, device: Participant, *, num_blocks: int
) -> NDArray[np.float32]:
    """Check the block bounds of a 16-bit ring against the digest that all members agreed on."""
    if bounds is None or hashlib.sha256(bounds.tobytes()).digest() != chosen.bounds_digest:
        raise SessionMismatch(f"{device.name}: the block bounds are not those of the parameters")
    floor = device.floor
    is_within = (bounds >= floor.min_clip) & (bounds <= floor.max_clip)  # not so of a NaN
    if bounds.shape != (num_blocks,) or not bool(is_within.all()):
        raise MaskingTooWeak(f"{device.name}: block bounds outside its floor, or not one a block")
    return bounds


def check_survivors(
    told: SurvivorsRequest | UnmaskRequest,
    *,
    session: SessionView,
    members: Iterable[str],
    device: Participant,
    record: SessionRecord,
) -> bytes:
    """Check U3 against U2 and what was answered before; return the set's digest."""
    survived, dropped, shared = set(told.survived), set(told.dropped), set(members)
    both = survived & dropped
    if both:
        raise BothSharesAsked(f"{device.name}: {', '.join(sorted(both)[:3])} survived and dropped")
    if (
        survived | dropped != shared
        or len(survived) != len(told.survived)
        or len(dropped) != len(told.dropped)
    ):
        raise SurvivorsRefused(
            f"{device.name}: survived and dropped are not, once each, the {len(shared)} who shared"
        )
    if device.name not in survived:
        raise SurvivorsRefused(f"{device.name}: it masked an update, and is not a survivor")
    floor = device.floor
    least = max(LEAST_MEMBERS, floor.min_members, share_of(floor.min_survivors, len(shared)))
    if len(survived) < least:
        raise SurvivorsRefused(
            f"{device.name}: {len(survived)} of {len(shared)} survived, at least {least} must"
        )
    short = session.short_of_holders(told.survived, present=survived)
    if short:
        raise SurvivorsRefused(
            f"{device.name}: fewer than {session.parameters.threshold} holders of {short[0]} "
            "survived: its neighbourhood would stand alone"
        )
    digest = survivors_digest(session=session.digest, survived=survived, dropped=dropped)
    answered = record.answered
    if answered is not None and answered[0] == session.digest.hex() and answered[1] != digest.hex():
        raise SurvivorsChanged(f"{device.name}: a second survivor set in one session")
    return digest


def check_signatures(
    wanted: UnmaskRequest, *, digest: bytes, session: SessionView, device: Participant
) -> None:
    """Check that enough members signed exactly this set; signatures of others do not count."""
    if device.allow_list is None:
        raise MaskingTooWeak(f"{device.name}: active mode without an allow-list")
    survived, message = set(wanted.survived), survivors_message(digest)
    num_valid = 0
    for name, signature in wanted.signatures.items():
        if name not in survived:
            continue
        try:
            device.allow_list.verify(name, message, signature)
        except (IdentityUnknown, SignatureRefused):
            continue  # one member that lies must not end the session
        num_valid += 1
    needed = signatures_needed(
        session.parameters, len(session.members), corrupted=device.floor.corrupted
    )
    if num_valid < needed:
        raise SurvivorsNotAgreed(
            f"{device.name}: {num_valid} valid signatures on the survivor set, {needed} are needed"
        )
