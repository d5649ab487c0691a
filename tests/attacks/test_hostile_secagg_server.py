"""A server that lies to the devices of a secure session: each lie is refused by its named error.

``ATTACKS`` has one or more for each line of ``client.secure_checks.CHECKS``; the victim answers
nothing to the message that lies. What a server learns that stops there: docs/security.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from client.secure_checks import CHECKS
from client.secure_device import Floor, Record, Trained
from client.secure_session import SecureSession
from client.secure_states import Advertised
from common.errors import (
    HeadwaterError,
    RoundAborted,
    SessionMismatch,
    SurvivorsChanged,
    SurvivorsNotAgreed,
)
from common.fixed_point import plan_encoding
from common.identity import SigningIdentity
from common.roster import Session, session_of
from common.rotation import rotated_encoding
from common.secagg import (
    WEIGHT,
    KeysWanted,
    MaskWanted,
    Member,
    Parameters,
    Reply,
    Request,
    Roster,
    SessionNumber,
    SharesDealt,
    SharesDelivered,
    SurvivorsTold,
    UnmaskWanted,
    keys_message,
    survivors_digest,
    survivors_message,
)
from tests.faults import FaultPlan
from tests.secagg import MODEL, PLANNED, Cast, Played

VICTIM, OTHER, THIRD = "d001", "d002", "d003"
# Checks that share an error and a phase are told apart by what the error says.
SAYS = {
    "unique members": "stands twice",
    "own dealers": "shares",
    "survivors": "surviv",
    "enough survivors": "at least",
    "holders": "stand alone",
}
BY_NAME = {check.name: check for check in CHECKS}
Change = Callable[[Any], Any]
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

    session: Session

    @classmethod
    def note(cls, roster: Roster) -> Roster:
        cls.session = session_of(roster.parameters, roster.members, model_digest=MODEL)
        return roster


# -- phase 0


def with_record(record: Record) -> Callable[[Cast], object]:
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
        prepare=with_record(Record(highest=SessionNumber(1, 1))),
    ),
    Attack(
        check="new session",
        action="advertise_keys",
        prepare=with_record(Record(highest=SessionNumber(2, 1))),
    ),
    Attack(check="new session", action="advertise_keys", change=wanted(round=2)),
    Attack(check="new session", action="advertise_keys", change=wanted(run=1)),
    Attack(
        check="new session",  # replayed within the session, after its keys were made
        action="share_keys",
        change=lambda roster: [
            KeysWanted(run=4711, round=1, attempt=0, mode="semi-honest"),
            roster,
        ],
    ),
    Attack(
        check="fresh update",
        action="advertise_keys",
        prepare=with_record(Record(masked=f"{VICTIM} 0", highest=SessionNumber(1, 0))),
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
    old = KeysWanted(run=4711, round=1, attempt=9, mode="active")
    return entry(OTHER, signature=SIGNER.sign(keys_message(old, row)))(roster)


SIGNER = SigningIdentity.new(OTHER)
LOW_ORDER = bytes(32)
FINER = {
    "encoding": lambda p: replace(p.encoding, scale_bits=p.encoding.scale_bits - 20),
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
    Attack(
        check="threshold",  # a sparse graph of so few is too thin
        action="share_keys",
        change=chosen(num_neighbours=2, threshold=2),
    ),
    Attack(check="threshold", action="share_keys", change=chosen(num_neighbours=6)),
    Attack(check="reachable threshold", action="share_keys", change=chosen(threshold=6)),
    Attack(check="whole vector", action="share_keys", change=chosen(num_values=1)),
    Attack(check="ring and clip", action="share_keys", change=chosen(num_neighbours=3)),
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
]

# -- between the phases


def _of_the_session(said: tuple[SharesDealt, None]) -> tuple[SharesDealt, None]:
    """Let the server take what a device dealt in another session as if it were of this one."""
    return said[0].model_copy(update={"session": Seen.session.digest}), None


def as_if_of_the_session(plan: FaultPlan, names: Iterable[str]) -> FaultPlan:
    """Let the server overlook that devices dealt in another session than its own."""
    for name in names:
        plan = plan.answer("share_keys", _of_the_session, client=name)
    return plan


def shares(change: Callable[[list[Any]], list[Any]]) -> Change:
    return lambda told: SharesDelivered(shares=tuple(change(list(told.shares))))


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


# -- phase 2


def u2(*names: str) -> Change:
    return lambda told: MaskWanted(members=names)


def spoil_share(told: SharesDelivered) -> SharesDelivered:
    return SharesDelivered(
        shares=tuple(
            share.model_copy(update={"sealed": bytes(len(share.sealed))})
            if share.dealer == OTHER
            else share
            for share in told.shares
        )
    )


def everybody(told: MaskWanted) -> MaskWanted:
    return MaskWanted(members=tuple(Cast(5).names))


class Colluding(SecureSession):
    """A device that lets the server put a key in its entry that everybody can compute with."""

    def answer(self, request: Request) -> Reply:
        if isinstance(request, Roster) and isinstance(self._state, Advertised):
            keys = self._state.keys.model_copy(update={"mask_key": LOW_ORDER})
            self._state = replace(self._state, keys=keys)
        return super().answer(request)


def let_collude(cast: Cast) -> None:
    party = cast.parties[OTHER]
    party.session = Colluding(
        party.device,
        Record(),
        remember=party.stored.append,
        trained=Trained(values_P=torch.from_numpy(party.values_P), numbers=party.numbers),
    )


def tell_values(values: list[float]) -> Callable[[Cast], object]:
    return lambda cast: cast.give(VICTIM, np.array(values, np.float32))


def heavier(cast: Cast) -> None:
    cast.join(cast.parties[VICTIM].device, weight=PLANNED + 1, seed=0)


BOUNDS = np.full(2, 4.0, np.float32)  # three values: a block of two, and one of one
ROTATED: dict[str, Any] = {"ring_bits": 16, "rotation_seed": bytes(32)}


def other_bounds(cast: Cast) -> None:
    cast.bounds = BOUNDS * 2
    cast.give(VICTIM, cast.parties[VICTIM].values_P)


MASKS = [
    Attack(
        check="complaints",
        action="masked_update",
        change=everybody,
        plan=FaultPlan().tell("check_shares", spoil_share, client=VICTIM),
    ),
    Attack(
        check="maskers", action="masked_update", change=u2("d000", VICTIM, OTHER, THIRD, "sybil")
    ),
    Attack(check="maskers", action="masked_update", change=u2("d000", OTHER, THIRD)),
    Attack(check="maskers", action="masked_update", change=u2("d000", VICTIM, OTHER, THIRD, THIRD)),
    Attack(
        check="maskers",  # masks with one whose shares were withheld: nobody could take them off
        action="masked_update",
        plan=FaultPlan().tell(
            "check_shares",
            shares(lambda rows: [row for row in rows if row.dealer != OTHER]),
            client=VICTIM,
        ),
    ),
    Attack(check="enough maskers", action="masked_update", change=u2(VICTIM)),
    Attack(check="enough maskers", action="masked_update", change=u2(VICTIM, OTHER)),
    Attack(
        check="enough maskers",
        action="masked_update",
        change=u2("d000", VICTIM, OTHER),
        mode="active",
    ),
    Attack(
        check="mask keys",
        action="masked_update",
        prepare=let_collude,
        plan=as_if_of_the_session(FaultPlan(), Cast(5).names).tell(
            "share_keys", entry(OTHER, mask_key=LOW_ORDER)
        ),
    ),
    Attack(
        check="own numbers",
        action="masked_update",
        cast={"bounds": {"loss_sum": 100.0, "its name and address": 1.0}},
    ),
    Attack(check="own weight", action="masked_update", prepare=heavier),
    Attack(check="finite", action="masked_update", prepare=tell_values([1.0, np.nan, 2.0])),
    Attack(check="finite", action="masked_update", prepare=tell_values([1.0, np.inf, 2.0])),
    Attack(
        check="block bounds",
        action="masked_update",
        prepare=other_bounds,
        cast={**ROTATED, "rotation_bounds": BOUNDS},
    ),
]

# -- phases 3 and 4


def sets(survived: Callable[[list[str]], list[str]], dropped: list[str]) -> Change:
    return lambda told: told.model_copy(
        update={"survived": tuple(survived(list(told.survived))), "dropped": tuple(dropped)}
    )


def without(*names: str) -> Callable[[list[str]], list[str]]:
    return lambda survived: [name for name in survived if name not in names]


def of_both_phases(check: str, change: Change, **fields: Any) -> list[Attack]:
    return [
        Attack(check=check, action="unmask", change=change, **fields),
        Attack(check=check, action="consistency", mode="active", change=change, **fields),
        Attack(check=check, action="unmask", mode="active", change=change, **fields),
    ]


def cut_off(told: SurvivorsTold | UnmaskWanted) -> Any:
    """Let the server drop so many of one survivor's neighbours that hardly a mask is left."""
    session = Seen.session
    k, t = len(session.neighbours(OTHER)), session.parameters.threshold
    gone = [name for name in session.neighbours(OTHER) if name != VICTIM][: k - t + 1]
    return sets(without(*gone), gone)(told)


