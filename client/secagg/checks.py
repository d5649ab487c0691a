"""The checks that a client runs before it answers a request of a secure session.

A hostile server can always make a session fail, for example by staying silent; it must not be able
to make a client reveal its update. Each row of ``CHECKS`` is one way to try, and the named error
that refuses it; tests/attacks/test_hostile_secagg_server.py tries them all. A check runs before the
reply, so what the server holds at a refusal opens nothing. The checks of the first two phases are
in ``client.secagg.roster_checks``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from headwater.client.secagg.states import AwaitingMaskRequest, AwaitingUnmask, SessionFinished
from headwater.client.secagg.types import Participant, SessionRecord, UnmaskedUpdate
from headwater.common import errors
from headwater.common.secagg.graph import ceil_fraction
from headwater.common.secagg.masked_numbers import in_names_of
from headwater.common.secagg.protocol import (
    CheckRequest,
    Member,
    Parameters,
    SurvivorsRequest,
    UnmaskRequest,
    signatures_needed,
)
from headwater.common.secagg.scalar_encoding import num_elements
from headwater.common.secagg.session import SessionView, survivors_digest, survivors_message
from headwater.common.settings.rounds import MIN_MEMBERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One check: its name, its phase, the error that reports a violation, and the condition."""

    name: str
    action: str
    error: type[errors.HeadwaterError]
    holds: str


def _rows(*rows: tuple[str, str, type[errors.HeadwaterError], str]) -> tuple[Check, ...]:
    return tuple(Check(name=n, action=a, error=e, holds=h) for n, a, e, h in rows)


