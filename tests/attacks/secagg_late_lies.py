"""Lies of a hostile server in the phases in which the devices mask, sign and reveal shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headwater.client.secagg.session import SecureSession
from headwater.client.secagg.states import AwaitingRoster
from headwater.client.secagg.types import Floor, SessionRecord, UnmaskedUpdate
from headwater.common.secagg.protocol import (
    CheckRequest,
    MaskRequest,
    Reply,
    Request,
    Roster,
    SurvivorsRequest,
    UnmaskRequest,
)
from tests.attacks.secagg_lies import (
    LOW_ORDER,
    OTHER,
    SIGNER,
    THIRD,
    VICTIM,
    Attack,
    Change,
    Seen,
    as_if_of_the_session,
    entry,
    noise,
    shares,
)
from tests.faults import FaultPlan
from tests.secagg import Cast

# -- phase 2


def u2(*names: str) -> Change:
    return lambda told: MaskRequest(members=names)


def spoil_share(told: CheckRequest) -> CheckRequest:
    return CheckRequest(
        shares=tuple(
            share.model_copy(update={"sealed": bytes(len(share.sealed))})
            if share.dealer == OTHER
            else share
            for share in told.shares
        )
    )


def everybody(told: MaskRequest) -> MaskRequest:
    return MaskRequest(members=tuple(Cast(5).names))


class Colluding(SecureSession):
    """A device that lets the server put a key in its entry that everybody can compute with."""

    def answer(self, request: Request, bounds: memoryview | bytes | None = None) -> Reply:
        if isinstance(request, Roster) and isinstance(self.state, AwaitingRoster):
            keys = self.state.keys.model_copy(update={"mask_key": LOW_ORDER})
            self.state = replace(self.state, keys=keys)
        return super().answer(request, bounds)


def let_collude(cast: Cast) -> None:
    party = cast.parties[OTHER]
    party.session = Colluding(
        party.device,
        SessionRecord(),
        store=party.stored.append,
        update=UnmaskedUpdate(values_P=torch.from_numpy(party.values_P), numbers=party.numbers),
    )


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
    Attack(
        check="share of the fewest",  # a fifth of all, and a quarter of the four that may be left
        action="masked_update",
        cast={"floor": Floor(max_share=0.22)},
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
        check="honest noise",  # of three two may survive, and two may collude
        action="masked_update",
        change=u2("d000", VICTIM, OTHER),
        cast=noise(min_survivors=0.5, corrupted=0.4),
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


def cut_off(told: SurvivorsRequest | UnmaskRequest) -> Any:
    """Let the server drop so many of one survivor's neighbours that hardly a mask is left."""
    session = Seen.session
    k, t = len(session.neighbours(OTHER)), session.parameters.threshold
    gone = [name for name in session.neighbours(OTHER) if name != VICTIM][: k - t + 1]
    return sets(without(*gone), gone)(told)


def forged(told: UnmaskRequest) -> UnmaskRequest:
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
        change=lambda told: UnmaskRequest(survived=tuple(Cast(5).names), dropped=()),
    ),
    Attack(
        check="order",  # another roster, after the shares were dealt
        action="check_shares",
        change=lambda told: Roster(parameters=Seen.session.parameters, members=()),
    ),
    Attack(
        check="order",  # shares of other dealers, after the first were opened
        action="masked_update",
        change=lambda told: CheckRequest(shares=()),
    ),
    Attack(
        check="order",  # masks among others, after it masked
        action="unmask",
        change=lambda told: MaskRequest(members=("d000", VICTIM, OTHER)),
    ),
    Attack(
        check="order",  # a signature, where nobody checks any
        action="unmask",
        change=lambda told: SurvivorsRequest(survived=told.survived, dropped=told.dropped),
    ),
]
