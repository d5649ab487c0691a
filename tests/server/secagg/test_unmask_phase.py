"""The server's phases of secure aggregation: requests, exclusions, and the unmasked sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headwater.client.secagg.types import Floor
from headwater.common.errors import (
    NoSuchGraph,
    TooFewSurvivors,
    UpdateAlreadyMasked,
    WrongShare,
)
from headwater.common.secagg.graph import graph_size
from headwater.common.secagg.protocol import (
    MAX_COMPLETE,
    KeysReply,
    Member,
    SessionNumber,
    next_number,
)
from headwater.common.secagg.session import session_of
from headwater.server.secagg.key_phases import KeysPhase, open_session, resolve_complaints
from headwater.server.secagg.mask_phases import MaskPhase
from headwater.server.secagg.parameters import SessionSetup, most_members, parameters_of
from headwater.server.secagg.unmask_phase import UnmaskedSum, UnmaskPhase
from tests.faults import FaultPlan
from tests.secagg import ACTIONS, MODEL, PLANNED, Cast, Played


def members(count: int, **fields: Any) -> list[Member]:
    return [
        Member(
            name=f"d{i:04}",
            mask_key=i.to_bytes(32, "big"),
            sharing_key=(i + 10_000).to_bytes(32, "big"),
            planned_weight=1 + i % PLANNED,
            **fields,
        )
        for i in range(count)
    ]


def make_setup(**changes: Any) -> SessionSetup:
    fields: dict[str, Any] = {
        "run": 1,
        "number": SessionNumber(1, 1),
        "mode": "semi-honest",
        "model_digest": MODEL,
        "plan_digest": bytes(32),
        "num_values": 10,
        "planned_weights": {},
        "clip": 4.0,
        **changes,
    }
    return SessionSetup(**fields)


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_cohorts_up_to_64_are_complete_and_larger_ones_as_sparse_as_the_bounds_allow(
    mode: Any,
) -> None:
    chosen = make_setup(mode=mode)
    small = parameters_of(chosen, members(MAX_COMPLETE))
    assert small.num_neighbours is None
    assert small.threshold == (33 if mode == "semi-honest" else 43)
    large = parameters_of(chosen, members(200))
    size = graph_size(200, corrupted=0.1, dropout=0.1, mode=mode)
    assert (large.num_neighbours, large.threshold) == (size.num_neighbours, size.threshold)


def test_a_cohort_without_a_dense_enough_graph_is_refused_by_a_named_error() -> None:
    chosen = make_setup(mode="active", dropout=0.3)
    with pytest.raises(NoSuchGraph):
        parameters_of(chosen, members(1000))


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_a_session_takes_the_members_of_whom_there_is_a_graph(mode: Any) -> None:
    """With these fractions there is none above 64, and with the last ones none above some size."""
    chosen: dict[str, Any] = {"mode": mode, "corrupted": 0.5, "dropout": 0.5}
    assert [most_members(number, least=3, **chosen) for number in (64, 65, 300)] == [64] * 3
    with pytest.raises(NoSuchGraph, match="300 devices are ready, and a session may have 64"):
        most_members(300, least=65, **chosen)
    usual: dict[str, Any] = {"mode": mode, "corrupted": 0.1, "dropout": 0.1}
    assert [most_members(number, least=3, **usual) for number in (65, 300)] == [65, 300]
    many: dict[str, Any] = {"mode": "active", "corrupted": 0.2, "dropout": 0.3}
    found = most_members(400, least=3, **many)
    graph_size(found, **many)
    with pytest.raises(NoSuchGraph):
        graph_size(found + 1, **many)


def test_each_session_that_takes_fewer_members_leaves_out_others() -> None:
    def left_out(attempt: int) -> set[str]:
        number = SessionNumber(1, attempt)
        names = [one.name for one in members(67)]
        weights = dict.fromkeys(names, PLANNED)
        chosen = make_setup(number=number, planned_weights=weights, corrupted=0.5, dropout=0.5)
        keys = {
            one.name: KeysReply(
                name=one.name, mask_key=one.mask_key, sharing_key=one.sharing_key, has_aes=True
            )
            for one in members(67)
        }
        phase = KeysPhase(setup=chosen, keys=keys)
        assert phase.close().session.members.keys() == set(names) - phase.excluded.keys()
        return {*phase.excluded}

    found = [left_out(attempt) for attempt in (1, 2)]
    assert [len(names) for names in found] == [3, 3]
    assert found[0] != found[1]


def test_aes_is_chosen_only_if_all_members_have_instructions_for_it() -> None:
    rows = members(5, has_aes=True)
    assert parameters_of(make_setup(), rows).cipher == "aes256-ctr"
    rows[3] = rows[3].model_copy(update={"has_aes": False})
    assert parameters_of(make_setup(), rows).cipher == "chacha20"


def test_the_sum_is_the_same_with_aes() -> None:
    fields = {name: {"has_aes": True} for name in Cast(4).names}
    cast = Cast(4, device=fields)
    played = cast.play(FaultPlan().drop(client="d002", after="check_shares"))
    assert played.sum.session.parameters.cipher == "aes256-ctr"
    plain_P, _ = cast.plain_sum(played.sum.survived, played.sum)
    np.testing.assert_array_equal(played.sum.vector_P, plain_P)


def phase_before_opening(cast: Cast, plan: FaultPlan) -> UnmaskPhase:
    played = cast.play(plan)
    assert isinstance(played.phase, UnmaskPhase)
    return played.phase


def test_a_dealer_of_bad_shares_is_excluded_before_the_masks_with_the_reason() -> None:
    def spoil(said: Any) -> Any:
        dealt = said[0]
        shares = tuple(s.model_copy(update={"sealed": bytes(92)}) for s in dealt.shares)
        return dealt.model_copy(update={"shares": shares}), None

    played = Cast(7).play(FaultPlan().answer("share_keys", spoil, client="d002"))
    checked = played.replies["check_shares"]
    excluded = resolve_complaints({name: reply.bad_dealers for name, reply in checked.items()})
    assert set(excluded) == {"d002"}
    assert isinstance(excluded["d002"], WrongShare)
    assert "d002: between it and d000" in str(excluded["d002"])
    assert "d002" not in played.sum.survived


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (None, "2 devices advertised keys"),
        ("advertise_keys", "2 devices dealt shares"),
        ("share_keys", "0 devices can mask an update"),  # 2 are fewer than t = 4: all leave
        ("check_shares", "2 devices sent a masked update"),
        ("masked_update", "fewer than 4 holders remain"),
    ],
)
def test_an_abort_names_the_phase_with_too_few_members(after: str | None, said: str) -> None:
    cast, plan = Cast(6), FaultPlan()
    for name in cast.names[:4]:
        plan = plan.drop(client=name, after=after)
    with pytest.raises(TooFewSurvivors, match=f"round 1, attempt 1: {said}"):
        cast.play(plan)


def test_too_few_signatures_abort_before_any_share_is_requested() -> None:
    cast, played = Cast(6, mode="active"), Played()
    plan = FaultPlan()
    for name in cast.names[:2]:  # five of six must sign
        plan = plan.drop(client=name, after="masked_update")
    with pytest.raises(TooFewSurvivors, match="4 devices signed the survivor set, 5 must"):
        cast.play_into(played, plan)
    assert "unmask" not in played.requests


def test_only_signers_are_asked_for_shares() -> None:
    cast = Cast(7, mode="active")
    phase = phase_before_opening(cast, FaultPlan().drop(client="d003", after="masked_update"))
    assert phase.recipients == tuple(name for name in cast.names if name != "d003")
    assert phase.survived == tuple(cast.names)  # its update came: it is in the sum all the same


def test_the_sum_can_be_unmasked_as_soon_as_enough_shares_have_arrived() -> None:
    cast = Cast(9)  # t = 5
    played, ready = Played(), []

    def look(said: Any) -> Any:
        assert isinstance(played.phase, UnmaskPhase)
        ready.append(played.phase)
        return said

    plan = FaultPlan()
    for name in cast.names:
        plan = plan.answer("unmask", look, client=name)
    cast.play_into(played, plan)
    phase = ready[0]
    assert not phase.can_unmask
    for count, name in enumerate(cast.names, start=1):
        phase = phase.take(name, played.replies["unmask"][name])
        assert phase.can_unmask == (count >= 5)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_unmasked_sum_is_independent_of_the_number_of_threads(num_threads: int) -> None:
    cast = Cast(5, num_values=100_000)
    phase: Any = open_session(cast.setup)
    while not isinstance(phase, UnmaskPhase):
        for name, request in phase.requests().items():
            session: Any = cast.parties[name].session
            reply = session.answer(request)
            if isinstance(phase, MaskPhase):
                if name != "d002":
                    phase = phase.take(name, reply, session.vector.tobytes())
            else:
                phase = phase.take(name, reply)
        phase = phase.close()
    for name, request in phase.requests().items():
        phase = phase.take(name, cast.parties[name].session.answer(request))
    opened = phase.close(num_threads=num_threads)
    plain_P, _ = cast.plain_sum(opened.survived, opened)
    np.testing.assert_array_equal(opened.vector_P, plain_P)


def test_a_reply_makes_a_new_phase_and_leaves_the_old_unchanged() -> None:
    cast = Cast(3)
    phase = open_session(cast.setup)
    session: Any = cast.parties["d000"].session
    reply = session.answer(phase.requests()["d000"])
    after = phase.take("d000", reply)
    assert isinstance(after, KeysPhase)
    assert (len(phase.keys), len(after.keys)) == (0, 1)


class ServerKilled(BaseException):
    """The server's process ends."""


