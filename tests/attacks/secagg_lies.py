"""Lies of a hostile server before any device has masked, and the tools for all lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.client.secagg.types import Floor, SessionRecord
from headwater.common.privacy.clip_bit import bit_scalar
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.fixed_point import plan_encoding
from headwater.common.secagg.hadamard_rotation import rotated_encoding
from headwater.common.secagg.identity import SigningIdentity
from headwater.common.secagg.protocol import (
    WEIGHT,
    CheckRequest,
    KeysRequest,
    Member,
    Parameters,
    Roster,
    SessionNumber,
    SharesReply,
)
from headwater.common.secagg.scalar_encoding import Scalar, plan_sums
from headwater.common.secagg.session import SessionView, keys_message, session_of
from headwater.common.terms import SumOf
from tests.faults import FaultPlan
from tests.secagg import MODEL, PLANNED, Cast, name_of

VICTIM, OTHER, THIRD = "d001", "d002", "d003"
Change = Callable[[Any], Any]
SUMS = {"counts": SumOf(length=2)}
NOTHING = FaultPlan()


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What the server does to whom, in which phase, and the check that it meets."""

    check: str
    action: str
    change: Change = lambda message: message
    mode: str = "semi-honest"
    num_devices: int = 5
    cast: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Cast], object] = lambda cast: None
    plan: FaultPlan = NOTHING


class Seen:
    """The session as the server sees it: what its later lies are made from."""

    session: SessionView

    @classmethod
    def note(cls, roster: Roster) -> Roster:
        cls.session = session_of(roster.parameters, roster.members, model_digest=MODEL)
        return roster


# -- phase 0


def with_record(record: SessionRecord) -> Callable[[Cast], object]:
    def prepare(cast: Cast) -> None:
        device = cast.parties[VICTIM].device
        cast.join(device, weight=1, seed=0, record=record)

    return prepare


def wanted(**changes: Any) -> Change:
    return lambda message: message.model_copy(update=changes)


OPENING = [
    Attack(
        check="new session",
        action="advertise_keys",
        prepare=with_record(SessionRecord(highest=SessionNumber(1, 1))),
    ),
    Attack(
        check="new session",
        action="advertise_keys",
        prepare=with_record(SessionRecord(highest=SessionNumber(2, 1))),
    ),
    Attack(check="new session", action="advertise_keys", change=wanted(round=2)),
    Attack(check="new session", action="advertise_keys", change=wanted(run=1)),
    Attack(
        check="new session",  # replayed within the session, after its keys were made
        action="share_keys",
        change=lambda roster: [
            KeysRequest(run=4711, round=1, attempt=0, mode="semi-honest"),
            roster,
        ],
    ),
    Attack(
        check="fresh update",
        action="advertise_keys",
        prepare=with_record(SessionRecord(masked=f"{VICTIM} 0", highest=SessionNumber(1, 0))),
    ),
    Attack(
        check="own mode",
        action="advertise_keys",
        change=wanted(mode="semi-honest"),
        mode="active",
    ),
    Attack(
        check="own mode",
        action="advertise_keys",
        mode="active",
        cast={"device": {VICTIM: {"allow_list": None}}},
    ),
]

# -- phase 1


def chosen(**changes: Any) -> Change:
    """Change parameters; a function is given the parameters and returns the field's value."""

    def change(roster: Roster) -> Roster:
        found = roster.parameters
        fields = {
            name: value(found) if callable(value) else value for name, value in changes.items()
        }
        return roster.model_copy(update={"parameters": Parameters(**{**dict(found), **fields})})

    return change


def members(change: Callable[[list[Member]], list[Member]]) -> Change:
    return lambda roster: roster.model_copy(update={"members": tuple(change(list(roster.members)))})


def entry(whose: str, **changes: Any) -> Change:
    return members(
        lambda rows: [row.model_copy(update=changes) if row.name == whose else row for row in rows]
    )


