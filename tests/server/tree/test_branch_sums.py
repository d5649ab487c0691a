"""Branches' sums beside the model's add up to the bit; what no devices can have is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import CorruptUpdate
from headwater.common.messages import Plan, Update
from headwater.common.terms import SumOf, Terms
from headwater.common.tree.branch_messages import BranchAnswer
from headwater.server.aggregation.cohort_sum import CohortSum, PartialSum
from headwater.server.aggregation.extra_sums import ExtraSums
from headwater.server.fleet import BranchSum
from headwater.server.rounds.open_round import OpenRound
from headwater.server.tree.branch_wire import read_sum, sum_payload
from tests.server.tree.test_branch_wire import LAYOUT, SIZE, plans_of, report


class Two(Terms):
    """Asks for a sum and a mean."""

    NAME = "two"

    def sums(self, num_values: int) -> dict[str, SumOf]:
        return {"plain": SumOf(length=3, limit=4.0), "mean": SumOf(length=2, is_mean=True)}


def asking(*names: str, silent: Sequence[str] = ()) -> dict[str, Plan]:
    """Return plans that ask for two sums, and those of ``silent`` for none."""
    plans = plans_of(*names)
    return {name: plan if name in silent else plan.asking(Two()) for name, plan in plans.items()}


class Round(OpenRound):
    """An open round of these plans; of a branch, if it is a part of another."""

    def __init__(self, plans: Mapping[str, Plan], *, part_of: Round | None = None) -> None:
        self.total = CohortSum(LAYOUT)
        if part_of is None:
            self.total.open(num_clients=6, planned_weight=24)
        else:
            self.total.open_part(part_of.total.scale_bits)
        extra = ExtraSums.of(plans.values(), SIZE)
        common: Any = {"owned": {}, "extra": extra}
        super().__init__(plans=plans, total=self.total, **common)

    def sums(self) -> dict[str, Any]:
        """Return what was added up: the model's integers, and the others' sums."""
        extra = {} if self.extra is None else self.extra.close()
        found = {key: values.tolist() for key, values in extra.items()}
        return {"model": self.total.part().integers_P.tolist(), **found}


def branch_of(whole: Round, plans: Mapping[str, Plan], updates: Iterable[Update]) -> BranchSum:
    """Return what an aggregator with these plans says, behind the wire."""
    part = Round(plans, part_of=whole)
    for update in updates:
        part.take(update)
    return read_sum(*sum_payload(part.branch_sum("north")), plans, LAYOUT)


def update_of(name: str, plan: Plan, random: torch.Generator) -> Update:
    sums = {"plain": torch.rand(3, generator=random), "mean": torch.randn(2, generator=random)}
    values_P = torch.randn(SIZE, generator=random)
    return Update(values_P=values_P, report=report(name), sums=sums if plan.terms else {})


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2), min_size=1),
    st.sets(st.sampled_from("abcdef")),
    st.sets(st.sampled_from("abcdef")),
    st.integers(0, 99),
)
def test_the_sums_of_branches_are_those_of_all_devices_bit_for_bit(
    branches: dict[str, int], silent: set[str], lost: set[str], seed: int
) -> None:
    plans = asking(*branches, silent=sorted(silent))
    random = torch.Generator().manual_seed(seed)
    updates = [update_of(name, plans[name], random) for name in plans if name not in lost]
    flat, tree = Round(plans), Round(plans)
    for update in updates:
        flat.take(update)
    for number in {*branches.values()}:
        own = {name: plan for name, plan in plans.items() if branches[name] == number}
        tree.take(branch_of(tree, own, [update for update in updates if update.name in own]))
    assert tree.accepted.keys() == flat.accepted.keys() == branches.keys() - lost
    assert tree.sums() == flat.sums()


def doubled(part: PartialSum) -> PartialSum:
    """Return a sum of twice as many updates."""
    bounds = tuple(2 * bound for bound in part.bounds)
    return replace(part, integers_P=2 * part.integers_P, bounds=bounds)


@pytest.mark.parametrize("values", [4.0, -4.0])
def test_a_branch_is_refused_whole_if_a_sum_is_beyond_what_its_devices_may_have(
    values: float,
) -> None:
    plans = asking("a", "b", "c", silent=["c"])
    sums = {"plain": torch.full((3,), values), "mean": torch.zeros(2)}
    updates = [Update(values_P=torch.zeros(SIZE), report=report(n), sums=sums) for n in "ab"]
    updates.append(replace(updates[0], report=report("c"), sums={}))
    opened = Round(plans)
    honest = branch_of(opened, plans, updates)
    wrong = {
        "a sum of four devices": doubled(honest.extra["plain"]),
        "more than its bound": replace(honest.extra["plain"], bounds=(7.9,)),
        "a scale at which others are zero": replace(honest.extra["plain"], scale_bits=(-100,)),
    }
    for part in wrong.values():
        found = Round(plans)
        found.take(replace(honest, extra={**honest.extra, "plain": part}))
        assert {error.code for error in found.refused.values()} == {"BranchRefused"}
        assert (len(found.accepted), found.total.weight) == (0, 0)
    opened.take(honest)  # each at its limit
    assert [*opened.accepted] == ["a", "b", "c"]
    assert opened.sums()["plain"] == [2 * values] * 3


def test_an_answer_without_a_sum_that_its_plans_ask_for_is_refused() -> None:
    plans = asking("a")
    random = torch.Generator().manual_seed(0)
    opened = Round(plans)
    honest = branch_of(opened, plans, [update_of("a", plans["a"], random)])
    head, vector = sum_payload(honest)
    answer = BranchAnswer.model_validate_json(vector[head.sum_bytes :])
    less = answer.model_copy(update={"extra": {"plain": answer.extra["plain"]}})
    with pytest.raises(
        CorruptUpdate, match="it sent the sums plain, its plans ask for plain, mean"
    ):
        read_sum(head, vector[: head.sum_bytes] + less.model_dump_json().encode(), plans, LAYOUT)
    with pytest.raises(CorruptUpdate, match=f"{8 * SIZE:,} bytes"):
        read_sum(*sum_payload(replace(honest, extra={})), plans, LAYOUT)
