"""SecureSession: it answers once, stores its record first, masks in place, erases secrets."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from headwater.client.secagg.session import SecureSession
from headwater.client.secagg.states import (
    AwaitingMaskRequest,
    AwaitingRoster,
    AwaitingShares,
    AwaitingUnmask,
    SessionFinished,
)
from headwater.client.secagg.types import SessionRecord, UnmaskedUpdate
from headwater.common.errors import (
    OutOfPhase,
    RoundAborted,
    SessionReplayed,
    StateError,
    UpdateAlreadyMasked,
)
from headwater.common.secagg.fixed_point import RingVector, encode_in_place
from headwater.common.secagg.protocol import (
    NUM_CLIPPED,
    WEIGHT,
    CheckRequest,
    KeysRequest,
    MaskRequest,
    Request,
    SessionNumber,
)
from tests.faults import FaultPlan
from tests.secagg import PLANNED, RUN, Cast, Played

ME = "d001"


def session_of(cast: Cast, name: str = ME) -> SecureSession:
    session = cast.parties[name].session
    assert isinstance(session, SecureSession)
    return session


def watch(cast: Cast, look: Callable[[str, Request], None]) -> FaultPlan:
    """Look at each message to the device before it is answered."""
    plan = FaultPlan()
    for action in ("advertise_keys", "share_keys", "check_shares", "masked_update", "unmask"):

        def looked(message: Any, action: str = action) -> Any:
            look(action, message)
            return message

        plan = plan.tell(action, looked, client=ME)
    return plan


def test_the_states_follow_the_phases() -> None:
    cast, seen = Cast(4), []
    cast.play(watch(cast, lambda _, message: seen.append(type(session_of(cast).state))))
    assert seen == [type(None), AwaitingRoster, AwaitingShares, AwaitingMaskRequest, AwaitingUnmask]
    assert isinstance(session_of(cast).state, SessionFinished)


def test_the_update_is_masked_in_its_own_memory() -> None:
    cast = Cast(4)
    session = session_of(cast)
    before = session.update.values_P
    vectors: list[RingVector | None] = []

    def look(message: MaskRequest) -> MaskRequest:
        session.answer(message)
        vectors.append(session.vector)
        return message

    cast.play(FaultPlan().tell("masked_update", look, client=ME))
    assert vectors[0] is not None
    assert vectors[0].__array_interface__["data"][0] == before.data_ptr()
    assert vectors[0].nbytes == 4 * before.numel()


def test_masking_takes_little_memory_beyond_the_vector() -> None:
    num_values = 1 << 21  # 8 MiB of float32
    cast = Cast(6, num_values=num_values)
    peaks: list[int] = []

    def measured(message: MaskRequest) -> MaskRequest:
        tracemalloc.start()
        session_of(cast).answer(message)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return message

    cast.play(FaultPlan().tell("masked_update", measured, client=ME))
    assert peaks[0] < 4 * 2**20


def test_a_repeated_request_gets_the_same_reply_and_masks_nothing_twice() -> None:
    cast = Cast(4)
    twice: dict[str, bool] = {}
    vectors: list[bytes] = []

    def again(action: str, message: Request) -> None:
        session = session_of(cast)
        first = session.answer(message)
        if session.vector is not None:
            vectors.append(session.vector.tobytes())
        twice[action] = session.answer(message) == first

    played = cast.play(watch(cast, again))
    assert len(twice) == 5
    assert all(twice.values())
    assert set(vectors) == {played.vectors[ME]}
    plain_P, _ = cast.plain_sum(cast.names, played.sum)
    np.testing.assert_array_equal(played.sum.vector_P, plain_P)


def test_the_record_is_stored_before_each_reply() -> None:
    cast = Cast(4, mode="active")
    cast.play()
    stored = cast.parties[ME].stored
    # The number; then the update that is about to be masked; then the survivor set, once.
    assert [record.highest for record in stored] == [None, *[SessionNumber(1, 1)] * 3]
    assert [record.masked for record in stored] == [None, None, f"{ME} 0", f"{ME} 0"]
    assert [record.answered is None for record in stored] == [True, True, True, False]


def test_a_record_survives_json() -> None:
    cast = Cast(3)
    cast.play()
    for record in cast.parties[ME].stored:
        assert SessionRecord.of(json.loads(json.dumps(asdict(record)))) == record


@pytest.mark.parametrize("action", ["advertise_keys", "masked_update", "unmask"])
def test_nothing_is_answered_or_masked_if_the_record_cannot_be_stored(action: str) -> None:
    cast = Cast(5)
    party = cast.parties[ME]
    is_full = False

    def store(record: SessionRecord) -> None:
        if is_full:
            raise StateError("the disk is full")
        party.stored.append(record)

    values_P = torch.from_numpy(party.values_P.copy())
    session = SecureSession(
        party.device,
        SessionRecord(),
        store=store,
        update=UnmaskedUpdate(values_P=values_P, numbers=party.numbers),
    )
    party.session = session

    def full(message: Request) -> Request:
        nonlocal is_full
        is_full = True
        before = values_P.numpy().tobytes()  # ring elements may look like NaN
        with pytest.raises(StateError):
            session.answer(message)
        assert values_P.numpy().tobytes() == before
        is_full = False
        return message

    plan = FaultPlan().tell(action, full, client=ME)
    if action == "unmask":  # the reply is lost with the erased shares; the other members continue
        played = cast.play(plan)
        assert ME in played.refused
        assert ME in played.sum.survived
    else:  # and when there is room again, the same message is answered
        assert list(cast.play(plan).sum.survived) == cast.names


@pytest.mark.parametrize("mode", ["32 bits", "16 bits"])
@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ([1.0, float("nan"), 1.0], {}),
        ([1.0, float("-inf"), 1.0], {}),
        ([3e38, 3e38, 3e38], {}),
        ([1.0, 1.0, 1.0], {"loss_sum": float("nan")}),
        ([1.0, 1.0, 1.0], {WEIGHT: PLANNED + 1}),
    ],
)
def test_an_update_that_cannot_be_masked_as_it_is_is_cut_or_rides_as_one_of_weight_0(
    values: list[float], numbers: dict[str, float], mode: str
) -> None:
    """A sum of huge coordinates is finite, and its rotation for a 16-bit ring is not.

    Only one that is too heavy is cleared: a server could have all members but one send others.
    """
    bounds = np.full(2, 4.0, np.float32)
    chosen: dict[str, Any] = {}
    if mode == "16 bits":
        chosen = {"ring_bits": 16, "rotation_seed": bytes(32), "rotation_bounds": bounds}
    cast = Cast(5, **chosen)
    party = cast.parties[ME]
    given = UnmaskedUpdate(
        values_P=torch.tensor(values), numbers={**party.numbers, "loss_sum": 7.0, **numbers}
    )
    party.session = SecureSession(
        party.device, SessionRecord(), store=party.stored.append, update=given
    )
    played = cast.play()
    assert not played.refused
    assert party.is_spent
    others = sum(int(cast.parties[name].numbers[WEIGHT]) for name in cast.names if name != ME)
    is_cleared = WEIGHT in numbers
    own = 0 if is_cleared else int(party.numbers[WEIGHT])
    assert played.sum.numbers[WEIGHT] == others + own
    if mode == "32 bits":
        plain_P, _ = cast.plain_sum([name for name in cast.names if name != ME], played.sum)
        is_same = played.sum.vector_P == plain_P
        assert is_same.all() if is_cleared else not is_same[0]


def next_attempt(cast: Cast) -> None:
    last = cast.setup.number
    cast.setup = replace(cast.setup, number=SessionNumber(last.round, last.attempt + 1))


def test_an_unmasked_update_joins_the_next_attempt_with_new_keys() -> None:
    cast = Cast(5)
    played = Played()
    with pytest.raises(RoundAborted):
        cast.play_into(
            played,
            FaultPlan()
            .drop(client="d000", after="share_keys")
            .drop(client="d002", after="share_keys")
            .drop(client="d003", after="share_keys"),
        )
    assert not any(party.is_spent for party in cast.parties.values())
    next_attempt(cast)
    again = cast.play()
    assert list(again.sum.survived) == cast.names
    for name in cast.names:
        first, second = (p.replies["advertise_keys"][name] for p in (played, again))
        assert {first.mask_key, first.sharing_key}.isdisjoint({second.mask_key, second.sharing_key})


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_masked_update_joins_no_other_session(is_restarted: bool) -> None:
    cast = Cast(5)
    cast.play()
    next_attempt(cast)
    party = cast.parties[ME]
    if is_restarted:  # the process is new, the examples and the record are not
        cast.join(party.device, weight=1, seed=1, record=party.record)
    wanted = KeysRequest(run=RUN, round=1, attempt=2, mode="semi-honest")
    with pytest.raises(UpdateAlreadyMasked, match="d001 0"):
        session_of(cast).answer(wanted)
    # With new examples it takes part.
    device = replace(party.device, update_id=f"{ME} 1")
    cast.join(device, weight=1, seed=2, record=party.record)
    session_of(cast).answer(wanted)


def test_a_restarted_device_refuses_its_old_session() -> None:
    cast = Cast(5)
    played = Played()

    def restart(message: Any) -> Any:
        party = cast.parties[ME]
        cast.join(party.device, weight=1, seed=1, record=party.record)
        return message

    cast.play_into(played, FaultPlan().tell("check_shares", restart, client=ME))
    assert isinstance(played.refused[ME], OutOfPhase)
    assert ME not in played.sum.survived
    with pytest.raises(SessionReplayed):
        session_of(cast).answer(KeysRequest(run=RUN, round=1, attempt=1, mode="semi-honest"))


def test_clipped_coordinates_and_numbers_are_counted_as_a_masked_number() -> None:
    cast = Cast(3, num_values=100)
    expected = 0
    for number, name in enumerate(cast.names):
        party = cast.parties[name]
        party.numbers = {**party.numbers, "loss_sum": 100.0 + number}  # the bound is 100
        cast.give(name, party.values_P)
        expected += number > 0
    played = cast.play()
    for name in cast.names:
        party = cast.parties[name]
        _, num_clipped = encode_in_place(
            torch.from_numpy(party.values_P.copy()),
            weight=party.device.planned_weight,
            encoding=played.sum.session.parameters.encoding,
        )
        expected += num_clipped
    assert expected > 2
    assert played.sum.numbers[NUM_CLIPPED] == expected
    assert played.sum.numbers["loss_sum"] == pytest.approx(300.0, abs=1e-9)


def test_a_closed_session_answers_nothing() -> None:
    cast = Cast(4)
    played = cast.play()
    session = session_of(cast)
    session.close()
    for action, by_name in played.requests.items():
        error = SessionReplayed if action == "advertise_keys" else OutOfPhase
        with pytest.raises(error):
            session.answer(by_name[ME])


def test_shares_of_dealers_that_left_are_revealed_to_nobody() -> None:
    cast = Cast(6)
    played = cast.play(FaultPlan().drop(client="d004", after="share_keys"))
    assert "d004" not in played.requests["masked_update"][ME].members
    delivered: CheckRequest = played.requests["check_shares"][ME]
    assert "d004" in {share.dealer for share in delivered.shares}
    for reply in played.replies["unmask"].values():
        assert "d004" not in {*reply.self_seed_shares, *reply.mask_key_shares}