def keeping(*names: str) -> Change:
    return members(lambda rows: [row for row in rows if row.name in names])


def stranger(**changes: Any) -> Member:
    fields = {
        "name": "sybil",
        "mask_key": bytes([7] * 32),
        "sharing_key": bytes([9] * 32),
        "planned_weight": PLANNED,
        "signature": bytes(64),
        **changes,
    }
    return Member(**fields)


def old_signature(roster: Roster) -> Any:
    """Let the server bring keys that a member signed for another attempt."""
    row = next(row for row in roster.members if row.name == OTHER)
    old = KeysRequest(run=4711, round=1, attempt=9, mode="active")
    return entry(OTHER, signature=SIGNER.sign(keys_message(old, row)))(roster)


SIGNER = SigningIdentity.new(OTHER)
LOW_ORDER = bytes(32)
FINER = {
    "encoding": lambda p: replace(p.encoding, scale_bits=p.encoding.scale_bits - 20),
}


BITS = {"min_survivors": 0.7, "corrupted": 0.1, "bit_multiplier": 4.0}
CLEAR: dict[str, Any] = {"norm_bound": 1.0, "noise_multiplier": 0.01, "bit_multiplier": 0.02}


def coarser(scalar: Scalar) -> Scalar:
    """Return a masked number in steps so coarse that its noise would have few of them."""
    return replace(scalar, scale_bits=1)


def noise(**terms: Any) -> dict[str, Any]:
    """Let all devices have a private plan of these terms."""
    agreed = PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0, **terms)
    return {
        "privacy": agreed,
        "device": {name_of(number): {"privacy": agreed} for number in range(8)},
    }