def forged(told: UnmaskWanted) -> UnmaskWanted:
    """Sign the set with keys of the server's own."""
    names = told.signatures
    return told.model_copy(
        update={"signatures": {name: SIGNER.sign(b"anything") for name in names}}
    )


SURVIVORS = [
    *of_both_phases("one share each", sets(without(), [OTHER])),
    *of_both_phases("survivors", sets(lambda s: [*s, "sybil"], [])),
    *of_both_phases("survivors", sets(without(OTHER), ["sybil"])),
    *of_both_phases("survivors", sets(without(OTHER), [])),
    *of_both_phases("survivors", sets(lambda s: [*s, OTHER], [])),
    *of_both_phases("survivors", sets(without(VICTIM), [VICTIM])),
    *of_both_phases(
        "enough survivors",
        sets(lambda s: [VICTIM], ["d000", OTHER, THIRD, "d004"]),  # a group of one
    ),
    *of_both_phases(
        "enough survivors",  # seven tenths of ten are seven
        sets(lambda s: s[:6], ["d006", "d007", "d008", "d009"]),
        num_devices=10,
    ),
    Attack(
        check="holders",
        action="unmask",
        num_devices=90,
        change=cut_off,
        cast={
            "corrupted": 0.05,
            "dropout": 0.05,
            "floor": Floor(corrupted=0.05, dropout=0.05, min_survivors=0.5),
        },
    ),
    Attack(
        check="one survivor set",  # re-asked with a changed list
        action="unmask",
        change=lambda told: [told, sets(without(OTHER), [OTHER])(told)],
    ),
    Attack(
        check="one survivor set",
        action="consistency",
        mode="active",
        change=lambda told: [told, sets(without(OTHER), [OTHER])(told)],
    ),
    Attack(
        check="one survivor set",  # one set to sign, another to unmask
        action="unmask",
        mode="active",
        change=sets(without(OTHER), [OTHER]),
    ),
    Attack(check="signed survivors", action="unmask", mode="active", change=forged),
    Attack(
        check="signed survivors",
        action="unmask",
        mode="active",
        change=lambda told: told.model_copy(update={"signatures": {}}),
    ),
    Attack(
        check="signed survivors",  # one too few: of five members four must sign
        action="unmask",
        mode="active",
        change=lambda told: told.model_copy(
            update={"signatures": dict(list(told.signatures.items())[:3])}
        ),
    ),
]

