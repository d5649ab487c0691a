"""A hostile device lies while the sum is unmasked: about survivors, received or dealt shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headwater.client.secagg.session import SecureSession
from headwater.client.secagg.states import AwaitingRoster
from headwater.client.secagg.types import SessionRecord, UnmaskedUpdate
from headwater.common.errors import (
    CorruptUpdate,
    DealerCheated,
    TooFewSurvivors,
    UnexpectedUpdate,
    WrongShare,
)
from headwater.common.secagg.keys import new_key_pair
from headwater.common.secagg.protocol import Reply, Request, Roster, SurvivorsReply
from headwater.server.secagg.unmask_phase import UnmaskPhase
from tests.attacks.secagg_liar import LIAR, MODES, OTHER, changed, spoil, sum_without
from tests.faults import FaultPlan
from tests.secagg import Cast, Played

# -- signatures


def test_one_wrong_signature_does_not_end_the_session() -> None:
    cast = Cast(7, mode="active")
    plan = FaultPlan().answer("consistency", changed(signature=bytes(64)), client=LIAR)
    sum_without(cast, cast.play(plan))


def test_a_signature_of_a_dropped_device_is_rejected() -> None:
    cast = Cast(7, mode="active")
    stray = SurvivorsReply(name=LIAR, signature=bytes(64))
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
    assert LIAR not in phase.recipients
    sum_without(cast, played, LIAR)


# -- received shares


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
def test_a_wrong_share_identifies_its_holder_and_the_sum_is_recovered(mode: str, kind: str) -> None:
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


def test_too_many_wrong_shares_abort_the_round_and_identify_every_holder() -> None:
    cast = Cast(5)
    plan = FaultPlan()
    liars = ("d001", "d002", "d003")  # two correct shares remain, three are needed
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
def test_shares_of_the_wrong_kind_or_number_are_rejected(
    change: Callable[[Any], Any],
) -> None:
    cast = Cast(7)
    plan = (
        FaultPlan().drop(client="d005", after="check_shares").answer("unmask", change, client=LIAR)
    )
    played = cast.play(plan)
    assert isinstance(played.rejected[LIAR], CorruptUpdate)
    sum_without(cast, played, "d005")


# -- dealt shares


class Cheat(SecureSession):
    """A device that deals shares of a mask key that it did not advertise."""

    def answer(self, request: Request, bounds: memoryview | bytes | None = None) -> Reply:
        if isinstance(request, Roster) and isinstance(self.state, AwaitingRoster):
            self.state = replace(self.state, mask_pair=new_key_pair())
        return super().answer(request, bounds)


def cheating(cast: Cast) -> None:
    party = cast.parties[LIAR]
    party.session = Cheat(
        party.device,
        SessionRecord(),
        store=party.stored.append,
        update=UnmaskedUpdate(values_P=torch.from_numpy(party.values_P), numbers=party.numbers),
    )


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_an_unadvertised_key_identify_their_dealer(mode: str) -> None:
    cast = Cast(6, mode=mode)
    cheating(cast)
    with pytest.raises(DealerCheated, match=LIAR) as caught:
        cast.play(FaultPlan().drop(client=LIAR, after="check_shares"))
    assert caught.value.dealers == (LIAR,)


@pytest.mark.parametrize("mode", MODES)
def test_shares_of_an_uncommitted_self_seed_identify_their_dealer(mode: str) -> None:
    cast = Cast(6, mode=mode)
    plan = FaultPlan().answer(
        "share_keys",
        changed(seed_commitment=lambda dealt: spoil(dealt.seed_commitment)),
        client=LIAR,
    )
    with pytest.raises(DealerCheated, match=LIAR) as caught:
        cast.play(plan)
    assert caught.value.dealers == (LIAR,)


def test_no_self_seed_is_reconstructed_if_a_mask_key_is_false() -> None:
    """Another dealer's seed is false too; nobody finds out, because it stays closed."""
    cast = Cast(6)
    cheating(cast)
    plan = FaultPlan().answer(
        "share_keys",
        changed(seed_commitment=lambda dealt: spoil(dealt.seed_commitment)),
        client=OTHER,
    )
    with pytest.raises(DealerCheated) as caught:
        cast.play(plan.drop(client=LIAR, after="check_shares"))
    assert caught.value.dealers == (LIAR,)
