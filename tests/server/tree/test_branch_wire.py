"""An aggregator's order and sum survive the wire to the bit; a false answer is refused whole."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import ConnectionLost, CorruptUpdate, OversizeUpdate, SettingsError
from headwater.common.messages import MAX_UNUSED, Plan, Step, Update, UpdateReport
from headwater.common.model.parameters import build_model
from headwater.common.sums.tensor_field import Values
from headwater.common.terms import SumOf, Terms, register
from headwater.common.tree.branch_messages import (
    ANSWER_BYTES,
    BranchAnswer,
    BranchHead,
    BranchPlans,
    ExtraSum,
    SharedPlans,
    answer_bytes,
    packed,
    unpacked,
)
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.norm_watch import NormWatch
from headwater.server.fleet import BranchOrder, BranchSum, Dropout, UpdateRules
from headwater.server.rounds.open_round import OpenRound
from headwater.server.tree.branch_wire import (
    branch_plans,
    check_report,
    order_in,
    read_sum,
    replies_needed,
    sum_payload,
)
from tests.tasks import TwoLayers

LAYOUT = build_model(TwoLayers(), seed=0).layout
SIZE = LAYOUT.num_parameters
STEP = Step(
    num_examples=4,
    weight=4,
    loss=-1.2345678901234567e-8,
    gradient_norm=1.2345678901234567e99,
    seconds=0.12345678901234567,
    peak_bytes=2**53,
)


def plans_of(*names: str, quota: int = 4) -> dict[str, Plan]:
    plan = Plan(round=3, run_seed=0, quota=quota, micro_batch_size=4, model_version=2)
    return dict.fromkeys(names, plan)


def report(name: str, *, num_steps: int = 1) -> UpdateReport:
    return UpdateReport(
        name=name,
        round=3,
        weight=4,
        num_examples=4,
        steps=(STEP,) * num_steps,
        micro_batch_size=4,
        reason="quota",
        seconds=0.1,
        loss_sum=1 / 3,
    )


def order(plans: Mapping[str, Plan], *, watch: NormWatch | None = None) -> BranchOrder:
    total = CohortSum(LAYOUT)
    total.open(num_clients=4, planned_weight=16)
    return BranchOrder(
        plans=plans,
        scale_bits=total.scale_bits,
        rules=UpdateRules(norm_watch=watch),
    )


def in_a_branch(plans: Mapping[str, Plan]) -> OpenRound:
    """Return the round that an aggregator opens for these plans."""
    total = CohortSum(LAYOUT)
    total.open_part(order(plans).scale_bits)
    rules = UpdateRules(norm_watch=NormWatch(multiple=100.0))
    return OpenRound(plans=plans, total=total, rules=rules, owned={})


def summed(plans: Mapping[str, Plan], names: Sequence[str], *, seed: int = 0) -> BranchSum:
    """Return the sum of an aggregator that got updates of these devices; of the others, none."""
    opened = in_a_branch(plans)
    random = torch.Generator().manual_seed(seed)
    for name in plans:
        if name in names:
            values_P = torch.randn(SIZE, generator=random)
            opened.take(Update(values_P=values_P, report=report(name)))
        else:
            opened.take(Dropout(name=name, error=ConnectionLost(f"{name} left")))
    return opened.branch_sum("north")


@given(st.sets(st.sampled_from("abcd")), st.integers(0, 99))
def test_a_branch_s_sum_is_the_same_behind_the_wire(names: set[str], seed: int) -> None:
    plans = plans_of(*"abcd")
    sent = summed(plans, sorted(names), seed=seed)
    head, vector = sum_payload(sent)
    found = read_sum(BranchHead.model_validate_json(head.model_dump_json()), vector, plans, LAYOUT)
    assert np.array_equal(found.total.integers_P, sent.total.integers_P)
    told = ("scale_bits", "peaks", "bounds", "num_shifts")
    assert [getattr(found.total, one) for one in told] == [getattr(sent.total, one) for one in told]
    assert tuple(found.reports) == tuple(sent.reports)
    assert (found.norms, found.refusals) == (sent.norms, dict(sent.refusals))
    assert {name: str(error) for name, error in found.refused.items()} == {
        name: f"{name} left" for name in "abcd" if name not in names
    }


def test_what_no_loss_used_is_said_once_for_a_branch_and_of_the_model_s_tensors() -> None:
    plans, opened = plans_of("a", "b"), in_a_branch(plans_of("a", "b"))
    for name, unused in (("a", (1, 3, 10**6)), ("b", (0, 1, 3, 10**6))):
        told = report(name).model_copy(update={"unused": unused})
        opened.take(Update(values_P=torch.zeros(SIZE), report=told))
    found = read_sum(*sum_payload(opened.branch_sum("north")), plans, LAYOUT)
    assert found.unused == (1, 3)
    assert [one.unused for one in found.reports] == [(), ()]


LONG_NAMES = {f"{at:02}" + '":' * 31: 1.0 for at in range(48)}


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"unused": tuple(range(MAX_UNUSED))}, True),
        ({"metric_sums": {f"{at:02}" + "m" * 62: 1 / 3 for at in range(48)}}, True),
        ({"metric_sums": LONG_NAMES}, False),  # each of them counts as 32 keys
        ({"metric_sums": {f"{at:02}" + "\0" * 62: 1 / 3 for at in range(48)}}, False),
    ],
)
def test_a_report_that_would_cost_its_branch_the_round_is_its_device_s_fault(
    changes: dict[str, Any], fits: bool
) -> None:
    plans = plans_of("a", "b")
    told = report("a").model_copy(update=changes)
    if fits:
        check_report(told, plans["a"])
        return
    with pytest.raises(OversizeUpdate, match="a: a report of"):
        check_report(told, plans["a"])


def test_what_devices_say_of_their_faults_fits_into_their_branch_s_answer() -> None:
    """Each quote before a colon would count as a key of the answer."""
    plans = plans_of(*(f"device-{at}" for at in range(40)))
    opened = in_a_branch(plans)
    for name in plans:
        opened.take(Dropout(name=name, error=ConnectionLost('":' * 5000)))
    head, vector = sum_payload(opened.branch_sum("north"))
    beside = len(vector) - head.sum_bytes
    assert beside <= answer_bytes(plans, num_tensors=len(LAYOUT.spans), sums={})
    assert read_sum(head, vector, plans, LAYOUT).refused.keys() == plans.keys()


def test_a_device_is_once_among_those_beyond_the_norm() -> None:
    sent = replace(summed(plans_of("a", "b"), ["a"]), outliers=("b", "b"))
    with pytest.raises(CorruptUpdate, match="a device is twice"):
        read_sum(*sum_payload(sent), plans_of("a", "b"), LAYOUT)


@pytest.mark.parametrize("watch", [None, NormWatch(multiple=3.5, largest_median=1e-300)])
def test_an_order_is_the_same_behind_the_wire(watch: NormWatch | None) -> None:
    plans = plans_of("a", "b")
    sent = order(plans, watch=watch)
    message = branch_plans(plans, sent, layout=LAYOUT, num_needed=1, timeout_seconds=2.5)
    found = BranchPlans.model_validate_json(message.model_dump_json(exclude_none=True))
    assert found.plans == plans
    assert order_in(found, found.plans) == sent
    assert (found.num_needed, found.timeout_seconds) == (1, 2.5)


def test_a_device_that_an_answer_does_not_mention_is_refused_by_name() -> None:
    sent = summed(plans_of("a", "b"), ["a"])
    plans = plans_of("a", "b", "c")
    head, vector = sum_payload(sent)
    found = read_sum(head, vector, plans, LAYOUT)
    assert sorted(found.refused) == ["b", "c"]
    assert "not in the answer of north" in str(found.refused["c"])


def false_answers() -> dict[str, tuple[BranchHead, bytes]]:
    """Return answers of an aggregator whose plans are those of a and b."""
    head, vector = sum_payload(summed(plans_of("a", "b"), ["a", "b"]))
    stranger = sum_payload(summed(plans_of("a", "x"), ["a", "x"]))
    refused = sum_payload(summed(plans_of("a", "x"), ["a"]))
    answer = BranchAnswer.model_validate_json(vector[8 * SIZE :])
    twice = answer.model_copy(update={"clip_bits": (1,) * 3})
    text = answer.model_copy(update={"refusals": {"two\nlines": 1}}).model_dump_json()
    return {
        "a device of another branch": stranger,
        "a refusal of another branch's device": refused,
        "half of the sum": (head, vector[: 4 * SIZE]),
        "another model's sum": (head.model_copy(update={"sum_bytes": 8 * SIZE - 8}), vector),
        "no JSON": (head, vector[: 8 * SIZE]),
        "JSON of another kind": (head, vector[: 8 * SIZE] + b"[]"),
        "more bits than updates": (head, vector[: 8 * SIZE] + twice.model_dump_json().encode()),
        "a refusal that is no error's name": (head, vector[: 8 * SIZE] + text.encode()),
    }


@pytest.mark.parametrize("name", false_answers())
def test_a_false_answer_is_refused_whole(name: str) -> None:
    with pytest.raises(CorruptUpdate, match="north: "):
        read_sum(*false_answers()[name], plans=plans_of("a", "b"), layout=LAYOUT)


@pytest.mark.parametrize("text", ["", "not base64!", "AAAA", packed(plans_of("a"))[:-8]])
def test_plans_that_cannot_be_unpacked_are_refused(text: str) -> None:
    with pytest.raises(CorruptUpdate, match="packed plans"):
        unpacked(text)


def test_packed_plans_may_not_expand_without_limit() -> None:
    plans = plans_of(*(f"device-{number}" for number in range(500)))
    text = packed(plans)
    num_bytes = len(unpacked(text))
    assert len(text) < num_bytes / 10
    with pytest.raises(CorruptUpdate, match="more than"):
        unpacked(text, max_bytes=num_bytes - 1)


class Drift(Terms):
    """Terms with a tensor, which cannot be compressed."""

    NAME = "drift"
    variate: Values
    number: int = 0


def drift(num_values: int, *, seed: int = 0) -> Drift:
    return Drift(variate=torch.randn(num_values, generator=torch.Generator().manual_seed(seed)))


def test_terms_that_many_plans_have_are_sent_once() -> None:
    register(Drift)
    shared, own, size = drift(40_000), drift(1_000, seed=1), 4 * 40_000 + 4 * 1_000
    plans = {name: plan.asking(shared) for name, plan in plans_of(*"abcdefgh").items()}
    plans |= {name: plan.asking(own) for name, plan in plans_of("x").items()} | plans_of("y")
    message = branch_plans(plans, None, layout=LAYOUT, num_needed=0, timeout_seconds=None)
    # Base64 has four characters for three bytes; here twice, as a tensor is JSON before.
    assert len(message.packed_plans) < (4 / 3) ** 2 * size + 4_000
    assert {name: str(plan) for name, plan in message.plans.items()} == {
        name: str(plan) for name, plan in plans.items()
    }
    found = [one.of(Drift) for one in message.plans.values()]
    assert [one and len(one.variate) for one in found] == [40_000] * 8 + [1_000, None]
    assert found[0] is found[7]


@pytest.mark.parametrize("sizes", [(100_000, 100_000, 100_000), (200_000,)])
def test_plans_that_are_longer_than_a_message_are_refused_by_name(sizes: Sequence[int]) -> None:
    terms = [drift(size, seed=seed) for seed, size in enumerate(sizes)]
    plans = {str(at): plans_of("a")["a"].asking(one) for at, one in enumerate(terms)}
    with pytest.raises(SettingsError, match="has room for"):
        branch_plans(plans, None, layout=LAYOUT, num_needed=0, timeout_seconds=None)


def test_packed_plans_whose_terms_are_not_there_are_refused() -> None:
    plans = plans_of("a")
    for asked in ({"a": (0,)}, {"b": ()}):
        text = SharedPlans(plans=plans, terms=(), asked=asked).model_dump_json(exclude_none=True)
        packed_text = base64.b64encode(zlib.compress(text.encode())).decode()
        with pytest.raises(CorruptUpdate, match="terms that are not here"):
            _ = BranchPlans(packed_plans=packed_text, answer_bytes=0).plans


@given(st.integers(1, 4), st.integers(1, 300))
def test_the_longest_answer_fits_in_the_bytes_that_are_expected(number: int, quota: int) -> None:
    plans = plans_of(*(str(device) for device in range(number)), quota=quota)
    sent = summed(plans_of("a"), ["a"])
    metrics = {f"{one:064}": -1.2345678901234567e99 for one in range(48)}
    reports = tuple(
        report(name, num_steps=quota + 1).model_copy(update={"metric_sums": metrics})
        for name in plans
    )
    answer = BranchAnswer(
        scale_bits=sent.total.scale_bits,
        peaks=sent.total.peaks,
        bounds=sent.total.bounds,
        num_shifts=0,
        unused=tuple(range(10**6, 10**6 + len(LAYOUT.spans))),
        reports=reports,
        norms=dict.fromkeys(plans, 1.2345678901234567e99),
        outliers=tuple(plans),
        clip_bits=(),
        refused={},
        refusals={},
    )
    num_bytes = len(answer.model_dump_json(exclude_none=True))
    assert num_bytes <= answer_bytes(plans, num_tensors=len(LAYOUT.spans), sums={})


def test_a_sum_beside_the_model_s_fits_in_the_bytes_that_are_expected() -> None:
    longest = (1.2345678901234567e-99,)
    told = ExtraSum(scale_bits=(-(2**15),), peaks=longest, bounds=longest, num_shifts=2**53)
    name, sums = "x" * 100, {"x" * 100: SumOf(length=3)}
    num_bytes = len(f'"{name}":{told.model_dump_json()},') + 8 * 3
    assert num_bytes <= answer_bytes({}, num_tensors=0, sums=sums) - ANSWER_BYTES


@pytest.mark.parametrize(
    ("sizes", "needed", "replies"),
    [
        ([1, 1, 1, 1], 3, 3),
        ([2, 2], 4, 2),
        ([2, 2], 3, 2),
        ([2, 2], 2, 1),
        ([100, 1, 1], 101, 2),
        ([2, 2], 0, 0),
        ([], 0, 0),
        ([1], 2, 2),  # too few in any case
    ],
)
def test_so_many_replies_are_needed_that_fewer_cannot_make_a_round(
    sizes: list[int], needed: int, replies: int
) -> None:
    assert replies_needed(sizes, needed) == replies


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"round": 2}, "UnexpectedUpdate"), ({"num_windows": 2}, "CountOutOfRange")],
)
def test_a_branch_is_refused_whole_if_any_of_its_reports_is_not_of_the_round_s_plan(
    changes: dict[str, int], code: str
) -> None:
    plans = plans_of("a", "b")
    sent = summed(plans, ["a", "b"])
    first, second = sent.reports
    assert isinstance(second, UpdateReport)
    total = CohortSum(LAYOUT)
    total.open(num_clients=4, planned_weight=16)
    opened = OpenRound(plans=plans, total=total, owned={})
    opened.take(replace(sent, reports=(first, second.model_copy(update=changes))))
    assert {name: error.code for name, error in opened.refused.items()} == {
        "a": "BranchRefused",
        "b": "BranchRefused",
    }
    assert all(error.message.startswith(code) for error in opened.refused.values())
    assert (len(opened.accepted), total.weight) == (0, 0)
