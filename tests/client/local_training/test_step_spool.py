"""Local steps survive a power cut: what follows gives the bits of a round without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.messages import Plan
from tests.client.training.power_cuts import PowerCut, assert_same, cut_off, device, done, spool
from tests.client.training.power_cuts import seen_by as micro_batches_of
from tests.training_contexts import plan

# Steps of 5 and 4 examples, in micro-batches of two.
TERMS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"arguments": {"momentum": 0.9}},
    "adamw": {"optimizer": "adamw"},
    "rprop": {"optimizer": "rprop"},
    "muon": {"optimizer": "muon"},
    "proximal": {"proximal": 0.5, "is_normalized": True},
}


def chosen(terms: str, **more: Any) -> Plan:
    return plan(
        22, 2, local_steps=5, local_learning_rate=2.0**-6, local=LocalTerms(**TERMS[terms]), **more
    )


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("cut_at", [1, 4, 8, 11])
def test_resumed_local_steps_equal_uninterrupted_ones_to_the_bit(
    terms: str, cut_at: int, tmp_path: Path
) -> None:
    wanted = chosen(terms)
    expected = done(device(), wanted)
    cut_off(tmp_path, wanted, at=cut_at)
    again = device()
    assert_same(done(again, wanted, spool(tmp_path)), expected)
    # Steps of 4, 4, 5, 4 and 5 examples are 2, 2, 3, 2 and 3 micro-batches: whole steps are kept.
    whole = max(number for number in (0, 2, 4, 7, 9) if number <= cut_at)
    assert len(micro_batches_of(again)) == 12 - whole


def test_a_step_that_the_power_cut_leaves_no_trace_in_the_model(tmp_path: Path) -> None:
    context = device(cut_at=7)
    before_P = context.image.values_P.clone()
    with pytest.raises(PowerCut):
        done(context, chosen("adamw"), spool(tmp_path))
    assert torch.equal(context.image.values_P, before_P)


def test_steps_of_another_plan_are_not_continued(tmp_path: Path) -> None:
    cut_off(tmp_path, chosen("sgd"), at=8)
    other = chosen("momentum")
    again = device()
    assert_same(done(again, other, spool(tmp_path)), done(device(), other))
    assert len(micro_batches_of(again)) == 12


@pytest.mark.parametrize(
    "damage",
    [
        lambda shape: [-9],
        lambda shape: [2**40],
        lambda shape: [True, *shape],
        lambda shape: [0.5],
        lambda shape: ["9"],
        lambda shape: [*shape, 2],
    ],
)
def test_a_file_with_other_shapes_than_its_values_takes_no_memory_and_is_deleted(
    damage: Callable[[list[int]], list[Any]], tmp_path: Path
) -> None:
    """The digest is checked when the values are read, and that needs room for them."""
    wanted = chosen("adamw")
    cut_off(tmp_path, wanted, at=8)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    state = json.loads(header["__metadata__"]["state"])
    entry = next(one for one in state["content"]["state"] if one[2])
    entry[2] = damage(entry[2])
    header["__metadata__"]["state"] = json.dumps(state)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    again = device()
    assert_same(done(again, wanted, spool(tmp_path)), done(device(), wanted))
    assert len(micro_batches_of(again)) == 12


def test_a_damaged_file_of_steps_is_deleted_and_the_round_begins_again(tmp_path: Path) -> None:
    wanted = chosen("adamw")
    cut_off(tmp_path, wanted, at=8)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert_same(done(device(), wanted, spool(tmp_path)), done(device(), wanted))
