"""The device's own policy: repeated plans, and when a masked plan is answered."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.client.secagg.plan_policy import (
    PlanRepeats,
    answer_after,
    check_plan,
    check_repeats,
    most_planned,
)
from headwater.client.training.sampler import SamplerPosition, SamplerState
from headwater.common.compression.shared_columns import encode_columns
from headwater.common.compression.terms import CompressionTerms, Matrix
from headwater.common.errors import CohortTooSmall, MaskingTooWeak, UpdateAlreadyMasked
from headwater.common.own_parameters.terms import OwnStepTerms
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.plan_digest import plan_digest
from headwater.common.settings.schema import SecureSettings
from headwater.common.terms import Terms
from tests.masked import plan

PENDING = SamplerState().pend(1, SamplerPosition(offset=8))
BEHIND = SamplerState(place=SamplerPosition(offset=8))


@pytest.mark.parametrize(
    ("model", "counted", "count", "expected"),
    [
        ("same", None, 1, (2, PENDING)),
        ("same", None, 3, (1, BEHIND)),
        ("another", None, 1, (1, BEHIND)),
        ("another", 1, 1, (1, PENDING)),  # the round counted, and moves the place itself
    ],
)
def test_a_plan_repeats_a_window_only_with_its_model_and_not_forever(
    model: str, counted: int | None, count: int, expected: tuple[int, SamplerState]
) -> None:
    before = PlanRepeats(model="same", count=count)
    found, sampler = before.follow(plan(2, counted_round=counted), PENDING, model=model, most=3)
    assert (found.count, sampler) == expected
    assert found.model == model


@pytest.mark.parametrize(
    ("passed", "expected"),
    [(0.0, 5.0), (4.99, 5.0), (5.0, 5.0), (5.01, 10.0), (9.0, 10.0), (37.0, 40.0)],
)
def test_a_masked_plan_is_answered_at_its_own_time_or_at_that_time_doubled(
    passed: float, expected: float
) -> None:
    assert answer_after(plan(answer_seconds=5.0), passed) == expected


def test_a_plan_s_deadline_is_the_latest_time_of_its_answer() -> None:
    assert answer_after(plan(answer_seconds=5.0, deadline_seconds=4.0), 1.0) == 4.0
    assert answer_after(plan(), 3.0) == 0.0


def low_rank(*, rows: int, columns: int, rank: int) -> CompressionTerms:
    return CompressionTerms(
        method="low-rank",
        rank=rank,
        matrices=(Matrix(0, rows, columns),),
        side="left",
        columns=encode_columns([np.eye(rows, dtype=np.float32)[:, :rank]]),
    )


@pytest.mark.parametrize(
    "terms",
    [
        CompressionTerms(method="int8"),
        CompressionTerms(method="top-k"),
        CompressionTerms(method="random-k", fraction=0.009),
        low_rank(rows=200, columns=300, rank=1),
    ],
)
def test_a_device_masks_all_coordinates_or_enough_random_ones(terms: CompressionTerms) -> None:
    chosen = plan(compression=terms)
    with pytest.raises(MaskingTooWeak, match=f"in {terms.method}"):
        check_plan(chosen, SecureSettings(), name="0", told_examples=None)


def test_a_device_masks_factors_of_enough_columns() -> None:
    terms = low_rank(rows=200, columns=300, rank=4)
    check_plan(plan(compression=terms), SecureSettings(), name="0", told_examples=None)
    others = [terms.model_copy(update={"side": "right"})]
    others += [terms.model_copy(update={"columns": bytes(400)})]
    digests = {plan_digest(plan(compression=one), "") for one in (terms, *others)}
    assert len(digests) == 3


def test_a_device_masks_random_coordinates_under_the_plan_s_digest() -> None:
    terms = CompressionTerms(method="random-k", fraction=0.05)
    check_plan(plan(compression=terms), SecureSettings(), name="0", told_examples=None)
    others = [None, terms.model_copy(update={"fraction": 0.06})]
    others += [terms.model_copy(update={"feedback": False})]
    digests = {plan_digest(plan(compression=one), "") for one in (terms, *others)}
    digests.add(plan_digest(plan(compression=terms, run_seed=plan().run_seed + 1), ""))
    assert len(digests) == 5


def test_a_device_that_requires_masks_refuses_a_plan_without_a_time_for_its_answer() -> None:
    timed = plan(answer_seconds=5.0)
    check_plan(timed, SecureSettings(aggregation="semi-honest"), name="pi", told_examples=None)
    with pytest.raises(MaskingTooWeak, match="when it is to be answered"):
        check_plan(plan(), SecureSettings(aggregation="active"), name="pi", told_examples=None)


def test_a_device_is_told_before_it_trains_that_too_few_clients_are_invited() -> None:
    own = SecureSettings(min_members=10)
    check_plan(plan(num_invited=10), own, name="pi", told_examples=None)
    with pytest.raises(CohortTooSmall, match="9 clients are invited") as found:
        check_plan(plan(num_invited=9), own, name="pi", told_examples=None)
    assert "secure.min_members = 10 on the server" in (found.value.remedy or "")


@pytest.mark.parametrize("num_owned", [64, 100, 127])
def test_how_many_plans_at_one_model_are_answered_shows_a_power_of_two_alone(
    num_owned: int,
) -> None:
    most = most_planned(SecureSettings(), num_owned)
    check_repeats(plan(quota=500), name="pi", num_planned_before=0, most=most)
    check_repeats(plan(quota=32), name="pi", num_planned_before=32, most=most)
    for before, quota in ((33, 8), (32, 33)):
        with pytest.raises(UpdateAlreadyMasked):
            check_repeats(plan(quota=quota), name="pi", num_planned_before=before, most=most)


@pytest.mark.parametrize("num_owned", [1, 500, 10**6])
def test_with_a_declared_number_the_device_s_own_number_changes_no_answer(num_owned: int) -> None:
    assert most_planned(SecureSettings(declared_examples=200), num_owned) == 200


def test_a_device_counts_the_colluders_of_a_whole_round_in_each_of_its_sessions() -> None:
    """A round that is divided into groups may have them all in one."""
    own = SecureSettings(corrupted=0.1)
    terms = PrivacyTerms(norm_bound=8.0, noise_multiplier=1.0, corrupted=0.1, min_colluding=10)
    check_plan(plan(num_invited=100, privacy=terms), own, name="pi", told_examples=None)
    few = terms.model_copy(update={"min_colluding": 9})
    with pytest.raises(MaskingTooWeak, match="9 colluding devices"):
        check_plan(plan(num_invited=100, privacy=few), own, name="pi", told_examples=None)


@pytest.mark.parametrize(
    "terms",
    [
        {"compression": CompressionTerms(method="random-k", fraction=0.5)},
        {"own_parameters": OwnStepTerms(learning_rate=1e30)},
    ],
)
def test_nothing_of_earlier_rounds_enters_an_update_under_active_masks(
    terms: dict[str, Terms],
) -> None:
    """With a dead model for the others, one device's residual was the whole of an opened sum."""
    asked = plan(answer_seconds=1.0)
    asked = asked.model_copy(update={"terms": {**asked.terms, **terms}})
    active = SecureSettings(aggregation="active", min_quota=1)
    with pytest.raises(MaskingTooWeak, match="keeps of earlier rounds would enter its update"):
        check_plan(asked, active, name="pi", told_examples=None)
    semi_honest = SecureSettings(aggregation="semi-honest", min_quota=1)
    check_plan(asked, semi_honest, name="pi", told_examples=None)


def test_own_parameters_enter_no_update_under_active_masks_also_where_the_plan_is_silent() -> None:
    asked = plan(answer_seconds=1.0)
    active = SecureSettings(aggregation="active", min_quota=1)
    check_plan(asked, active, name="pi", told_examples=None)
    with pytest.raises(MaskingTooWeak, match="keeps of earlier rounds would enter its update"):
        check_plan(asked, active, name="pi", told_examples=None, has_own_parameters=True)


def test_random_coordinates_without_feedback_go_with_active_masks() -> None:
    terms = CompressionTerms(method="random-k", fraction=0.5, feedback=False)
    asked = plan(compression=terms, answer_seconds=1.0)
    active = SecureSettings(aggregation="active", min_quota=1)
    check_plan(asked, active, name="pi", told_examples=None)
