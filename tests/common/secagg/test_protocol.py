"""Thresholds, quorums, digests, and messages that never quote secrets."""

from __future__ import annotations

import base64
import typing
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import CorruptUpdate, RingCanWrap
from headwater.common.flower import records
from headwater.common.secagg.fixed_point import plan_encoding
from headwater.common.secagg.graph import Mode
from headwater.common.secagg.protocol import (
    MAX_COMPLETE,
    PHASES,
    KeysRequest,
    Member,
    Parameters,
    Reply,
    Request,
    SessionNumber,
    UnmaskReply,
    complete_threshold,
    next_number,
    signatures_needed,
)
from headwater.common.secagg.scalar_encoding import plan_scalar, plan_sums
from headwater.common.secagg.session import (
    framed,
    keys_message,
    session_digest,
    session_of,
    survivors_digest,
)
from headwater.common.terms import SumOf
from tests.faults import FaultPlan
from tests.secagg import Cast, Played

MODEL = bytes(range(32))


def parameters(**changes: Any) -> Parameters:
    fields: dict[str, Any] = {
        "run": 1,
        "round": 2,
        "attempt": 1,
        "mode": "active",
        "plan": bytes(32),
        "threshold": 3,
        "num_values": 7,
        "encoding": plan_encoding(max_weight=12, clip=4.0),
        "scalars": (plan_scalar("weight", bound=4.0, num_devices=3, is_count=True),),
        **changes,
    }
    return Parameters(**fields)


def members(count: int = 3) -> list[Member]:
    return [
        Member(
            name=f"d{i}",
            mask_key=bytes([i] * 32),
            sharing_key=bytes([99 - i] * 32),
            planned_weight=4,
        )
        for i in range(count)
    ]