# -- any phase

ORDER = [
    Attack(
        check="order",
        action="check_shares",
        change=lambda told: UnmaskWanted(survived=tuple(Cast(5).names), dropped=()),
    ),
    Attack(
        check="order",  # another roster, after the shares were dealt
        action="check_shares",
        change=lambda told: Roster(parameters=Seen.session.parameters, members=()),
    ),
    Attack(
        check="order",  # shares of other dealers, after the first were opened
        action="masked_update",
        change=lambda told: SharesDelivered(shares=()),
    ),
    Attack(
        check="order",  # masks among others, after it masked
        action="unmask",
        change=lambda told: MaskWanted(members=("d000", VICTIM, OTHER)),
    ),
    Attack(
        check="order",  # a signature, where nobody checks any
        action="unmask",
        change=lambda told: SurvivorsTold(survived=told.survived, dropped=told.dropped),
    ),
]

ATTACKS = [*OPENING, *ROSTER, *DELIVERY, *MASKS, *SURVIVORS, *ORDER]


def play(attack: Attack) -> Played:
    cast = Cast(attack.num_devices, mode=attack.mode, **attack.cast)
    attack.prepare(cast)
    played = Played()
    seen = FaultPlan().tell("share_keys", Seen.note, client="d000")  # before it lies
    plan = replace(attack.plan, lies=(*seen.lies, *attack.plan.lies))
    try:
        cast.play_into(played, plan.tell(attack.action, attack.change, client=VICTIM))
    except RoundAborted:
        played.aborted = True
    return played


@pytest.mark.parametrize(
    "attack", ATTACKS, ids=lambda a: f"{a.check}-{a.action}-{a.mode}".replace(" ", "_")
)
def test_a_lie_is_refused_by_its_named_error(attack: Attack) -> None:
    played = play(attack)
    assert VICTIM in played.refused, "the victim answered"
    error = played.refused[VICTIM]
    assert SAYS.get(attack.check, "") in str(error)
    assert type(error) is BY_NAME[attack.check].error, repr(error)
    if played.opened is not None:  # the others went on, and their sum does not have the victim
        assert VICTIM not in played.opened.survived or attack.action in ("consistency", "unmask")