ROSTER = [
    *(
        Attack(check="same session", action="share_keys", change=chosen(**{name: 2}))
        for name in ("run", "round", "attempt")
    ),
    Attack(check="same session", action="share_keys", change=chosen(mode="active")),
    Attack(check="enough members", action="share_keys", change=keeping(VICTIM)),
    Attack(check="enough members", action="share_keys", change=keeping(VICTIM, OTHER)),
    Attack(
        check="enough members",
        action="share_keys",
        cast={"floor": Floor(min_members=6)},
    ),
    Attack(
        check="unique members",
        action="share_keys",
        change=members(lambda rows: [*rows, rows[2].model_copy(update={"name": "sybil"})]),
    ),
    Attack(
        check="unique members",
        action="share_keys",
        change=members(lambda rows: [*rows, stranger(name=OTHER)]),
    ),
    Attack(
        check="unique members",
        action="share_keys",
        change=members(lambda rows: [*rows, stranger(sharing_key=bytes([7] * 32))]),
    ),
    *(
        Attack(check="own entry", action="share_keys", change=entry(VICTIM, **changes))
        for changes in (
            {"mask_key": bytes([7] * 32)},
            {"sharing_key": bytes([7] * 32)},
            {"planned_weight": PLANNED + 1},
            {"has_aes": True},
            {"name": "d1"},
        )
    ),
    Attack(
        check="known members",
        action="share_keys",
        change=members(lambda rows: [*rows, stranger()]),
        mode="active",
    ),
    *(
        Attack(check="signed keys", action="share_keys", change=change, mode="active")
        for change in (
            entry(OTHER, mask_key=bytes([7] * 32)),  # self-made keys
            entry(OTHER, sharing_key=bytes([7] * 32)),
            entry(OTHER, signature=None),
            entry(OTHER, has_aes=True),
            old_signature,
        )
    ),
    Attack(
        check="signed keys",  # two honest members' keys swapped
        action="share_keys",
        change=members(
            lambda rows: [
                rows[3].model_copy(update={"name": rows[2].name}),
                rows[2].model_copy(update={"name": rows[3].name}),
                *(rows[i] for i in (0, 1, 4)),
            ]
        ),
        mode="active",
    ),
    Attack(check="sharing keys", action="share_keys", change=entry(OTHER, sharing_key=LOW_ORDER)),
    Attack(check="threshold", action="share_keys", change=chosen(threshold=1)),
    Attack(check="threshold", action="share_keys", change=chosen(threshold=2)),
    Attack(check="threshold", action="share_keys", change=chosen(threshold=3), mode="active"),
    *(
        Attack(check="complete graph", action="share_keys", change=chosen(**sizes), mode=mode)
        for mode in ("semi-honest", "active")
        for sizes in (
            {"num_neighbours": 2, "threshold": 2},
            {"num_neighbours": 4, "threshold": 4},
            {"num_neighbours": 6},
        )
    ),
    Attack(
        check="threshold",
        action="share_keys",
        num_devices=66,
        change=chosen(num_neighbours=4, threshold=3),
    ),
    Attack(check="reachable threshold", action="share_keys", change=chosen(threshold=6)),
    Attack(check="same plan", action="share_keys", change=chosen(plan=bytes(32))),
    Attack(
        check="own share",  # 8 of 12, with the others' real plans
        action="share_keys",
        change=members(
            lambda rows: [
                row if row.name == VICTIM else row.model_copy(update={"planned_weight": 1})
                for row in rows
            ]
        ),
    ),
    Attack(
        check="own share",  # as above: another member's weight counts for no more than its own
        action="share_keys",
        change=members(
            lambda rows: [
                row
                if row.name == VICTIM
                else row.model_copy(update={"planned_weight": 40 if row.name == OTHER else 1})
                for row in rows
            ]
        ),
        cast={"floor": Floor(max_share=0.4)},
    ),
    Attack(
        check="steps for each",
        action="share_keys",
        change=chosen(encoding=plan_encoding(max_weight=2**40, clip=4.0)),
    ),
    Attack(
        check="noise",  # all must survive, the plan says; the device opens the sum of fewer
        action="share_keys",
        cast=noise(min_survivors=1.0, corrupted=0.1),
    ),
    Attack(
        check="noise",  # nobody colludes, the plan says
        action="share_keys",
        cast=noise(min_survivors=0.7, corrupted=0.0),
    ),
    *(
        Attack(check="noise", action="share_keys", change=change, cast=noise(**BITS))
        for change in (
            chosen(scalars=lambda p: p.scalars[:-1]),  # no noise would be added to bits
            chosen(scalars=lambda p: (*p.scalars[:-1], coarser(p.scalars[-1]))),
        )
    ),
    Attack(  # bits that the plan does not ask for
        check="noise",
        action="share_keys",
        change=chosen(
            scalars=lambda p: (*p.scalars, bit_scalar(PrivacyTerms(**CLEAR), num_devices=8))
        ),
        cast=noise(min_survivors=0.7, corrupted=0.1),
    ),
    Attack(
        check="room for noise",
        action="share_keys",
        change=chosen(
            encoding=lambda p: plan_encoding(max_weight=p.encoding.max_weight, clip=2.0**-3)
        ),
        cast=noise(min_survivors=0.7, corrupted=0.1),
    ),
    Attack(check="whole vector", action="share_keys", change=chosen(num_values=1)),
    Attack(
        check="ring and clip",  # an odd number of neighbours
        action="share_keys",
        num_devices=66,
        change=chosen(num_neighbours=19),
    ),
    Attack(check="ring and clip", action="share_keys", change=chosen(cipher="aes256-ctr")),
    Attack(check="ring and clip", action="share_keys", change=chosen(scalars=())),
    Attack(
        check="ring and clip",
        action="share_keys",
        change=chosen(scalars=lambda p: (*p.scalars, p.scalars[-1])),
    ),
    Attack(
        check="ring and clip",  # the weight would be seen to be at most 1
        action="share_keys",
        change=chosen(
            scalars=lambda p: tuple(
                replace(s, bound=1.0) if s.name == WEIGHT else s for s in p.scalars
            )
        ),
    ),
    Attack(
        check="ring and clip",  # a loss beyond its range is clipped, a count would be refused
        action="share_keys",
        change=chosen(
            scalars=lambda p: tuple(
                s if s.is_count else replace(s, scale_bits=0, bound=1.0, is_count=True)
                for s in p.scalars
            )
        ),
    ),
    Attack(check="ring and clip", action="share_keys", change=chosen(**FINER)),
    *(
        Attack(
            check="ring and clip",
            action="share_keys",
            change=chosen(
                encoding=lambda p, clip=clip: plan_encoding(
                    max_weight=p.encoding.max_weight, clip=clip
                )
            ),
        )
        for clip in (2.0**-101, 2.0**101)
    ),
    Attack(
        check="ring and clip",  # 16 bits without a rotation
        action="share_keys",
        change=chosen(encoding=lambda p: rotated_encoding(max_weight=p.encoding.max_weight)),
    ),
    Attack(
        check="ring and clip",  # 16 bits, to a device that wants 32
        action="share_keys",
        change=chosen(
            encoding=lambda p: rotated_encoding(max_weight=p.encoding.max_weight),
            rotation_seed=bytes(32),
            bounds_digest=bytes(32),
        ),
        cast={"floor": Floor(ring_bits=frozenset({32}))},
    ),
    Attack(
        check="no overflow",
        action="share_keys",
        change=chosen(encoding=plan_encoding(max_weight=5 * PLANNED - 1, clip=4.0)),
    ),
    Attack(
        check="no overflow",
        action="share_keys",
        change=chosen(scalars=lambda p: tuple(replace(s, num_devices=4) for s in p.scalars)),
    ),
    Attack(
        check="no overflow",
        action="share_keys",
        change=chosen(sums=plan_sums(SUMS, num_devices=4)),
    ),
    Attack(  # none of the device's plan
        check="own sums",
        action="share_keys",
        change=chosen(sums=plan_sums(SUMS, num_devices=5)),
    ),
    *(
        Attack(
            check="own sums",
            action="share_keys",
            cast={"device": {VICTIM: {"sums": SUMS}}},
            change=chosen(sums=plan_sums(asked, num_devices=5)),
        )
        for asked in (
            {},
            {"other": SumOf(length=2)},
            {"counts": SumOf(length=3)},
            {"counts": SumOf(length=2, limit=2.0**21)},
            {"counts": SumOf(length=2, scale_bits=31)},
        )
    ),
]