# fmt: off
CHECKS = _rows(
    ("new session", "advertise_keys", errors.SessionReplayed,
     "the session is newer than every session in the record, and of the update's round"),
    ("fresh update", "advertise_keys", errors.UpdateAlreadyMasked,
     "the update was masked in no earlier session"),
    ("own mode", "advertise_keys", errors.MaskingTooWeak,
     "the mode is at least the client's own; active mode has an identity and an allow-list"),
    ("same session", "share_keys", errors.SessionReplayed,
     "the roster has the run, round, attempt and mode that the keys were made for"),
    ("enough members", "share_keys", errors.CohortTooSmall,
     "the roster has at least 3 members, and the client's own minimum"),
    ("unique members", "share_keys", errors.RosterRefused,
     "no name and no key appears twice"),
    ("own entry", "share_keys", errors.RosterRefused,
     "the client's entry has exactly the keys that it advertised and its own plan's weight"),
    ("known members", "share_keys", errors.IdentityUnknown,
     "every member is on the client's allow-list (active)"),
    ("signed keys", "share_keys", errors.SignatureRefused,
     "every member's identity signed its keys for this session (active)"),
    ("sharing keys", "share_keys", errors.BadPublicKey,
     "no sharing key gives a shared secret that everybody can compute"),
    ("complete graph", "share_keys", errors.MaskingTooWeak,
     "up to 64 members all are neighbours: no sparse graph, whatever its sizes"),
    ("threshold", "share_keys", errors.ThresholdTooLow,
     "t, and k of a sparse graph, meet the rule for n"),
    ("reachable threshold", "share_keys", errors.ThresholdTooHigh,
     "t holders can be left after the dropouts that the client assumes"),
    ("same plan", "share_keys", errors.PlanMismatch,
     "the session is for plans that have all but quota, micro-batch and times in common"),
    ("own share", "share_keys", errors.WeightTooLarge,
     "the client's weight, planned and carried, is at most its own share of all, no other's more"),
    ("steps for each", "share_keys", errors.MaskingTooWeak,
     "each member has at least the client's own number of steps of the ring for a coordinate"),
    ("whole vector", "share_keys", errors.ModelMismatch,
     "the session masks all coordinates of the update"),
    ("ring and clip", "share_keys", errors.MaskingTooWeak,
     "ring, clip bound, cipher, graph and masked counts are within the client's floor"),
    ("own sums", "share_keys", errors.MaskingTooWeak,
     "the sums beside the model's are the plan's, in the finest steps that cannot wrap"),
    ("no overflow", "share_keys", errors.RingCanWrap,
     "as many of the largest planned weight fit the ring, as does each sum beside the model's"),
    ("noise", "share_keys", errors.MaskingTooWeak,
     "a private plan's noise counts on no more survivors and no fewer colluders than the client; "
     "bits on the clip norm are masked if the plan asks for them, in the steps that are due"),
    ("room for noise", "share_keys", errors.RingCanWrap,
     "the ring holds the sum of all vectors of a private plan, and their noise"),
    ("own dealers", "check_shares", errors.RosterRefused,
     "the shares are for this client, from its own dealers, one from each"),
    ("same model", "check_shares", errors.SessionMismatch,
     "a share of another member opens: that member saw the same model and roster"),
    ("complaints", "masked_update", errors.ComplaintIgnored,
     "U2 has no dealer whose shares the client reported as bad"),
    ("maskers", "masked_update", errors.RosterRefused,
     "U2 has only members that dealt shares, each once, and this client"),
    ("enough maskers", "masked_update", errors.CohortTooSmall,
     "U2 has at least 3 members, the client's own minimum, and t of its holders"),
    ("share of the fewest", "masked_update", errors.WeightTooLarge,
     "the client's weight is at most its own share of the lightest members that may be left"),
    ("honest noise", "masked_update", errors.CohortTooSmall,
     "of the fewest survivors of U2 at least one is honest and adds noise to a private sum"),
    ("mask keys", "masked_update", errors.BadPublicKey,
     "no mask key gives a shared secret that everybody can compute"),
    ("own numbers", "masked_update", errors.ModelMismatch,
     "the masked numbers, but for the task's metrics, are those of every masked update"),
    ("block bounds", "masked_update", errors.SessionMismatch,
     "the bounds of a 16-bit ring are those in the session's parameters"),
    ("one share each", "consistency, unmask", errors.BothSharesAsked,
     "no member is in both the survived and the dropped set"),
    ("survivors", "consistency, unmask", errors.SurvivorsRefused,
     "the two sets are together U2, each member once, and this client survived"),
    ("enough survivors", "consistency, unmask", errors.SurvivorsRefused,
     "at least 3 members survived, the client's own minimum, and its own fraction of U2"),
    ("holders", "consistency, unmask", errors.SurvivorsRefused,
     "t holders of each survivor survived"),
    ("one survivor set", "consistency, unmask", errors.SurvivorsChanged,
     "the client has answered no other survivor set in this session"),
    ("signed survivors", "unmask", errors.SurvivorsNotAgreed,
     "enough members signed exactly this set (active)"),
    ("order", "any", errors.OutOfPhase,
     "the request is the one that the client's state waits for"),
)
# fmt: on


def check_unmasked(device: Participant, record: SessionRecord) -> None:
    """Check that the update was masked in no earlier session."""
    if record.masked == device.update_id:
        raise errors.UpdateAlreadyMasked(
            f"{device.name}: the update {device.update_id} was masked before, in {record.highest}"
        )


def check_share(members: Iterable[Member], device: Participant) -> None:
    """Check that the sum of all members would not be mostly this client's own update."""
    share = own_share(members, device)
    if share > 1:
        found = share * Fraction(str(device.floor.max_share))
        raise errors.WeightTooLarge(
            f"{device.name}: its planned weight of {device.planned_weight:,}, with "
            f"{device.carried_weight:,} carried from earlier rounds, would be {float(found):.0%} "
            f"of the session, at most {device.floor.max_share:.0%} are accepted"
        )


def own_share(members: Iterable[Member], device: Participant) -> Fraction:
    """Return this client's share of what some members bring, over the largest that it accepts.

    What earlier updates left (error feedback) weighs as these did. Another member counts for no
    more than this client: a colluding one could claim any weight.
    """
    own = device.planned_weight + device.carried_weight
    total = sum(min(_weight_of(member), own) for member in members)
    return own / (Fraction(str(device.floor.max_share)) * total)