def test_every_check_is_attacked() -> None:
    assert {attack.check for attack in ATTACKS} == set(BY_NAME)
    assert len(BY_NAME) == len(CHECKS)


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_one_device_that_has_another_model_is_refused_and_the_others_go_on(mode: str) -> None:
    cast = Cast(6, mode=mode, device={VICTIM: {"model_digest": bytes(32)}})
    played = cast.play()
    assert isinstance(played.rejected[VICTIM], SessionMismatch)
    assert VICTIM not in played.sum.survived
    plain_P, _ = cast.plain_sum(played.sum.survived, played.sum)
    np.testing.assert_array_equal(played.sum.vector_P, plain_P)


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_a_server_that_hides_that_a_device_has_another_model_learns_nothing(mode: str) -> None:
    plan = as_if_of_the_session(FaultPlan(), [VICTIM]).tell("share_keys", Seen.note, client="d000")
    cast = Cast(6, mode=mode, device={VICTIM: {"model_digest": bytes(32)}})
    played = cast.play(plan)
    assert isinstance(played.refused[VICTIM], SessionMismatch)
    for name in cast.names:
        if name != VICTIM:  # and each of the others found its shares bad
            assert played.replies["check_shares"][name].bad_dealers == (VICTIM,)
    assert VICTIM not in played.vectors
    assert set(played.sum.survived) == set(cast.names) - {VICTIM}


def test_two_survivor_sets_for_two_halves_are_agreed_by_neither() -> None:
    cast = Cast(8, mode="active")
    plan = FaultPlan()
    for name in cast.names[:4]:  # they are told that d007 dropped, the others that it did not
        for action in ("consistency", "unmask"):
            plan = plan.tell(action, sets(without("d007"), ["d007"]), client=name)
    played = Played()
    with pytest.raises(RoundAborted):
        cast.play_into(played, plan)
    assert not played.replies.get("unmask")
    assert {type(error) for error in played.refused.values()} == {SurvivorsNotAgreed}
    assert set(played.refused) == set(cast.names)


def test_signatures_of_members_that_are_no_survivors_do_not_count() -> None:
    cast = Cast(6, mode="active")

    def padded(told: UnmaskWanted) -> UnmaskWanted:
        digest = survivors_digest(
            session=Seen.session.digest, survived=told.survived, dropped=told.dropped
        )
        late = cast.identities["d005"].sign(survivors_message(digest))
        kept = dict(list(told.signatures.items())[:4])
        return told.model_copy(update={"signatures": {**kept, "d005": late}})

    plan = (
        FaultPlan()
        .drop(client="d005", after="check_shares")
        .tell("share_keys", Seen.note, client=OTHER)
        .tell("unmask", padded, client=VICTIM)
    )
    played = Played()
    with pytest.raises(RoundAborted):  # all five of six are needed
        cast.play_into(played, plan)
    assert isinstance(played.refused[VICTIM], SurvivorsNotAgreed)


def test_what_was_answered_is_answered_again_alike_and_a_changed_list_never() -> None:
    for mode in ("semi-honest", "active"):
        cast = Cast(8, mode=mode)
        played = cast.play(FaultPlan().drop(client="d004", after="check_shares"))
        session = cast.parties[VICTIM].session
        for action, by_name in played.requests.items():
            if action == "advertise_keys":
                continue
            again = session.answer(by_name[VICTIM])
            assert again == played.replies[action][VICTIM]
        asked = played.requests["unmask"][VICTIM]
        for change in (
            sets(without(OTHER), [OTHER, "d004"]),
            sets(lambda s: [*s, "d004"], []),
        ):
            with pytest.raises(SurvivorsChanged):
                session.answer(change(asked))
        assert session.answer(asked) == played.replies["unmask"][VICTIM]


def test_a_refused_lie_changes_nothing_in_an_honest_session() -> None:
    cast = Cast(5)
    lies = {
        "share_keys": keeping(VICTIM),
        "check_shares": shares(lambda rows: [*rows, rows[0]]),
        "masked_update": u2(VICTIM),
        "unmask": sets(without(), [OTHER]),
    }
    for action, lie in lies.items():
        cast = Cast(5)
        session = cast.parties[VICTIM].session

        def lied_to_first(message: Any, lie: Change = lie, session: Any = session) -> Any:
            with pytest.raises(HeadwaterError):
                session.answer(lie(message))
            return message

        played = cast.play(FaultPlan().tell(action, lied_to_first, client=VICTIM))
        assert list(played.sum.survived) == cast.names