@given(st.integers(3, 64))
def test_no_split_of_honest_holders_yields_both_shares(num_members: int) -> None:
    # Each honest holder gives one of a device's two shares, a corrupted one gives both.
    for mode, num_corrupted in (("semi-honest", 0), ("active", (num_members - 1) // 3)):
        threshold = complete_threshold(num_members, mode)  # type: ignore[arg-type]
        assert 2 * threshold > num_members + num_corrupted
        assert 2 * (threshold - 1) <= num_members + num_members / 3  # and not much higher


def test_thresholds_are_those_of_the_table() -> None:
    found = [
        (n, complete_threshold(n, "semi-honest"), complete_threshold(n, "active"))
        for n in (3, 10, 64)
    ]
    assert found == [(3, 2, 3), (10, 6, 7), (64, 33, 43)]


@pytest.mark.parametrize("percent", ["0", "0.5", "1", "5", "7", "10", "20", "33", "40"])
def test_two_quorums_overlap_in_more_than_the_corrupted(percent: str) -> None:
    for n in range(3, 2001):
        check_quorum(n, Fraction(percent) / 100)


@pytest.mark.slow
def test_two_quorums_overlap_in_more_than_the_corrupted_for_a_million_pairs() -> None:
    for thousandths in range(501):
        for n in range(3, 2001):
            check_quorum(n, Fraction(thousandths, 1000))


def check_quorum(n: int, fraction: Fraction) -> None:
    """Check one (n, c) against integers alone."""
    num_corrupted = -(-fraction.numerator * n // fraction.denominator)
    quorum = signatures_needed(2, n, corrupted=float(fraction))
    # Two sets of ``quorum`` signers among n members have at least 2 quorum - n in common.
    assert 2 * quorum - n > num_corrupted
    assert 2 * (quorum - 1) - n <= num_corrupted, "one signature fewer would do"


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_signatures_needed_are_never_fewer_than_the_threshold(mode: Mode) -> None:
    for n in range(3, MAX_COMPLETE + 1):
        threshold = complete_threshold(n, mode)
        for corrupted in (0.0, 0.005, 0.05, 0.1, 0.2, 0.33, 0.9):
            assert signatures_needed(threshold, n, corrupted=corrupted) >= threshold
        if mode == "active":
            assert signatures_needed(threshold, n, corrupted=0.1) == threshold


def test_signatures_needed_are_exact_where_floats_are_not() -> None:
    # 1.005 x 1,000 is 1004.9999999999999 in floats, which gave a quorum of 1,005.
    assert signatures_needed(2, 2000, corrupted=0.005) == 1006


@given(
    st.lists(st.binary(max_size=4), max_size=4),
    st.lists(st.binary(max_size=4), max_size=4),
)
def test_no_two_lists_of_fields_encode_alike(one: list[bytes], other: list[bytes]) -> None:
    assert (framed(*one) == framed(*other)) == (one == other)


def test_the_session_s_digest_depends_on_all_that_members_must_agree_on() -> None:
    base = session_digest(parameters(), members(), model_digest=MODEL)
    renamed, rekeyed, reweighed = members(), members(), members()
    renamed[1] = renamed[1].model_copy(update={"name": "d7"})
    rekeyed[1] = rekeyed[1].model_copy(update={"sharing_key": bytes(32)})
    reweighed[1] = reweighed[1].model_copy(update={"planned_weight": 5})
    others = [
        session_digest(parameters(), members(), model_digest=bytes(32)),
        session_digest(parameters(), members(4), model_digest=MODEL),
        *(session_digest(parameters(), m, model_digest=MODEL) for m in (renamed, rekeyed)),
        session_digest(parameters(), reweighed, model_digest=MODEL),
    ]
    changes: list[dict[str, Any]] = [
        {"run": 2},
        {"round": 3},
        {"attempt": 2},
        {"mode": "semi-honest"},
        {"plan": bytes([1] * 32)},
        {"threshold": 2},
        {"num_neighbours": 2},
        {"cipher": "aes256-ctr"},
        {"num_values": 8},
        {"encoding": plan_encoding(max_weight=12, clip=8.0)},
        {"scalars": ()},
        {"rotation_seed": bytes(32)},
        {"bounds_digest": bytes(32)},
        {"sums": plan_sums({"counts": SumOf(length=2)}, num_devices=3)},
    ]
    others += [session_digest(parameters(**c), members(), model_digest=MODEL) for c in changes]
    assert {key for change in changes for key in change} == Parameters.model_fields.keys()
    assert len({base, *others}) == 1 + len(others)
    assert base == session_digest(parameters(), reversed(members()), model_digest=MODEL)


def test_the_signed_keys_message_depends_on_session_name_and_keys() -> None:
    wanted = KeysRequest(run=1, round=2, attempt=3, mode="active")
    member = members()[1]
    messages = {
        keys_message(w, m)
        for w in (wanted, *(wanted.model_copy(update={f: 9}) for f in ("run", "round", "attempt")))
        for m in (
            member,
            member.model_copy(update={"name": "d9"}),
            member.model_copy(update={"mask_key": bytes(32)}),
            member.model_copy(update={"sharing_key": bytes(32)}),
            member.model_copy(update={"has_aes": True}),
        )
    }
    assert len(messages) == 4 * 5


def test_each_survivor_set_has_one_digest_of_its_own() -> None:
    def digest(survived: str, dropped: str, session: bytes = MODEL) -> bytes:
        return survivors_digest(session=session, survived=survived, dropped=dropped)

    base = digest("abc", "de")
    assert base == digest("cab", "ed")
    others = [
        digest("abcd", "e"),
        digest("ab", "cde"),
        digest("de", "abc"),
        digest("abc", "de", b""),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_session_numbers_increase_strictly() -> None:
    numbers = [next_number(None, round_number=4)]
    for round_number in (4, 4, 5, 5, 9):
        numbers.append(next_number(numbers[-1], round_number=round_number))
    assert numbers == sorted(set(numbers))
    assert numbers[:3] == [SessionNumber(4, 1), SessionNumber(4, 2), SessionNumber(4, 3)]


def test_every_message_belongs_to_one_phase() -> None:
    assert {phase.request for phase in PHASES} == set(typing.get_args(Request))
    assert {phase.reply for phase in PHASES} == set(typing.get_args(Reply))
    assert len({phase.action for phase in PHASES}) == len(PHASES)


def played(mode: str) -> Played:
    cast = Cast(4, mode=mode)
    return cast.play(FaultPlan().drop(client="d003", after="check_shares"))


def test_every_message_of_a_session_survives_json_and_hides_its_shares() -> None:
    # ``tests.secagg`` sends each head through JSON; here every one is looked at.
    session = played("active")
    told = [request for by_name in session.requests.values() for request in by_name.values()]
    assert {type(message) for message in told} == set(typing.get_args(Request))
    for message in told:
        again = records.parse(message.model_dump_json(exclude_none=True), type(message))
        assert again == message


def test_neither_a_repr_nor_an_error_quotes_a_share() -> None:
    share = bytes(range(100, 132))
    text = base64.urlsafe_b64encode(share).decode()
    revealed = UnmaskReply(name="ann", self_seed_shares={"bob": share}, mask_key_shares={})
    shown = [repr(revealed), str(revealed)]
    for broken in (
        f'{{"name": "ann", "self_seed_shares": "{text}"}}',
        f'{{"name": "ann", "self_seed_shares": {{"bob": "{text}AAAA"}}, "mask_key_shares": {{}}}}',
        f'{{"name": "{text}"}}',
    ):
        with pytest.raises(CorruptUpdate) as caught:
            records.parse(broken, UnmaskReply)
        shown += [str(caught.value), repr(caught.value), repr(caught.value.__cause__)]
    for form in (text, text[:20], share.hex(), repr(share)[2:-1]):
        assert not any(form in line for line in shown)


def test_an_encoding_that_can_wrap_is_refused_on_arrival() -> None:
    text = parameters().model_dump_json(exclude_none=True)
    assert '"clip":4.0' in text
    with pytest.raises(RingCanWrap):
        records.parse(text.replace('"clip":4.0', '"clip":400.0'), Parameters)
    for clip in ("NaN", "Infinity", "-1", "0"):
        with pytest.raises(CorruptUpdate):
            records.parse(text.replace('"clip":4.0', f'"clip":{clip}'), Parameters)


def test_in_a_complete_graph_a_dealer_holds_one_of_its_own_shares() -> None:
    session = session_of(parameters(), members(), model_digest=MODEL)
    assert session.holders("d1") == ("d0", "d1", "d2")
    assert session.neighbours("d1") == ("d0", "d2")
    assert session.short_of_holders(["d0", "d1"], present=["d0", "d2", "d2", "x"]) == ["d0", "d1"]
    assert session.short_of_holders(["d0", "d1"], present=["d0", "d1", "d2"]) == []
