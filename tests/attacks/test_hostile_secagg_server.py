"""A server that lies to the devices of a secure session: each lie is refused with its named error.

``ATTACKS`` has at least one lie for each row of ``client.secagg.checks.CHECKS``. The victim does
not answer the lying request. docs/secure-aggregation.md says what a server learns that stops there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headwater.client.secagg.checks import CHECKS
from headwater.common.errors import (
    HeadwaterError,
    RoundAborted,
    SessionMismatch,
    SurvivorsChanged,
    SurvivorsNotAgreed,
    UpdateNotHeld,
)
from headwater.common.secagg.protocol import UnmaskRequest
from headwater.common.secagg.session import survivors_digest, survivors_message
from tests.attacks.secagg_late_lies import (
    MASKS,
    ORDER,
    SURVIVORS,
    sets,
    u2,
    without,
)
from tests.attacks.secagg_lies import (
    DELIVERY,
    OPENING,
    OTHER,
    ROSTER,
    VICTIM,
    Attack,
    Change,
    Seen,
    as_if_of_the_session,
    keeping,
    shares,
)
from tests.faults import FaultPlan
from tests.secagg import Cast, Played

# Checks that share an error and a phase are told apart by what the error says.
SAYS = {
    "complete graph": "must be neighbours",
    "unique members": "appears twice",
    "own dealers": "shares",
    "survivors": "surviv",
    "enough survivors": "at least",
    "holders": "isolated",
}
BY_NAME = {check.name: check for check in CHECKS}
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
def test_a_server_s_lie_is_refused_with_its_named_error(attack: Attack) -> None:
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
def test_a_device_with_another_model_is_refused_and_the_others_continue(mode: str) -> None:
    cast = Cast(6, mode=mode, device={VICTIM: {"model_digest": bytes(32)}})
    played = cast.play()
    assert isinstance(played.rejected[VICTIM], SessionMismatch)
    assert VICTIM not in played.sum.survived
    plain_P, _ = cast.plain_sum(played.sum.survived, played.sum)
    np.testing.assert_array_equal(played.sum.vector_P, plain_P)


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_hiding_that_a_device_has_another_model_reveals_nothing(mode: str) -> None:
    plan = as_if_of_the_session(FaultPlan(), [VICTIM]).tell("share_keys", Seen.note, client="d000")
    cast = Cast(6, mode=mode, device={VICTIM: {"model_digest": bytes(32)}})
    played = cast.play(plan)
    assert isinstance(played.refused[VICTIM], SessionMismatch)
    for name in cast.names:
        if name != VICTIM:  # and each of the others found its shares bad
            assert played.replies["check_shares"][name].bad_dealers == (VICTIM,)
    assert VICTIM not in played.vectors
    assert set(played.sum.survived) == set(cast.names) - {VICTIM}


def test_two_survivor_sets_for_two_halves_are_accepted_by_neither() -> None:
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


def test_signatures_of_members_that_did_not_survive_do_not_count() -> None:
    cast = Cast(6, mode="active")

    def padded(told: UnmaskRequest) -> UnmaskRequest:
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


def test_a_repeated_request_gets_the_same_reply_and_a_changed_list_none() -> None:
    for mode in ("semi-honest", "active"):
        cast = Cast(8, mode=mode)
        played = cast.play(FaultPlan().drop(client="d004", after="check_shares"))
        session = cast.parties[VICTIM].session
        for action, by_name in played.requests.items():
            if action == "advertise_keys":
                continue
            if action == "masked_update":  # the server has the vector, and the client let it go
                with pytest.raises(UpdateNotHeld):
                    session.answer(by_name[VICTIM])
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


def test_a_refused_lie_leaves_the_session_unchanged() -> None:
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
