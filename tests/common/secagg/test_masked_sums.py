"""Sums beside the model's under masks: the bits of those in clear, whoever drops out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwater.client.secagg.types import UnmaskedUpdate
from headwater.common.errors import CorruptUpdate, SumOutOfRange
from headwater.common.secagg.scalar_encoding import (
    cut_to_limits,
    decode_sums,
    encode_sums,
    num_elements,
    plan_sums,
)
from headwater.common.terms import SumOf
from headwater.server.aggregation.extra_sums import ExtraSums
from headwater.server.secagg.encoding_state import check_numbers
from tests.faults import FaultPlan
from tests.secagg import Cast

ASKED = {
    "counts": SumOf(length=4, limit=1000.0),
    "fine": SumOf(length=3, limit=8.0, scale_bits=50),
    "wide": SumOf(length=2, limit=1e9),
}


def update_sums(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    parts = [
        (2 * torch.rand(one.length, generator=random) - 1) * one.limit for one in ASKED.values()
    ]
    return torch.cat(parts)


def in_clear(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the sums as the server adds them without masks."""
    total = ExtraSums(ASKED)
    ends = np.cumsum([one.length for one in ASKED.values()]).tolist()
    for row in rows:
        parts = torch.tensor_split(row, ends[:-1])
        total.add(dict(zip(ASKED, parts, strict=True)), weight=1, times=1)
    return total.close()


def test_sums_in_the_ring_have_the_bits_of_those_in_clear() -> None:
    rows = [update_sums(seed) for seed in range(20)]
    sums = plan_sums({name: ASKED[name] for name in ASKED}, num_devices=20)
    total = np.zeros(num_elements(sums), np.uint64)
    for row in rows:
        total += encode_sums(row, sums)
    found, expected = decode_sums(total, sums), in_clear(rows)
    for name in ("counts", "fine"):
        assert torch.equal(found[name], expected[name]), name
    # 20 x 10^9 leave 28 bits below the point: the steps are 2^-28, coarser than its 2^-32.
    assert sums[2].value.scale_bits == 28
    assert (found["wide"] - expected["wide"]).abs().max() <= 20 * 2.0**-29


def test_a_value_beyond_its_limit_is_cut_to_it_and_no_other_is() -> None:
    row = update_sums(0)
    whole = row.clone()
    cut_to_limits(whole, ASKED)
    assert torch.equal(whole, row)
    infinity = float("inf")
    for at, value, kept in (
        (0, 1001.0, 1000.0), (6, -8.5, -8.0), (8, float("nan"), 0.0), (3, infinity, 1000.0)
    ):  # fmt: skip
        wrong, right = row.clone(), row.clone()
        wrong[at], right[at] = value, kept
        cut_to_limits(wrong, ASKED)
        assert torch.equal(wrong, right)
    cut_to_limits(torch.zeros(0), {})


def cast(**chosen: Any) -> Cast:
    names = [f"d{number:03}" for number in range(6)]
    made = Cast(6, sums=ASKED, device={name: {"sums": ASKED} for name in names}, **chosen)
    assert made.names == names
    for seed, name in enumerate(made.names):
        session: Any = made.parties[name].session
        update: UnmaskedUpdate = session.update
        session.update = UnmaskedUpdate(
            values_P=update.values_P, numbers=update.numbers, sums_S=update_sums(seed)
        )
    return made


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_a_session_opens_the_sums_of_its_survivors(mode: str) -> None:
    played = cast(mode=mode).play(FaultPlan().drop(client="d002", after="check_shares"))
    sums = played.sum.session.parameters.sums
    rows = [update_sums(seed) for seed in (0, 1, 3, 4, 5)]
    found, expected = decode_sums(played.sum.sums_S, sums), in_clear(rows)
    for name in ("counts", "fine"):
        assert torch.equal(found[name], expected[name]), name
    own = encode_sums(update_sums(0), sums).tobytes()
    assert own not in played.vectors["d000"], "what travelled was not masked"


@pytest.mark.parametrize("change", [lambda v: v[:-8], lambda v: v + bytes(8)])
def test_sums_of_another_length_leave_their_sender_out(change: Any) -> None:
    plan = FaultPlan().answer(
        "masked_update", lambda said: (said[0], change(said[1])), client="d002"
    )
    played = cast().play(plan)
    assert isinstance(played.rejected["d002"], CorruptUpdate)
    assert "d002" not in played.sum.survived


def test_sums_that_no_devices_within_their_limits_have_are_noticed() -> None:
    """Whoever adds to a masked number adds to the sum."""

    def larger(said: tuple[Any, Any]) -> tuple[Any, Any]:
        reply, vector = said
        ring = bytearray(vector)
        at = len(ring) - 8 * sum(one.length for one in ASKED.values())
        value = int.from_bytes(ring[at : at + 8], "little") + (10_000 << 32)
        ring[at : at + 8] = (value % (1 << 64)).to_bytes(8, "little")
        return reply, bytes(ring)

    played = cast().play(FaultPlan().answer("masked_update", larger, client="d002"))
    with pytest.raises(SumOutOfRange, match="counts: the sums of 6 devices"):
        check_numbers(played.sum)