def check_delivery(request: CheckRequest, session: SessionView, device: Participant) -> None:
    """Check that the shares are for this client, from its own dealers, one from each."""
    dealers = [share.dealer for share in request.shares]
    if len(set(dealers)) != len(dealers) or not set(dealers) <= set(session.holders(device.name)):
        raise errors.RosterRefused(
            f"{device.name}: received shares twice from one dealer, or from a dealer not its own"
        )
    if any(share.holder != device.name for share in request.shares):
        raise errors.RosterRefused(f"{device.name}: received shares for another holder")


def check_opened(
    good: Iterable[str], bad: Iterable[str], session: SessionView, device: Participant
) -> None:
    """Check that some share opens: if none does, this client is the one with another session."""
    num_good, num_bad = len(set(good) - {device.name}), len(set(bad))
    if device.name in set(bad) or (num_bad and not num_good):
        raise errors.SessionMismatch(
            f"{device.name}: none of {num_bad} shares opens in session "
            f"{session.digest.hex()[:16]}: the other members were shown another model, another "
            "roster or other parameters"
        )


def check_members(members: tuple[str, ...], state: AwaitingMaskRequest) -> None:
    """Check U2, the members whose pairwise masks cancel in the sum."""
    device, session = state.device, state.session
    u2 = frozenset(members)
    if len(u2) != len(members) or not u2 <= session.members.keys():
        raise errors.RosterRefused(
            f"{device.name}: U2 has a name twice, or one from outside the roster"
        )
    if device.name not in u2:
        raise errors.RosterRefused(f"{device.name}: got a request to mask, but U2 does not list it")
    if u2 & state.bad_dealers:
        raise errors.ComplaintIgnored(
            f"{device.name}: U2 keeps {', '.join(sorted(u2 & state.bad_dealers))}, which gave it "
            "bad shares"
        )
    missing = (u2 & set(session.holders(device.name))) - state.shares.keys()
    if missing:
        raise errors.RosterRefused(
            f"{device.name}: no shares came from {', '.join(sorted(missing)[:3])}"
        )
    least = max(MIN_MEMBERS, device.floor.min_members)
    if len(u2) < least or session.short_of_holders([device.name], present=u2):
        raise errors.CohortTooSmall(
            f"{device.name}: U2 has {len(u2)} members; at least {least} are required, and "
            f"{session.parameters.threshold} of this client's holders"
        )
    if own_share(_fewest_left(u2, session, device), device) > 1:
        raise errors.WeightTooLarge(
            f"{device.name}: its planned weight of {device.planned_weight:,} would be more than "
            f"{device.floor.max_share:.0%} of the sum if the heaviest of the other {len(u2) - 1} "
            "members dropped out, as many as this device allows"
        )


def _fewest_left(u2: frozenset[str], session: SessionView, device: Participant) -> Iterator[Member]:
    """Yield the members of U2 that are in the sum at least, if those of most weight are not.

    Which of them have dropped out is the server's word. So the lightest are counted on.
    """
    others = sorted((session.members[name] for name in u2 if name != device.name), key=_weight_of)
    yield session.members[device.name]
    yield from others[: _least_survivors(device, len(u2)) - 1]


def _least_survivors(device: Participant, num_members: int) -> int:
    """Return how many members of a U2 have to be in a sum that this device helps to open."""
    floor = device.floor
    return max(MIN_MEMBERS, floor.min_members, ceil_fraction(floor.min_survivors, num_members))


def _weight_of(member: Member) -> int:
    return member.planned_weight + (member.carried_weight or 0)