# -- between the phases


def _of_the_session(said: tuple[SharesReply, None]) -> tuple[SharesReply, None]:
    """Let the server take what a device dealt in another session as if it were of this one."""
    return said[0].model_copy(update={"session": Seen.session.digest}), None


def as_if_of_the_session(plan: FaultPlan, names: Iterable[str]) -> FaultPlan:
    """Let the server overlook that devices dealt in another session than its own."""
    for name in names:
        plan = plan.answer("share_keys", _of_the_session, client=name)
    return plan


def shares(change: Callable[[list[Any]], list[Any]]) -> Change:
    return lambda told: CheckRequest(shares=tuple(change(list(told.shares))))


DELIVERY = [
    Attack(
        check="own dealers",
        action="check_shares",
        change=shares(lambda rows: [*rows, rows[0]]),
    ),
    Attack(
        check="own dealers",
        action="check_shares",
        change=shares(lambda rows: [rows[0].model_copy(update={"dealer": "sybil"}), *rows[1:]]),
    ),
    Attack(
        check="own dealers",
        action="check_shares",
        change=shares(lambda rows: [rows[0].model_copy(update={"holder": OTHER}), *rows[1:]]),
    ),
    Attack(
        check="same model",  # all boxes were made under other parameters than the victim's
        action="share_keys",
        change=chosen(threshold=4),
        plan=as_if_of_the_session(FaultPlan(), [VICTIM]),
    ),
]
