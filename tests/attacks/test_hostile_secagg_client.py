"""A device that lies in a secure session: its lie is found, named, and costs the others nothing.

What it masks nobody can see: garbage within the clip bound is out of scope (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from client.secure_device import Record, Trained
from client.secure_session import SecureSession
from client.secure_states import Advertised
from common.errors import (
    BadPublicKey,
    CorruptUpdate,
    DealerCheated,
    HeadwaterError,
    IdentityUnknown,
    LateUpdate,
    RoundAborted,
    SessionMismatch,
    SignatureRefused,
    SumOutOfRange,
    TooFewSurvivors,
    UnexpectedUpdate,
    WrongShare,
)
from common.identity import SigningIdentity
from common.secagg import (
    WEIGHT,
    KeysAdvertised,
    MaskedHead,
    Reply,
    Request,
    Roster,
    SharesDealt,
    SharesRevealed,
    SurvivorsSigned,
)
from common.session_digest import keys_message
from common.session_keys import new_key_pair
from server.secure_phases import blamed
from server.secure_round import Followed, summed
from server.unmask import UnmaskPhase
from tests.faults import FaultPlan
from tests.secagg import Cast, Played

LIAR, OTHER = "d002", "d003"
MODES = ("semi-honest", "active")


def changed(**fields: Any) -> Callable[[tuple[Any, Any]], Any]:
    """Change fields of an answer; a function is given the answer and returns the field's value."""

    def change(said: tuple[Any, Any]) -> tuple[Any, Any]:
        answer, vector = said
        values = {n: value(answer) if callable(value) else value for n, value in fields.items()}
        return answer.model_copy(update=values), vector

    return change


def sum_without(cast: Cast, played: Played, *names: str) -> None:
    """Hold the sum against the plain sum of all but these devices."""
    assert list(played.sum.survived) == [name for name in cast.names if name not in names]
    plain_P, _ = cast.plain_sum(played.sum.survived, played.sum)
    np.testing.assert_array_equal(played.sum.vector_P, plain_P)


def spoil(share: bytes) -> bytes:
    return bytes([share[0] ^ 1, *share[1:]])


# -- keys


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"mask_key": bytes(32)}, BadPublicKey),
        ({"sharing_key": bytes(32)}, BadPublicKey),
        ({"sharing_key": lambda keys: keys.mask_key}, CorruptUpdate),
        ({"name": OTHER}, UnexpectedUpdate),
        ({"name": "sybil"}, UnexpectedUpdate),
    ],
)
def test_keys_that_are_no_keys_or_under_another_s_name_are_rejected(
    fields: dict[str, Any], error: type[HeadwaterError]
) -> None:
    cast = Cast(5)
    played = cast.play(FaultPlan().answer("advertise_keys", changed(**fields), client=LIAR))
    assert type(played.rejected[LIAR]) is error
    sum_without(cast, played, LIAR)


def test_another_s_keys_are_rejected() -> None:
    cast = Cast(5)
    first: list[KeysAdvertised] = []

    def note(said: tuple[KeysAdvertised, None]) -> tuple[KeysAdvertised, None]:
        first.append(said[0])
        return said

    plan = (
        FaultPlan()
        .answer("advertise_keys", note, client="d000")
        .answer("advertise_keys", changed(sharing_key=lambda _: first[0].sharing_key), client=LIAR)
    )
    played = cast.play(plan)
    assert isinstance(played.rejected[LIAR], CorruptUpdate)
    sum_without(cast, played, LIAR)


def test_unsigned_keys_are_rejected_in_active_mode() -> None:
    cast = Cast(5, mode="active")
    played = cast.play(FaultPlan().answer("advertise_keys", changed(signature=None), client=LIAR))
    assert isinstance(played.rejected[LIAR], SignatureRefused)
    sum_without(cast, played, LIAR)


def test_a_device_without_an_enrolled_identity_is_named_by_all_others() -> None:
    cast = Cast(4, mode="active")
    device = cast.parties[LIAR].device
    stranger = replace(device, name="sybil", identity=SigningIdentity.new("sybil"))
    cast.join(stranger, weight=1, seed=1)
    weights = {**cast.opening.planned_weights, "sybil": device.planned_weight}
    cast.opening = replace(cast.opening, planned_weights=weights)
    played = Played()
    with pytest.raises(RoundAborted):
        cast.play_into(played, FaultPlan())
    assert {type(played.refused[name]) for name in cast.names} == {IdentityUnknown}
    assert all("sybil" in str(played.refused[name]) for name in cast.names)


