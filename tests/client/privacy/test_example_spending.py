"""What single examples of a device have spent: never less than they took part in, and tight."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.privacy.budget import Spent, SpentFile
from headwater.client.privacy.example_spending import (
    EpochPlace,
    ExampleSpent,
    UpdateCost,
    UsedWindow,
)
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerPosition, window
from headwater.common.errors import PrivacyBudgetSpent
from headwater.common.messages import Plan
from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import PrivacyTerms, rho_of
from tests.masked import (
    AppDevice,
    NodeDevice,
    model,
    opening_of,
    plan,
    play,
    ready,
    train,
    trainer,
)

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

Z, QUOTA = 3.0, 8
IDENTITY = Identity(name="d0", data=None, part=0, num_parts=8)
TERMS = {"norm_bound": QUOTA * (1 + QUOTA * 2.0**-24), "noise_multiplier": Z, "example_bound": 1.0}


def private(round_number: int = 1, **changes: Any) -> Plan:
    return plan(round_number, **{"privacy": TERMS, "is_masked": False, **changes})


def test_a_round_s_cost_to_the_device_grows_with_the_square_of_its_vector_s_bound() -> None:
    """A vector of up to 8 beside noise for single examples of up to 2 is four times as far."""
    terms = PrivacyTerms(norm_bound=8.0, noise_multiplier=Z, example_bound=2.0)
    cost = UpdateCost.of(terms, 0.5)
    assert (cost.device_rho, cost.example_rho) == (0.5 * 4 * 4, 0.5)
    whole = UpdateCost.of(PrivacyTerms(norm_bound=8.0, noise_multiplier=Z), 0.5)
    assert whole.device_rho == 0.5


def used(
    place: SamplerPosition, quota: int, number: int, run: str = "1"
) -> tuple[UsedWindow, tuple[int, ...], SamplerPosition]:
    taken = window(place, quota=quota, run_seed=0, name="pi", num_examples=number)
    after = taken.after(len(taken.positions))
    start, end = (
        EpochPlace(run=run, num_examples=number, **asdict(one)) for one in (taken.place, after)
    )
    is_of_two = after.epoch > place.epoch and end.is_begun
    return UsedWindow(start=start, end=end, is_of_two_epochs=is_of_two), taken.positions, after


STEP = st.tuples(
    st.integers(1, 9),
    st.sampled_from(["counts", "counts", "counts", "again", "passed over", "back"]),
    st.integers(1, 3),
)


@given(number=st.integers(1, 20), steps=st.lists(STEP))
def test_no_example_has_spent_more_than_is_counted(
    number: int, steps: list[tuple[int, str, int]]
) -> None:
    spent, place, old, costs = ExampleSpent(), SamplerPosition(), SamplerPosition(), Counter[int]()
    for quota, fate, rho in steps:
        found, positions, after = used(place, min(quota, number), number)
        if fate == "passed over":  # the update was never sent
            place = after
            continue
        spent = spent.after(UpdateCost(device_rho=1.0, example_rho=rho, window=found))
        costs.update(dict.fromkeys(positions, rho))
        old, place = (old, after) if fate == "counts" else (place, place)
        if fate == "back":  # an old state was restored
            place = old
        assert max(costs.values()) <= spent.cost.rho
        assert spent == ExampleSpent.of(json.loads(json.dumps(asdict(spent))))


@pytest.mark.parametrize(("number", "quota"), [(1000, 8), (64, 8), (60, 8), (5, 8)])
def test_updates_of_one_cost_count_the_epochs_that_were_begun(number: int, quota: int) -> None:
    spent, place = ExampleSpent(), SamplerPosition()
    for count in range(1, 31):
        found, positions, place = used(place, min(quota, number), number)
        spent = spent.after(UpdateCost(device_rho=1.0, example_rho=1.0, window=found))
        assert spent.cost.rho == math.ceil(count * len(positions) / number)


def test_another_run_begins_another_epoch() -> None:
    spent = ExampleSpent()
    for run in ("1", "2", "1"):
        found, _, _ = used(SamplerPosition(), 4, 100, run)
        spent = spent.after(UpdateCost(device_rho=1.0, example_rho=1.0, window=found))
    assert spent.cost.rho == 3


def test_an_update_that_turns_out_cheaper_is_corrected_in_its_epoch() -> None:
    first, _, place = used(SamplerPosition(), 4, 100)
    second, _, _ = used(place, 4, 100)
    spent = ExampleSpent().after(UpdateCost(device_rho=1.0, example_rho=2.0, window=first))
    spent = spent.after(UpdateCost(device_rho=1.0, example_rho=5.0, window=second))
    assert spent.cost.rho == 5
    assert spent.corrected(3.0).cost.rho == 3
    assert spent.corrected(1.0).cost.rho == 2  # the first update's


def test_a_round_with_noise_for_devices_costs_each_example_four_times_as_much() -> None:
    terms = PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0)
    update = UpdateCost.of(terms, terms.rho)
    assert (update.device_rho, update.example_rho) == (0.5, 2.0)
    spent = ExampleSpent().after(update).after(update)
    assert spent.cost.rho == 4.0


def test_a_round_with_noise_for_examples_costs_the_device_the_square_of_their_number() -> None:
    terms = PrivacyTerms(norm_bound=16.0, noise_multiplier=1.0, example_bound=1.0)
    assert UpdateCost.of(terms, terms.rho).device_rho == 0.5 * 16**2


def file_of(device: NodeDevice, folder: Path) -> Spent:
    return SpentFile(folder / f"{device.name}.privacy.json").read()


def test_a_device_counts_the_rounds_of_an_epoch_once_and_a_repeated_one_again(
    tmp_path: Path,
) -> None:
    device = NodeDevice(0, tmp_path)
    found = []
    for round_number, counted in ((1, None), (2, 1), (2, 1), (3, 2)):
        train(device, private(round_number, counted_round=counted))
        found.append(round(file_of(device, tmp_path).examples.cost.rho / rho_of(Z), 6))
    assert found == [1, 1, 2, 2]
    assert file_of(device, tmp_path).rho == pytest.approx(4 * QUOTA**2 * rho_of(Z), rel=1e-4)


def test_a_server_that_changes_the_order_within_an_epoch_begins_another_on_the_device(
    tmp_path: Path,
) -> None:
    """The examples after the same place of another order may be those of before."""
    device = NodeDevice(0, tmp_path)
    train(device, private(1))
    train(device, private(2, counted_round=1, run_seed=1))
    assert file_of(device, tmp_path).examples.cost.rho == pytest.approx(2 * rho_of(Z))


def test_a_masked_plan_with_another_seed_begins_another_epoch_on_the_device(
    tmp_path: Path,
) -> None:
    terms = {**TERMS, "min_survivors": 0.7, "corrupted": 0.1}
    first = NodeDevice(0, tmp_path, secure={"order_seed": None})
    cohort: list[Any] = [first, *(AppDevice(part) for part in range(1, 5))]
    found, built = [], model()
    for round_number, seed in ((1, 0), (2, 0), (3, 7)):
        masked = private(round_number, privacy=terms, is_masked=True, run_seed=seed)
        image = bytes([round_number]) + built[1:]  # at one model no example is masked twice
        for device in cohort:
            train(device, masked, image)
        digest = hashlib.sha256(image).digest()
        play(
            cohort, opening_of(cohort, masked, privacy=masked.of(PrivacyTerms), model_digest=digest)
        )
        found.append(file_of(first, tmp_path).examples.cost.rho / (rho_of(Z) * 3 / 4))
    assert found == pytest.approx([1, 1, 2], rel=1e-5)


def test_a_budget_for_examples_allows_an_epoch_and_refuses_the_next(tmp_path: Path) -> None:
    budget = epsilon_of(1.5 * rho_of(Z), delta=1e-5)
    device = NodeDevice(0, tmp_path, privacy={"budget": budget, "unit": "example"})
    num_rounds = len(trainer().examples(IDENTITY)) // QUOTA
    for round_number in range(1, num_rounds + 1):
        train(device, private(round_number, counted_round=round_number - 1 or None))
    with pytest.raises(PrivacyBudgetSpent, match="in its own log"):
        train(device, private(num_rounds + 1, counted_round=num_rounds))


def test_a_budget_for_the_device_refuses_noise_that_hides_examples_alone(tmp_path: Path) -> None:
    budget = epsilon_of(1.5 * rho_of(Z), delta=1e-5)
    with pytest.raises(PrivacyBudgetSpent):
        train(NodeDevice(0, tmp_path, privacy={"budget": budget}), private())


def test_a_file_of_an_earlier_version_has_the_examples_share_of_what_the_device_spent(
    tmp_path: Path,
) -> None:
    path = tmp_path / "d0.privacy.json"
    path.write_text(json.dumps({"rho": 0.5, "num_updates": 1, "last_rho": 0.5}))
    spent = SpentFile(path).read()
    assert (spent.of_unit("device"), spent.of_unit("example")) == (0.5, 2.0)


def test_an_opened_masked_sum_costs_its_examples_what_the_survivors_noise_leaves(
    tmp_path: Path,
) -> None:
    masked = private(privacy={**TERMS, "min_survivors": 0.7, "corrupted": 0.1}, is_masked=True)
    first = NodeDevice(0, tmp_path)
    cohort: list[Any] = [first, *(AppDevice(part) for part in range(1, 5))]
    for device in cohort:
        ready(device, masked)
    opened = play(cohort, opening_of(cohort, masked, privacy=masked.of(PrivacyTerms))).sum
    assert len(opened.survived) == 5
    spent = file_of(first, tmp_path).examples
    # 5 members, of whom 4 must survive and 1 may collude: noise for 3, and there are 4.
    assert spent.cost.rho == pytest.approx(rho_of(Z) * 3 / 4, rel=1e-5)
    assert spent.place is not None
    assert (spent.place.epoch, spent.place.offset) == (0, QUOTA)
