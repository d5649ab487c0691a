"""A hostile device lies about its masked vector, or sends replies out of order.

Nobody can see what it masks: garbage within the clip bound is out of scope (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headwater.common.errors import (
    CorruptUpdate,
    LateUpdate,
    SessionMismatch,
    SumOutOfRange,
    UnexpectedUpdate,
)
from headwater.common.secagg.protocol import WEIGHT, MaskReply, UnmaskReply
from headwater.server.secagg.encoding_state import EncodingState, decode_sum
from headwater.server.secagg.unmask_phase import UnmaskPhase
from tests.attacks.secagg_liar import LIAR, MODES, OTHER, changed, sum_without
from tests.faults import FaultPlan
from tests.secagg import Cast


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
def test_a_vector_under_another_name_is_rejected(name: str) -> None:
    cast = Cast(6)
    played = cast.play(FaultPlan().answer("masked_update", changed(name=name), client=LIAR))
    assert isinstance(played.rejected[LIAR], UnexpectedUpdate)
    sum_without(cast, played, LIAR)  # and the device whose name was used is in the sum


def test_a_vector_of_another_session_is_rejected() -> None:
    cast = Cast(6)
    plan = FaultPlan().answer("masked_update", changed(session=bytes(32)), client=LIAR)
    played = cast.play(plan)
    assert isinstance(played.rejected[LIAR], SessionMismatch)
    sum_without(cast, played, LIAR)


@pytest.mark.parametrize(
    "action", ["advertise_keys", "share_keys", "check_shares", "masked_update", "unmask"]
)
def test_a_repeated_reply_counts_once(action: str) -> None:
    cast = Cast(5)
    played = cast.play(FaultPlan().answer(action, lambda said: [said, said], client=LIAR))
    assert isinstance(played.rejected[LIAR], UnexpectedUpdate)
    sum_without(cast, played)


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_from_a_dropped_device_is_rejected(mode: str) -> None:
    cast = Cast(6, mode=mode)
    late: list[tuple[MaskReply, bytes]] = []

    def hold_back(said: tuple[MaskReply, bytes]) -> list[Any]:
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


def test_a_reply_of_a_later_phase_is_rejected() -> None:
    cast = Cast(5)
    early = UnmaskReply(name=LIAR, self_seed_shares={}, mask_key_shares={})
    played = cast.play(
        FaultPlan().answer("masked_update", lambda said: [(early, None), said], client=LIAR)
    )
    assert isinstance(played.rejected[LIAR], UnexpectedUpdate)
    sum_without(cast, played)


def test_a_rejected_reply_leaves_the_phase_unchanged() -> None:
    cast = Cast(5)

    def twice(said: Any) -> list[Any]:
        return [said, (said[0], said[1]), (said[0].model_copy(update={"name": OTHER}), said[1])]

    played = cast.play(FaultPlan().answer("masked_update", twice, client=LIAR))
    assert isinstance(played.rejected[LIAR], UnexpectedUpdate)
    assert isinstance(played.phase, UnmaskPhase)
    sum_without(cast, played)


@pytest.mark.parametrize("added", [-(10**6), 10**6])
def test_an_impossible_masked_weight_aborts_only_the_round(
    added: int,
) -> None:
    cast = Cast(5)

    def shifted(head: MaskReply) -> bytes:
        elements = np.frombuffer(head.scalars, "<u8").copy()
        elements[:1] += np.uint64(added % 2**64)  # modulo 2^64, as the ring is
        return elements.tobytes()

    played = cast.play(FaultPlan().answer("masked_update", changed(scalars=shifted), client=LIAR))
    assert played.sum.session.parameters.scalars[0].name == WEIGHT
    with pytest.raises(SumOutOfRange, match=WEIGHT):
        decode_sum(played.sum, EncodingState())