def test_one_identity_cannot_sign_for_another_name() -> None:
    cast = Cast(4, mode="active")
    wanted: list[Any] = []

    def note(message: Any) -> Any:
        wanted.append(message)
        return message

    def signed(keys: KeysAdvertised) -> bytes:
        return cast.identities[OTHER].sign(keys_message(wanted[0], keys))

    plan = (
        FaultPlan()
        .tell("advertise_keys", note, client=LIAR)
        .answer("advertise_keys", changed(signature=signed), client=LIAR)
    )
    played = Played()
    with pytest.raises(RoundAborted):
        cast.play_into(played, plan)
    assert isinstance(played.refused["d000"], SignatureRefused)
    assert LIAR in str(played.refused["d000"])


# -- shares


def bad_share(*holders: str, **fields: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change what is dealt to these holders, or to all."""

    def shares(dealt: SharesDealt) -> tuple[Any, ...]:
        return tuple(
            share.model_copy(update={n: value(share) for n, value in fields.items()})
            if not holders or share.holder in holders
            else share
            for share in dealt.shares
        )

    return changed(shares=shares)


BAD: tuple[Mapping[str, Callable[[Any], Any]], ...] = (
    {"sealed": lambda share: spoil(share.sealed)},
    {"sealed": lambda share: bytes(len(share.sealed))},
    {"key_commitment": lambda share: spoil(share.key_commitment)},
    {"seed_commitment": lambda share: spoil(share.seed_commitment)},
    {
        "key_commitment": lambda share: share.seed_commitment,
        "seed_commitment": lambda share: share.key_commitment,
    },
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fields", BAD)
@pytest.mark.parametrize("holders", [(OTHER,), (OTHER, "d004"), ()])
def test_a_dealer_of_bad_shares_leaves_before_anybody_has_masked(
    mode: str, fields: Mapping[str, Callable[[Any], Any]], holders: tuple[str, ...]
) -> None:
    cast = Cast(6, mode=mode)
    plan = FaultPlan().answer("share_keys", bad_share(*holders, **fields), client=LIAR)
    played = cast.play(plan)
    assert played.replies["check_shares"][OTHER].bad_dealers == (LIAR,)
    assert LIAR not in played.requests["masked_update"]
    assert not cast.parties[LIAR].is_spent or LIAR in played.refused
    sum_without(cast, played, LIAR)


@pytest.mark.parametrize(
    "change",
    [
        changed(shares=lambda dealt: dealt.shares[1:]),
        changed(shares=lambda dealt: (*dealt.shares, dealt.shares[0])),
        changed(shares=lambda dealt: dealt.shares[::-1]),
        bad_share("d000", holder=lambda _: "d001"),
        bad_share("d000", dealer=lambda _: OTHER),
    ],
)
def test_shares_that_are_missing_doubled_or_another_s_are_rejected(
    change: Callable[[Any], Any],
) -> None:
    cast = Cast(5)
    played = cast.play(FaultPlan().answer("share_keys", change, client=LIAR))
    assert isinstance(played.rejected[LIAR], CorruptUpdate)
    sum_without(cast, played, LIAR)


def test_a_device_that_complains_of_all_leaves_itself() -> None:
    cast = Cast(6)
    complaint = changed(bad_dealers=tuple(name for name in cast.names if name != LIAR))
    played = cast.play(FaultPlan().answer("check_shares", complaint, client=LIAR))
    sum_without(cast, played, LIAR)


def test_a_complaint_of_who_dealt_nothing_is_rejected() -> None:
    for stranger in ("sybil", LIAR):
        cast = Cast(5)
        complaint = changed(bad_dealers=(stranger,))
        played = cast.play(FaultPlan().answer("check_shares", complaint, client=LIAR))
        assert isinstance(played.rejected[LIAR], CorruptUpdate)
        sum_without(cast, played, LIAR)


names = st.sampled_from([f"d{i}" for i in range(8)])


@given(st.dictionaries(names, st.frozensets(names, max_size=7), max_size=8))
def test_whoever_leaves_answers_for_every_complaint(
    complaints: dict[str, frozenset[str]],
) -> None:
    complaints = {holder: dealers - {holder} for holder, dealers in complaints.items()}
    left = blamed(complaints)
    edges = {(holder, dealer) for holder, dealers in complaints.items() for dealer in dealers}
    assert all(holder in left or dealer in left for holder, dealer in edges)
    assert all(any(name in edge for edge in edges) for name in left)


@given(names, st.frozensets(names, min_size=2), st.booleans())
def test_one_liar_leaves_alone_whichever_side_it_lies_on(
    liar: str, others: frozenset[str], as_holder: bool
) -> None:
    others -= {liar}
    complaints = {liar: others} if as_holder else {holder: frozenset({liar}) for holder in others}
    left = blamed(complaints)
    # A holder that complains of one alone is believed: of two, one is at fault.
    assert set(left) == (set(others) if as_holder and len(others) == 1 else {liar})


# -- masks


@pytest.mark.parametrize(
    "change",
    [
        lambda said: (said[0], said[1][:-4]),
        lambda said: (said[0], said[1] + bytes(4)),
        lambda said: (said[0], said[1][:-1]),
        lambda said: (said[0], b""),
        lambda said: (said[0], None),
        changed(scalars=lambda head: head.scalars[:-8]),
        changed(scalars=lambda head: head.scalars + bytes(8)),
    ],
)
def test_a_vector_of_the_wrong_length_is_rejected(change: Callable[[Any], Any]) -> None:
    cast = Cast(6)
    played = cast.play(FaultPlan().answer("masked_update", change, client=LIAR))
    assert isinstance(played.rejected[LIAR], CorruptUpdate)
    assert LIAR in str(played.rejected[LIAR])
    sum_without(cast, played, LIAR)


@pytest.mark.parametrize("name", [OTHER, "d000", "sybil"])
def test_a_vector_under_another_s_name_is_rejected(name: str) -> None:
    cast = Cast(6)
    played = cast.play(FaultPlan().answer("masked_update", changed(name=name), client=LIAR))
    assert isinstance(played.rejected[LIAR], UnexpectedUpdate)
    sum_without(cast, played, LIAR)  # and the one whose name it was is in the sum


def test_a_vector_of_another_session_is_rejected() -> None:
    cast = Cast(6)
    plan = FaultPlan().answer("masked_update", changed(session=bytes(32)), client=LIAR)
    played = cast.play(plan)
    assert isinstance(played.rejected[LIAR], SessionMismatch)
    sum_without(cast, played, LIAR)


@pytest.mark.parametrize(
    "action", ["advertise_keys", "share_keys", "check_shares", "masked_update", "unmask"]
)
def test_an_answer_that_comes_twice_counts_once(action: str) -> None:
    cast = Cast(5)
    played = cast.play(FaultPlan().answer(action, lambda said: [said, said], client=LIAR))
    assert isinstance(played.rejected[LIAR], UnexpectedUpdate)
    sum_without(cast, played)


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_that_comes_after_its_owner_was_declared_dropped_is_rejected(mode: str) -> None:
    cast = Cast(6, mode=mode)
    late: list[tuple[MaskedHead, bytes]] = []

    def hold_back(said: tuple[MaskedHead, bytes]) -> list[Any]:
        late.append(said)
        return []

    first = "consistency" if mode == "active" else "unmask"
    plan = (
        FaultPlan()
        .answer("masked_update", hold_back, client=LIAR)
        .answer(
            first,
            lambda said: [(late[0][0].model_copy(update={"name": "d000"}), b""), said],
            client="d000",
        )
    )
    played = cast.play(plan)
    assert isinstance(played.rejected["d000"], LateUpdate)
    assert played.phase is not None
    with pytest.raises(LateUpdate, match=LIAR):
        played.phase.take(LIAR, late[0][0])
    sum_without(cast, played, LIAR)


def test_a_phase_s_answer_before_its_time_is_rejected() -> None:
    cast = Cast(5)
    early = SharesRevealed(name=LIAR, self_seed_shares={}, mask_key_shares={})
    played = cast.play(
        FaultPlan().answer("masked_update", lambda said: [(early, None), said], client=LIAR)
    )
    assert isinstance(played.rejected[LIAR], UnexpectedUpdate)
    sum_without(cast, played)


# -- signatures


def test_one_device_that_signs_something_else_does_not_end_the_session() -> None:
    cast = Cast(7, mode="active")
    plan = FaultPlan().answer("consistency", changed(signature=bytes(64)), client=LIAR)
    sum_without(cast, cast.play(plan))


def test_a_signature_of_one_who_did_not_survive_is_rejected() -> None:
    cast = Cast(7, mode="active")
    stray = SurvivorsSigned(name=LIAR, signature=bytes(64))
    plan = (
        FaultPlan()
        .drop(client=LIAR, after="check_shares")
        .answer(
            "consistency",
            lambda said: [said, (stray.model_copy(update={"name": "d000"}), None)],
            client="d000",
        )
    )
    played = cast.play(plan)
    assert isinstance(played.rejected["d000"], UnexpectedUpdate)
    phase = played.phase
    assert isinstance(phase, UnmaskPhase)
    assert LIAR not in phase.asked
    sum_without(cast, played, LIAR)


# -- unmasking


def wrong(kind: str, dealer: str) -> Callable[[Any], Any]:
    return changed(
        **{
            kind: lambda said: {
                name: spoil(share) if name == dealer else share
                for name, share in getattr(said, kind).items()
            }
        }
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["self_seed_shares", "mask_key_shares"])
def test_a_wrong_share_names_its_holder_and_the_sum_is_recovered(mode: str, kind: str) -> None:
    cast = Cast(9, mode=mode)
    dealer = "d005" if kind == "mask_key_shares" else "d001"
    plan = (
        FaultPlan()
        .drop(client="d005", after="check_shares")
        .answer("unmask", wrong(kind, dealer), client=LIAR)
    )
    played = cast.play(plan)
    assert isinstance(played.rejected[LIAR], WrongShare)
    assert str(played.rejected[LIAR]).startswith(f"{LIAR}: ")
    assert dealer in str(played.rejected[LIAR])
    sum_without(cast, played, "d005")


def test_with_too_many_wrong_shares_the_round_is_aborted_and_every_holder_named() -> None:
    cast = Cast(5)
    plan = FaultPlan()
    liars = ("d001", "d002", "d003")  # two good shares are left of three that are needed
    for name in liars:
        plan = plan.answer("unmask", wrong("self_seed_shares", "d000"), client=name)
    played = Played()
    with pytest.raises(TooFewSurvivors):
        cast.play_into(played, plan)
    assert {name: type(e) for name, e in played.rejected.items()} == dict.fromkeys(
        liars, WrongShare
    )


@pytest.mark.parametrize(
    "change",
    [
        changed(self_seed_shares={}),
        changed(self_seed_shares=lambda said: {**said.self_seed_shares, "sybil": bytes(32)}),
        changed(mask_key_shares=lambda said: said.self_seed_shares),  # both kinds
        changed(mask_key_shares={}),
        changed(
            self_seed_shares=lambda said: said.mask_key_shares,
            mask_key_shares=lambda said: said.self_seed_shares,
        ),
    ],
)
def test_shares_of_the_wrong_kind_or_of_too_many_are_rejected(
    change: Callable[[Any], Any],
) -> None:
    cast = Cast(7)
    plan = (
        FaultPlan().drop(client="d005", after="check_shares").answer("unmask", change, client=LIAR)
    )
    played = cast.play(plan)
    assert isinstance(played.rejected[LIAR], CorruptUpdate)
    sum_without(cast, played, "d005")


class Cheat(SecureSession):
    """A device that deals the shares of another mask key than it advertised."""

    def answer(self, request: Request) -> Reply:
        if isinstance(request, Roster) and isinstance(self._state, Advertised):
            self._state = replace(self._state, mask_pair=new_key_pair())
        return super().answer(request)


def cheating(cast: Cast) -> None:
    party = cast.parties[LIAR]
    party.session = Cheat(
        party.device,
        Record(),
        remember=party.stored.append,
        trained=Trained(values_P=torch.from_numpy(party.values_P), numbers=party.numbers),
    )


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_another_key_than_was_advertised_name_their_dealer(mode: str) -> None:
    cast = Cast(6, mode=mode)
    cheating(cast)
    with pytest.raises(DealerCheated, match=LIAR) as caught:
        cast.play(FaultPlan().drop(client=LIAR, after="check_shares"))
    assert caught.value.dealers == (LIAR,)


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_another_self_seed_than_was_committed_to_name_their_dealer(mode: str) -> None:
    cast = Cast(6, mode=mode)
    plan = FaultPlan().answer(
        "share_keys",
        changed(seed_commitment=lambda dealt: spoil(dealt.seed_commitment)),
        client=LIAR,
    )
    with pytest.raises(DealerCheated, match=LIAR) as caught:
        cast.play(plan)
    assert caught.value.dealers == (LIAR,)


def test_what_was_rejected_left_no_trace_in_the_phase() -> None:
    cast = Cast(5)

    def twice(said: Any) -> list[Any]:
        return [said, (said[0], said[1]), (said[0].model_copy(update={"name": OTHER}), said[1])]

    played = cast.play(FaultPlan().answer("masked_update", twice, client=LIAR))
    assert isinstance(played.rejected[LIAR], UnexpectedUpdate)
    assert isinstance(played.phase, UnmaskPhase)
    sum_without(cast, played)


# -- numbers


@pytest.mark.parametrize("added", [-(10**6), 10**6])
def test_a_masked_weight_that_makes_the_sum_s_impossible_ends_the_round_and_no_more(
    added: int,
) -> None:
    cast = Cast(5)

    def shifted(head: MaskedHead) -> bytes:
        elements = np.frombuffer(head.scalars, "<u8").copy()
        elements[:1] += np.uint64(added % 2**64)  # modulo 2^64, as the ring is
        return elements.tobytes()

    played = cast.play(FaultPlan().answer("masked_update", changed(scalars=shifted), client=LIAR))
    assert played.sum.session.parameters.scalars[0].name == WEIGHT
    with pytest.raises(SumOutOfRange, match=WEIGHT):
        summed(played.sum, Followed())
