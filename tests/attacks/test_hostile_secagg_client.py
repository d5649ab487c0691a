"""A hostile device in a secure session: its lies are detected, named, and cost others nothing.

This file has the lies about keys and shares, before any update is masked; the later lies are in
``test_hostile_secagg_masks`` and ``test_hostile_secagg_unmask``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import (
    BadPublicKey,
    CorruptUpdate,
    HeadwaterError,
    IdentityUnknown,
    RoundAborted,
    SignatureRefused,
    UnexpectedUpdate,
)
from headwater.common.secagg.identity import SigningIdentity
from headwater.common.secagg.protocol import KeysReply, SharesReply
from headwater.common.secagg.session import keys_message
from headwater.server.secagg.key_phases import resolve_complaints
from tests.attacks.secagg_liar import LIAR, MODES, OTHER, changed, spoil, sum_without
from tests.faults import FaultPlan
from tests.secagg import Cast, Played

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
def test_malformed_keys_and_keys_under_another_name_are_rejected(
    fields: dict[str, Any], error: type[HeadwaterError]
) -> None:
    cast = Cast(5)
    played = cast.play(FaultPlan().answer("advertise_keys", changed(**fields), client=LIAR))
    assert type(played.rejected[LIAR]) is error
    sum_without(cast, played, LIAR)


def test_keys_of_another_member_are_rejected() -> None:
    cast = Cast(5)
    first: list[KeysReply] = []

    def note(said: tuple[KeysReply, None]) -> tuple[KeysReply, None]:
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


def test_a_device_without_an_enrolled_identity_is_reported_by_all_members() -> None:
    cast = Cast(4, mode="active")
    device = cast.parties[LIAR].device
    stranger = replace(device, name="sybil", identity=SigningIdentity.new("sybil"))
    cast.join(stranger, weight=1, seed=1)
    weights = {**cast.setup.planned_weights, "sybil": device.planned_weight}
    cast.setup = replace(cast.setup, planned_weights=weights)
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

    def signed(keys: KeysReply) -> bytes:
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
    """Change the shares dealt to these holders, or to all."""

    def shares(dealt: SharesReply) -> tuple[Any, ...]:
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
def test_a_dealer_of_bad_shares_is_excluded_before_any_update_is_masked(
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
def test_missing_duplicate_and_foreign_shares_are_rejected(
    change: Callable[[Any], Any],
) -> None:
    cast = Cast(5)
    played = cast.play(FaultPlan().answer("share_keys", change, client=LIAR))
    assert isinstance(played.rejected[LIAR], CorruptUpdate)
    sum_without(cast, played, LIAR)


def test_a_device_that_complains_of_all_dealers_is_excluded() -> None:
    cast = Cast(6)
    complaint = changed(bad_dealers=tuple(name for name in cast.names if name != LIAR))
    played = cast.play(FaultPlan().answer("check_shares", complaint, client=LIAR))
    sum_without(cast, played, LIAR)


def test_a_complaint_about_a_device_that_dealt_nothing_is_rejected() -> None:
    for stranger in ("sybil", LIAR):
        cast = Cast(5)
        complaint = changed(bad_dealers=(stranger,))
        played = cast.play(FaultPlan().answer("check_shares", complaint, client=LIAR))
        assert isinstance(played.rejected[LIAR], CorruptUpdate)
        sum_without(cast, played, LIAR)


names = st.sampled_from([f"d{i}" for i in range(8)])


@given(st.dictionaries(names, st.frozensets(names, max_size=7), max_size=8))
def test_excluding_devices_resolves_every_complaint(
    complaints: dict[str, frozenset[str]],
) -> None:
    complaints = {holder: dealers - {holder} for holder, dealers in complaints.items()}
    left = resolve_complaints(complaints)
    edges = {(holder, dealer) for holder, dealers in complaints.items() for dealer in dealers}
    assert all(holder in left or dealer in left for holder, dealer in edges)
    assert all(any(name in edge for edge in edges) for name in left)


@given(names, st.frozensets(names, min_size=2), st.booleans())
def test_a_single_liar_is_excluded_alone_as_dealer_or_holder(
    liar: str, others: frozenset[str], as_holder: bool
) -> None:
    others -= {liar}
    complaints = {liar: others} if as_holder else {holder: frozenset({liar}) for holder in others}
    left = resolve_complaints(complaints)
    # A holder that complains of a single dealer is believed: one of the two is at fault.
    assert set(left) == (set(others) if as_holder and len(others) == 1 else {liar})