@pytest.mark.parametrize(
    ("mode", "action"),
    [("active", action) for action in ACTIONS]
    + [("semi-honest", action) for action in ACTIONS if action != "consistency"],
)
@pytest.mark.parametrize("victim", ["d001", "d005"])
def test_a_restarted_server_opens_a_new_attempt_and_no_update_is_masked_twice(
    mode: str, action: str, victim: str
) -> None:
    cast, played = Cast(9, mode=mode), Played()
    masked: dict[str, int] = dict.fromkeys(cast.names, 0)

    def killed(message: Any) -> Any:
        raise ServerKilled

    with pytest.raises(ServerKilled):
        cast.play_into(played, FaultPlan().tell(action, killed, client=victim))
    for name in played.vectors:
        masked[name] += 1
    assert any(masked.values()) == (ACTIONS.index(action) >= ACTIONS.index("masked_update"))

    # The new process knows the stored number alone.
    cast.setup = replace(cast.setup, number=next_number(cast.setup.number, round_number=1))
    again = Played()
    fresh = [name for name in cast.names if not masked[name]]
    if len(fresh) < 3:
        with pytest.raises(TooFewSurvivors, match="attempt 2"):
            cast.play_into(again, FaultPlan())
    else:
        cast.play_into(again, FaultPlan())
        assert list(again.sum.survived) == fresh
        plain_P, _ = cast.plain_sum(fresh, again.sum)
        np.testing.assert_array_equal(again.sum.vector_P, plain_P)
    for name in again.vectors:
        masked[name] += 1
    assert max(masked.values()) == 1
    assert {type(again.refused[name]) for name in again.refused} <= {UpdateAlreadyMasked}


