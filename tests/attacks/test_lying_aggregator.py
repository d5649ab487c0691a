"""An aggregator that is trusted with its devices' sum, and what it can do to all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor

from headwater.common.errors import (
    BranchRefused,
    CorruptUpdate,
    OversizeUpdate,
    PrivacyRequired,
)
from headwater.common.flower import records
from headwater.common.messages import Plan, Update
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.tree.branch_messages import (
    ANSWER_BYTES,
    BranchHead,
    Members,
    MembersRequest,
    answer_bytes,
    answer_keys,
)
from headwater.server.aggregation.cohort_sum import LARGEST_VALUE, CohortSum
from headwater.server.aggregation.norm_watch import NormWatch
from headwater.server.fleet import BranchSum, UpdateRules
from headwater.server.planning.exclusions import breaches
from headwater.server.rounds.open_round import OpenRound
from headwater.server.tree.branch_wire import parse, read_sum, sum_payload
from tests.server.flower.test_registration import REQUEST
from tests.server.tree.test_branch_wire import LAYOUT, SIZE, plans_of, report
from tests.server.tree.test_branches import Tree

WATCH = NormWatch(multiple=100.0)
KNOWN = NormWatch(multiple=100.0, largest_median=1.0)


def open_round(
    plans: dict[str, Plan], watch: NormWatch | None = WATCH, *, scale_bits: Sequence[int] = ()
) -> tuple[CohortSum, OpenRound]:
    """Return a round's sum and the round; of a branch with its scales."""
    total = CohortSum(LAYOUT)
    if scale_bits:
        total.open_part(scale_bits)
    else:
        total.open(num_clients=6, planned_weight=24)
    rules = UpdateRules(norm_watch=watch)
    return total, OpenRound(plans=plans, total=total, rules=rules, owned={})


def update(name: str, values_P: Tensor) -> Update:
    return Update(values_P=values_P, report=report(name))


def random_update(name: str, *, seed: int = 0, scale: float = 1.0) -> Update:
    generator = torch.Generator().manual_seed(seed)
    return update(name, scale * torch.randn(SIZE, generator=generator))


def branch_of(plans: dict[str, Plan], above: CohortSum, *updates: Update) -> BranchSum:
    """Return an honest aggregator's answer, as the server reads it."""
    _, below = open_round(plans, scale_bits=above.scale_bits)
    for one in updates:
        below.take(one)
    return read_sum(*sum_payload(below.branch_sum("north")), plans, LAYOUT)


@pytest.mark.parametrize("watch", [WATCH, None], ids=["watched", "kept"])
@pytest.mark.parametrize("order", ["abc", "bca", "bac"])
def test_one_device_s_large_vector_has_no_honest_branch_refused(
    order: str, watch: NormWatch | None
) -> None:
    """The bound of a sum is a float64, and the integers have 62 bits: 95 of 1,668 were refused."""
    plans = plans_of(*"abc")
    for exponent in range(-140, 127):
        large = torch.full((SIZE,), -(2.0**exponent), dtype=torch.float32)
        above, taken = open_round(plans, watch)
        sent = [
            update(name, large) if name == "a" else random_update(name, seed=ord(name))
            for name in order
        ]
        _, below = open_round(plans, watch, scale_bits=above.scale_bits)
        for one in sent:
            below.take(one)
        taken.take(read_sum(*sum_payload(below.branch_sum("north")), plans, LAYOUT))
        assert set(taken.accepted) == set(below.accepted), exponent


def test_a_branch_that_is_refused_has_no_device_left_out() -> None:
    """It was the aggregator that sent the sum; its devices may be honest, or not be its own."""
    plans = plans_of(*"ab")
    above, taken = open_round(plans)
    honest = branch_of(plans, above, random_update("a"), random_update("b"))
    taken.take(replace(honest, total=replace(honest.total, integers_P=np.full(SIZE, 1 << 60))))
    assert {type(error) for error in taken.refused.values()} == {BranchRefused}
    assert breaches(taken.refused) == {}


