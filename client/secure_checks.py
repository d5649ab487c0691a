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

from client.secure_device import Device, Record, Trained
from common.errors import (
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
    SecretErased,
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
from common.roster import Session
from common.secagg import (
    LEAST_MEMBERS,
    Parameters,
    SharesDelivered,
    SurvivorsTold,
    UnmaskWanted,
    share_of,
    signatures_needed,
    survivors_digest,
    survivors_message,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """In which phase, what must hold, and the error that says it does not."""

    action: str
    holds: str
    error: type[HeadwaterError]


def _check(action: str, error: type[HeadwaterError], holds: str) -> Check:
    return Check(action=action, holds=holds, error=error)


CHECKS = (
    _check("advertise_keys", SessionReplayed, "the session is newer than any it has seen"),
    _check("advertise_keys", UpdateAlreadyMasked, "the update went into no session before"),
    _check("advertise_keys", MaskingTooWeak, "the mode is the one it insists on"),
    _check("share_keys", SessionReplayed, "run, round, attempt and mode are those of its keys"),
    _check("share_keys", CohortTooSmall, "there are at least 3 members, and its own minimum"),
    _check("share_keys", RosterRefused, "names and keys are unique"),
    _check("share_keys", RosterRefused, "its own entry is exactly what it advertised"),
    _check("share_keys", RosterRefused, "its planned weight is that of its plan"),
    _check("share_keys", IdentityUnknown, "every member is on its allow-list (active)"),
    _check("share_keys", SignatureRefused, "every member's keys are signed by it (active)"),
    _check("share_keys", BadPublicKey, "no key leads to an agreement that all can compute"),
    _check("share_keys", ThresholdTooLow, "t and k meet the rule for n"),
    _check("share_keys", ThresholdTooHigh, "t can be reached after the expected dropouts"),
    _check("share_keys", ModelMismatch, "the whole vector is masked: P is the model's"),
    _check("share_keys", MaskingTooWeak, "ring, clip bound and cipher are within its floor"),
    _check("share_keys", RingCanWrap, "the largest planned sum fits the ring"),
    _check("check_shares", RosterRefused, "shares come from its own dealers, once each"),
    _check(
        "check_shares",
        SessionMismatch,
        "a share of another opens: the others are in the same session",
    ),
    _check("masked_update", ComplaintIgnored, "no dealer stays whose share was bad"),
    _check("masked_update", RosterRefused, "U2 is part of those who dealt, and it is in U2"),
    _check("masked_update", CohortTooSmall, "U2 has its minimum, and t holders for its secrets"),
    _check("masked_update", UpdateAlreadyMasked, "the update went into no session before"),
    _check("masked_update", CountOutOfRange, "its weight is within its plan"),
    _check("masked_update", NonFiniteUpdate, "the vector and the numbers are finite"),
    _check("masked_update", SessionMismatch, "the block bounds are those of the parameters"),
    _check("consistency", BothSharesAsked, "nobody is survived and dropped"),
    _check("consistency", SurvivorsRefused, "survived and dropped are U2, and it survived"),
    _check("consistency", SurvivorsRefused, "its own share of U2 survived, and t holders for each"),
    _check("consistency", SurvivorsChanged, "it is the only survivor set of the session"),
    _check("unmask", BothSharesAsked, "nobody is survived and dropped"),
    _check("unmask", SurvivorsRefused, "as in the consistency phase"),
    _check("unmask", SurvivorsChanged, "it is the only survivor set of the session"),
    _check("unmask", SurvivorsNotAgreed, "enough members signed exactly this set (active)"),
    _check("any", OutOfPhase, "the message is the one that it awaits"),
    _check("any", SecretErased, "the session has not ended"),
)


def check_unmasked(device: Device, record: Record) -> None:
    """Check that the update went into no session before."""
    if record.masked == device.update_id:
        raise UpdateAlreadyMasked(
            f"{device.name}: the update {device.update_id} was masked before, in {record.highest}"
        )


def check_delivery(delivered: SharesDelivered, session: Session, device: Device) -> None:
    """Check that the shares are this device's, from its own dealers, once each."""
    dealers = [share.dealer for share in delivered.shares]
    if len(set(dealers)) != len(dealers) or not set(dealers) <= set(session.holders(device.name)):
        raise RosterRefused(f"{device.name}: shares from dealers that are not its own, or twice")
    if any(share.holder != device.name for share in delivered.shares):
        raise RosterRefused(f"{device.name}: shares for another holder")


def check_opened(good: Iterable[str], bad: Iterable[str], session: Session, device: Device) -> None:
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
    session: Session,
    opened: Iterable[str],
    bad_dealers: frozenset[str],
    device: Device,
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


def check_update(trained: Trained, device: Device) -> None:
    """Check the update's own counts; the vector is checked before it is encoded."""
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


def check_bounds(
    bounds: NDArray[np.float32] | None, chosen: Parameters, device: Device
) -> NDArray[np.float32]:
    """Check the block bounds of a 16-bit ring against the digest that all members agreed on."""
    if bounds is None or hashlib.sha256(bounds.tobytes()).digest() != chosen.bounds_digest:
        raise SessionMismatch(f"{device.name}: the block bounds are not those of the parameters")
    floor = device.floor
    if not bool(np.all((bounds >= floor.min_clip) & (bounds <= floor.max_clip))):
        raise MaskingTooWeak(f"{device.name}: a block bound outside its floor")
    return bounds


def check_survivors(
    told: SurvivorsTold | UnmaskWanted,
    *,
    session: Session,
    members: Iterable[str],
    device: Device,
    record: Record,
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
    wanted: UnmaskWanted, *, digest: bytes, session: Session, device: Device
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