def check_update(update: UnmaskedUpdate, parameters: Parameters, device: Participant) -> None:
    """Check that the session masks what the update has; nothing here depends on an example.

    A number beyond its limit is no error: it is cut to it, and an update of more weight than its
    plan allows is masked as one of weight 0 (``client.secagg.mask_phases``).
    """
    in_names_of(parameters.scalars, update.numbers)
    if update.sums_S.numel() != num_elements(parameters.sums):
        raise errors.ModelMismatch(
            f"{device.name}: the sums beside the model's have {update.sums_S.numel():,} values, "
            f"expected {num_elements(parameters.sums):,}"
        )
    if update.values_P.numel() != device.num_values:
        raise errors.ModelMismatch(
            f"{device.name}: the update has {update.values_P.numel():,} coordinates, expected "
            f"{device.num_values:,}"
        )


def check_bounds(
    bounds: NDArray[np.float32] | None,
    parameters: Parameters,
    device: Participant,
    *,
    num_blocks: int,
) -> NDArray[np.float32]:
    """Check the block bounds of a 16-bit ring against the digest in the session's parameters."""
    if bounds is None or hashlib.sha256(bounds.tobytes()).digest() != parameters.bounds_digest:
        raise errors.SessionMismatch(
            f"{device.name}: the block bounds are not those of the parameters"
        )
    floor = device.floor
    is_within = (bounds >= floor.min_clip) & (bounds <= floor.max_clip)  # False for NaN
    if bounds.shape != (num_blocks,) or not bool(is_within.all()):
        raise errors.MaskingTooWeak(
            f"{device.name}: there is not one bound per block, or one is outside the client's floor"
        )
    return bounds


def check_survivors(
    request: SurvivorsRequest | UnmaskRequest, state: AwaitingUnmask | SessionFinished
) -> bytes:
    """Check U3 against U2 and against an earlier answer; return the survivor set's digest."""
    device, session = state.device, state.session
    survived, dropped, u2 = set(request.survived), set(request.dropped), set(state.members)
    if both := survived & dropped:
        raise errors.BothSharesAsked(
            f"{device.name}: {', '.join(sorted(both)[:3])} survived and dropped"
        )
    num_named = len(request.survived) + len(request.dropped)
    if survived | dropped != u2 or num_named != len(u2):
        raise errors.SurvivorsRefused(
            f"{device.name}: survived and dropped are not together the {len(u2)} members of U2, "
            "each once"
        )
    if device.name not in survived:
        raise errors.SurvivorsRefused(f"{device.name}: it masked its update, but is not a survivor")
    least = _least_survivors(device, len(u2))
    if len(survived) < least:
        raise errors.SurvivorsRefused(
            f"{device.name}: {len(survived)} of {len(u2)} members survived, at least {least} are "
            "required"
        )
    if isolated := session.short_of_holders(request.survived, present=survived):
        raise errors.SurvivorsRefused(
            f"{device.name}: fewer than {session.parameters.threshold} holders of {isolated[0]} "
            "survived, so its update could be isolated"
        )
    digest = survivors_digest(session=session.digest, survived=survived, dropped=dropped)
    answered = state.record.answered
    if answered is not None and answered[0] == session.digest.hex() and answered[1] != digest.hex():
        raise errors.SurvivorsChanged(f"{device.name}: got a second survivor set in one session")
    return digest


def check_signatures(
    request: UnmaskRequest, *, digest: bytes, session: SessionView, device: Participant
) -> None:
    """Check that enough members signed exactly this survivor set; only survivors' count."""
    if device.allow_list is None:
        raise errors.MaskingTooWeak(f"{device.name}: active mode needs an allow-list")
    survived, message = set(request.survived), survivors_message(digest)
    num_valid = 0
    for name, signature in request.signatures.items():
        if name not in survived:
            continue
        try:
            device.allow_list.verify(name, message, signature)
        except (errors.IdentityUnknown, errors.SignatureRefused):
            continue  # a single lying member must not end the session
        num_valid += 1
    needed = signatures_needed(
        session.parameters.threshold, len(session.members), corrupted=device.floor.corrupted
    )
    if num_valid < needed:
        raise errors.SurvivorsNotAgreed(
            f"{device.name}: the survivor set has {num_valid} valid signatures, {needed} are needed"
        )