def test_an_aggregator_s_word_leaves_no_device_out() -> None:
    """It may list any names, also those of another branch's devices."""
    plans = plans_of(*"abc")
    _, below = open_round(plans)
    below.refuse("a", CorruptUpdate("a: " + "x" * 1900))
    below.refuse("b", OversizeUpdate("b: too long"))
    below.refuse("b (again)", OversizeUpdate("b: too long"))
    below.refuse("c", PrivacyRequired("c: without noise"))
    found = read_sum(*sum_payload(below.branch_sum("north")), plans, LAYOUT).refused
    assert {name: error.code for name, error in found.items()} == {
        "a": "BranchRefused",
        "b": "BranchRefused",
        "c": "PrivacyRequired",  # an owner's word: until the device connects again
    }
    assert breaches(found) == {}
    assert all(len(error.message) < 400 for error in found.values())


def coarse(branch: BranchSum, peak: float) -> BranchSum:
    """Return an answer of nothing, whose updates are said to be so large that others round to 0."""
    number, size = len(branch.reports), len(LAYOUT.spans)
    bound = number * peak
    bits = 62 - int(np.frexp(bound)[1])
    told = replace(
        branch.total,
        integers_P=np.zeros(SIZE, dtype=np.int64),
        peaks=(peak,) * size,
        bounds=(bound,) * size,
        scale_bits=(bits,) * size,
    )
    return replace(branch, total=told)


@pytest.mark.parametrize("watch", [WATCH, KNOWN])
def test_no_told_peak_rounds_the_updates_of_others_to_zero(watch: NormWatch) -> None:
    plans = plans_of(*"abxy")
    above, taken = open_round(plans, watch)
    honest = [random_update("x", scale=0.04), random_update("y", seed=1, scale=0.04)]
    branch = branch_of(plans, above, random_update("a"), random_update("b"))
    taken.take(coarse(branch, LARGEST_VALUE))
    for one in honest:
        taken.take(one)
    assert {name: error.code for name, error in taken.refused.items() if name in "ab"} == {
        "a": "BranchRefused",
        "b": "BranchRefused",
    }
    mean_P = above.close()
    expected = (honest[0].values_P + honest[1].values_P) / above.weight
    assert torch.allclose(mean_P, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("norms", "says"),
    [
        ({"a": 1.0}, "with a norm of inf"),
        ({"a": 1.0, "b": 1e100}, "with a norm of 1e\\+100"),
        ({"a": 1e-9, "b": 1e-9}, "peak"),
    ],
)
def test_the_norms_that_an_aggregator_tells_are_within_the_limit_and_explain_its_sum(
    norms: dict[str, float], says: str
) -> None:
    plans = plans_of(*"ab")
    above, taken = open_round(plans, KNOWN)
    branch = branch_of(plans, above, random_update("a"), random_update("b"))
    taken.take(replace(branch, norms=norms))
    (error,) = set(taken.refused.values())
    assert says.replace("\\", "") in str(error)
    assert not taken.accepted


def test_a_sum_is_no_longer_than_its_updates_together() -> None:
    """Each coordinate alone may be as large as the norm; all of them may not."""
    plans = plans_of(*"ab")
    above, taken = open_round(plans, KNOWN)
    branch = branch_of(plans, above, random_update("a"), random_update("b"))
    norm = min(branch.norms.values()) * report("a").weight
    bits, size = above.scale_bits, len(LAYOUT.spans)
    told = replace(
        branch.total,
        integers_P=np.full(SIZE, int(np.ldexp(norm, bits[0])), dtype=np.int64),
        peaks=(norm,) * size,
        bounds=(norm,) * size,
        scale_bits=bits,
    )
    taken.take(replace(branch, total=told))
    (error,) = set(taken.refused.values())
    assert "the norm of its sum is" in str(error)


def test_a_private_round_s_branch_is_within_the_clip_norm() -> None:
    terms = PrivacyTerms(norm_bound=2.0, noise_multiplier=1.0)
    plans = {name: plan.asking(terms) for name, plan in plans_of(*"ab").items()}
    above, taken = open_round(plans, None)
    short = random_update("a", scale=0.1), random_update("b", scale=0.1)
    planned = report("a").model_copy(update={"weight": 4})
    branch = branch_of(
        plans,
        above,
        *(replace(one, report=planned.model_copy(update={"name": one.name})) for one in short),
    )
    _, honest = open_round(plans, None)
    honest.take(branch)
    assert set(honest.accepted) == {"a", "b"}
    taken.take(coarse(branch, LARGEST_VALUE))
    assert "expected 0 <= peak" in str(taken.refused["a"])
    integers = (branch.total.integers_P * 1000).astype(np.int64)
    size = len(LAYOUT.spans)
    enlarged = replace(branch.total, integers_P=integers, peaks=(2.0,) * size, bounds=(4.0,) * size)
    _, taken = open_round(plans, None)
    taken.take(replace(branch, total=enlarged))
    assert set(taken.refused) == {"a", "b"}