def test_in_a_sparse_graph_a_device_with_too_few_holders_is_excluded_before_masking() -> None:
    # All but t - 1 of one device's neighbours vanish after they dealt: its secrets could not be
    # opened, so it may not mask. The others lose nothing by it.
    assumed = Floor(corrupted=0.05, dropout=0.05)
    cast = Cast(90, corrupted=0.05, dropout=0.05, floor=assumed)
    rosters: list[Any] = []

    def note(roster: Any) -> Any:
        rosters.append(roster)
        return roster

    gone: set[str] = set()

    def leave(message: Any) -> Any:
        if not gone:
            session = session_of(rosters[0].parameters, rosters[0].members, model_digest=MODEL)
            near = [name for name in session.neighbours("d040") if name != "d000"]
            gone.update(near[: len(near) - session.parameters.threshold + 2])
        return message

    plan = FaultPlan().tell("share_keys", note, client="d000").tell("check_shares", leave)

    def silent(name: str) -> Any:
        return lambda said: [] if name in gone else said

    for name in cast.names:
        plan = plan.answer("check_shares", silent(name), client=name)
    played = cast.play(plan)
    assert gone
    assert "d040" not in played.requests["masked_update"]
    assert isinstance(played.opened, UnmaskedSum)
    assert not gone & set(played.sum.survived)
    plain_P, _ = cast.plain_sum(played.sum.survived, played.sum)
    np.testing.assert_array_equal(played.sum.vector_P, plain_P)
