"""A tree: aggregators add their devices' updates, and the sum of their sums is that of all devices.

To the bit, however the devices are divided: each branch adds 64-bit integers at the scales of the
whole round, and nothing is divided before the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import CorruptUpdate, LateUpdate, SettingsError
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import Settings
from headwater.server.aggregation.cohort_sum import LARGEST_VALUE, CohortSum, PartialSum
from headwater.server.aggregation.norm_watch import NormWatch
from headwater.server.fleet import BranchOrder, BranchSum, Fleet, UpdateRules
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.open_round import OpenRound
from headwater.server.tree.aggregator import Aggregator
from headwater.simulation.run import run_engine
from tests.processes import model_digest
from tests.tasks import TwoLayers

LAYOUT = build_model(TwoLayers(), seed=0).layout
SIZE = LAYOUT.num_parameters
# What the machine was measured at, and the devices' order in a row.
MEASURED = {"seconds", "seconds_split", "updates_per_hour", "ended_at", "clients"}


def updates(number: int, *, seed: int = 0, scale: float = 1.0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(SIZE, generator=random) for _ in range(number)]


def part_of(scale_bits: tuple[int, ...], vectors: Sequence[torch.Tensor]) -> PartialSum:
    """Return the sum of a branch, as a copy."""
    total = CohortSum(LAYOUT)
    total.open_part(scale_bits)
    for vector in vectors:
        total.fold(vector, 1)
    part = total.part()
    return replace(part, integers_P=part.integers_P.copy())


def opened(number: int) -> CohortSum:
    total = CohortSum(LAYOUT)
    total.open(num_clients=number, planned_weight=number)
    return total


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 99))
def test_the_sum_of_branches_is_the_sum_of_all_devices_bit_for_bit(
    branches: list[int], seed: int
) -> None:
    vectors = updates(len(branches), seed=seed)
    flat, tree = opened(len(vectors)), opened(len(vectors))
    for vector in vectors:
        flat.fold(vector, 1)
    for branch in range(4):
        own = [vector for vector, of in zip(vectors, branches, strict=True) if of == branch]
        part = part_of(tree.scale_bits, own)
        tree.check_part(part, name="a", limits=[LARGEST_VALUE] * len(own))
        tree.add_part(part, len(own))
    assert torch.equal(tree.close(), flat.close())
    assert (tree.largest, tree.weight) == (flat.largest, flat.weight)


def test_a_branch_that_had_to_shift_its_sum_is_added_at_its_coarser_scale() -> None:
    small, large = updates(3), updates(1, seed=1, scale=2.0**40)
    tree = opened(4)
    fine, coarse = part_of(tree.scale_bits, small), part_of(tree.scale_bits, large)
    assert coarse.num_shifts > 0
    for order in ((fine, coarse), (coarse, fine)):
        tree = opened(4)
        for part in order:
            tree.check_part(part, name="a", limits=[LARGEST_VALUE] * 3)
            tree.add_part(part, 1)
        assert tree.num_shifts > 0 or order[0] is coarse
        exact = torch.stack([vector.double() for vector in (*small, *large)]).sum(0) / 2
        # A step of the coarser scale for each update, and the mean's own rounding.
        step = 4 * 2.0 ** -min(coarse.scale_bits)
        off = (tree.close().double() - exact).abs()
        assert bool((off <= step + exact.abs() * 2.0**-24).all())


def simulate(out: Path, *, rounds: int, **simulation: Any) -> list[dict[str, Any]]:
    settings = Settings.model_validate(
        {
            "task": "tests/tasks.py:TwoLayers",
            "rounds": rounds,
            "threads": 1,
            "out": out,
            "simulation": {"compute": "one-by-one", **simulation},
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
            "optimizer": {"name": "adam", "learning_rate": 0.01},
        }
    )
    run_engine(settings, on_round=lambda _: None, resume=False)
    return [
        {name: value for name, value in row.items() if name not in MEASURED}
        for row in read_rows(out)
    ]


@pytest.mark.parametrize(
    ("clients", "aggregators", "rounds", "faults"),
    [
        (12, 3, 2, {}),
        (13, 5, 2, {"dropout": 0.3}),
        pytest.param(1000, 10, 1, {}, marks=pytest.mark.slow),
    ],
)
def test_aggregators_lead_to_the_model_of_a_flat_run_bit_for_bit(
    clients: int, aggregators: int, rounds: int, faults: Mapping[str, Any], tmp_path: Path
) -> None:
    both: dict[str, Any] = {"rounds": rounds, "clients": clients, **faults}
    flat = simulate(tmp_path / "flat", **both)
    tree = simulate(tmp_path / "tree", aggregators=aggregators, **both)
    assert model_digest(tmp_path / "tree") == model_digest(tmp_path / "flat")
    assert tree == flat


class Interrupted:
    """A fleet whose server above closes the round after the first answers."""

    def __init__(self, answers: Sequence[Update]) -> None:
        self.answers = answers

    def train(self, *_: Any, **__: Any) -> Iterator[Update]:
        yield from self.answers
        raise LateUpdate("the server above waits no longer")


def test_an_aggregator_that_must_end_early_sends_the_sum_of_what_it_has() -> None:
    root = opened(3)
    sent = BranchOrder(
        plans=order(["a", "b", "c"]),
        scale_bits=root.scale_bits,
        rules=UpdateRules(),
    )
    vectors = updates(2)
    answers = [
        Update(values_P=vector, report=one)
        for vector, one in zip(vectors, branch().reports, strict=True)
    ]
    fleet = cast(Fleet, Interrupted(answers))
    image = build_model(TwoLayers(), seed=0)
    done = Aggregator("north", fleet, image).train(sent, image, num_needed=0, timeout_seconds=None)
    assert [report.name for report in done.reports] == ["a", "b"]
    assert {name: error.code for name, error in done.refused.items()} == {"c": "LateUpdate"}
    both = part_of(root.scale_bits, vectors)
    assert np.array_equal(done.total.integers_P, both.integers_P)


def test_a_report_too_long_for_an_aggregator_costs_its_device_the_round_alone() -> None:
    root = opened(3)
    sent = BranchOrder(plans=order(["a", "b"]), scale_bits=root.scale_bits, rules=UpdateRules())
    vectors = updates(2)
    long, short = branch().reports
    long = long.model_copy(
        update={"metric_sums": {f"{at:02}" + '":' * 31: 1.0 for at in range(48)}}
    )
    answers = [
        Update(values_P=vector, report=one)
        for vector, one in zip(vectors, (long, short), strict=True)
    ]
    fleet = cast(Fleet, Interrupted(answers))
    image = build_model(TwoLayers(), seed=0)
    done = Aggregator("north", fleet, image).train(sent, image, num_needed=0, timeout_seconds=None)
    assert [report.name for report in done.reports] == ["b"]
    assert {name: error.code for name, error in done.refused.items()} == {"a": "OversizeUpdate"}
    alone = part_of(root.scale_bits, vectors[1:])
    assert np.array_equal(done.total.integers_P, alone.integers_P)


# An aggregator that is wrong, or lies.


def order(names: Sequence[str]) -> dict[str, Plan]:
    return {
        name: Plan(round=1, run_seed=0, quota=4, micro_batch_size=4, model_version=0)
        for name in names
    }


def branch(**changes: Any) -> BranchSum:
    """Return the sum of devices a and b."""
    root = opened(3)
    part = part_of(root.scale_bits, updates(2))
    reports = [
        UpdateReport(
            name=name,
            round=1,
            weight=4,
            num_examples=4,
            steps=(),
            micro_batch_size=4,
            reason="quota",
            seconds=0.1,
            loss_sum=1.0,
        )
        for name in ("a", "b")
    ]
    plain = BranchSum(
        name="aggregator 0",
        total=part,
        reports=reports,
        unused=(),
        norms={"a": 1.0, "b": 1.0},
        outliers=(),
        clip_bits=(),
        refused={},
        refusals={},
    )
    total = {key: changes.pop(key) for key in [*changes] if hasattr(part, key)}
    return replace(plain, total=replace(part, **total), **changes)


def round_of_three() -> OpenRound:
    return OpenRound(
        plans=order(["a", "b", "c"]),
        total=opened(3),
        rules=UpdateRules(norm_watch=NormWatch(multiple=100.0)),
        owned=dict.fromkeys("abc", 10),
    )


def test_a_branch_counts_for_its_devices(tmp_path: Path) -> None:
    found = round_of_three()
    found.take(branch(refused={"c": CorruptUpdate("c: half of it was missing")}))
    assert sorted(found.accepted) == ["a", "b"]
    assert list(found.refused) == ["c"]
    assert found.weight == 8
    found.take(branch())
    assert sorted(found.refused) == ["a (again)", "b (again)", "c"]
    assert found.weight == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"integers_P": np.zeros(SIZE - 1, dtype=np.int64)},
        {"integers_P": np.full(SIZE, 1 << 61)},
        {"scale_bits": (0,)},
        {"scale_bits": (300,) * len(LAYOUT.spans)},
        {"bounds": (float("nan"),) * len(LAYOUT.spans)},
        {"bounds": (float("inf"),) * len(LAYOUT.spans)},
        {"peaks": (-1.0,) * len(LAYOUT.spans)},
        # A scale at which the other updates would be rounded to zero.
        {"scale_bits": (-100,) * len(LAYOUT.spans), "integers_P": np.zeros(SIZE, dtype=np.int64)},
        {"integers_P": np.full(SIZE, 1 << 60), "num_shifts": 1 << 60},
    ],
)
def test_a_sum_that_no_updates_have_is_refused_whole(wrong: dict[str, Any]) -> None:
    found = round_of_three()
    found.take(branch(**wrong))
    assert not found.accepted
    assert {name: error.code for name, error in found.refused.items()} == {
        "a": "BranchRefused",
        "b": "BranchRefused",
    }
    assert found.weight == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"secure": {"aggregation": "semi-honest"}},
        {"aggregation": {"rule": "median"}},
        {"asynchronous": {"is_on": True}},
        {"simulation": {"aggregators": 2, "engine": "grpc"}},
        {"simulation": {"aggregators": 2, "compute": "fused"}},
        {"simulation": {"aggregators": 2, "clients": 1}},
    ],
)
def test_what_needs_single_updates_is_refused_with_aggregators(changes: dict[str, Any]) -> None:
    plain = {"task": "x.py:X", "simulation": {"aggregators": 2}, **changes}
    with pytest.raises(SettingsError, match="with --aggregators 2 "):
        Settings.model_validate(plain)