def test_the_median_norm_is_of_the_devices_that_the_server_measures() -> None:
    """Three made-up devices had a majority: all honest ones were outliers, or none ever was."""
    plans = plans_of(*"abcxyz")
    for told in (1e-30, 1e60):
        above, taken = open_round(plans)
        for number, name in enumerate("xyz"):
            taken.take(random_update(name, seed=number))
        branch = branch_of(plans, above, *(random_update(name) for name in "abc"))
        taken.take(replace(branch, norms=dict.fromkeys("abc", told)))
        norms = taken.all_norms
        assert norms is not None
        assert len(norms) == 3
        assert 0.01 < NormWatch(multiple=100.0).after(norms).limit / 100 < 100
    few = plans_of(*"abx")
    above, taken = open_round(few)
    taken.take(random_update("x"))
    taken.take(branch_of(few, above, random_update("a"), random_update("b")))
    assert taken.all_norms is not None
    assert (
        len(taken.all_norms) == 3
    )  # too few of its own: the aggregators' word is better than none


def test_keys_that_are_none_of_ours_cost_no_memory() -> None:
    """Each makes an error of half a kilobyte: 90 MB of them took 10 GB."""
    for text in ('{"devices":[],%s}', '{ "devices" : [ ] , %s }'):
        keys = ",".join(f'"{number}" :0' for number in range(5000))
        with pytest.raises(CorruptUpdate, match="more keys than 4,000"):
            parse("north", (text % keys).encode(), Members, most_keys=4000)
    plans = plans_of(*map(str, range(1000)))
    assert answer_keys(plans, num_sums=0) < 500_000
    assert answer_bytes(plans, num_tensors=4, sums={}) < ANSWER_BYTES + 30e6


def test_names_that_fit_in_no_message_are_not_planned_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run ended with a SettingsError, which a standby would have met as well."""
    tree = Tree(1)
    (request,) = tree.asked().values()
    tree.list(request, *(f"{number:0128}" for number in range(5_000)))
    assert "AggregatorRefused: 5,000 names of 640,000 characters" in caplog.text
    assert tree.branches.clients() == {}


def test_an_aggregator_whose_lists_are_malformed_is_asked_less_and_less() -> None:
    tree = Tree(1)
    asked_at = []
    for answer in (b"{", b"{", b"{", b"{", None, b"{"):
        while not (asked := tree.asked()):
            tree.now += 0.25
            tree.found.update(REQUEST)
        asked_at.append(tree.now)
        (request,) = asked.values()
        if answer is None:
            tree.list(request, "pi")
            continue
        content = records.content_of(
            BranchHead(name="a1"), records.flat_array(answer, dtype="uint8")
        )
        tree.wire._answers.append(Message(content, reply_to=request))
        tree.found.update(REQUEST)
        assert tree.branches.awaited() == []  # no round waits for its list
    assert np.diff(asked_at).tolist() == [1, 2, 4, 8, 1]


def test_an_aggregator_is_told_of_its_own_devices_that_were_left_out_alone() -> None:
    """The request after a round replaced that of its plan: nobody came back."""
    tree = Tree(1, 2)
    for node, request in tree.asked().items():
        tree.list(request, f"x{node}")
    why = REQUEST.model_copy(update={"left_out": "too slow"})
    tree.branches.describe_again({"x1": why})
    tree.branches.describe_again({})
    tree.branches.describe_again({"x2": why})
    told = {
        node: records.read(message.content, MembersRequest).left_out
        for node, message in tree.begin_round().items()
    }
    assert told == {1: {"x1": "too slow"}, 2: {"x2": "too slow"}}
