"""A run's privacy: plans, the noise of plain sums, and what is written before a sum is used."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.common.errors import CheckpointCorrupt, PrivacySpent, StateError, TermEnded
from headwater.common.messages import Plan, Step, Update, UpdateReport
from headwater.common.model.layout import ModelLayout
from headwater.common.model.parameters import build_model
from headwater.common.privacy.discrete_gaussian import RandomBits, draw
from headwater.common.privacy.noise_shares import plain_scale_bits, plain_sigma
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.settings.schema import Settings
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.planning.device_estimates import UNTOLD_EXAMPLES
from headwater.server.privacy.round_terms import terms_of
from headwater.server.privacy.run_privacy import RunPrivacy
from headwater.server.privacy.spent_budget import PRIVACY_FILE, spent_in
from headwater.server.rounds.open_round import OpenRound
from headwater.server.secagg.unmask_phase import UnmaskedSum
from tests.faults import FaultPlan
from tests.secagg import Cast, name_of
from tests.tasks import TwoLayers

NAMES = ("a", "b", "c")
OWNED = dict.fromkeys(NAMES, 100)
OF_ROUND: dict[str, Any] = {"round_number": 1, "names": NAMES}


BY_EXAMPLE = {"privacy": {"unit": "example"}}


def zeros(size: int) -> bytes:
    return bytes(size)


def settings(**changes: Any) -> Settings:
    privacy = {"noise_multiplier": 2.0, "clip": 0.5, **changes.pop("privacy", {})}
    return Settings.model_validate(
        {"task": "x.py:X", "rounds": 10, "privacy": privacy}
        | {"plan": {"accumulation_steps": 2, **changes.pop("plan", {})}, **changes}
    )


def layout() -> ModelLayout:
    return build_model(TwoLayers(), seed=0).layout


def plans(quotas: tuple[int, ...] = (16, 16, 8)) -> dict[str, Plan]:
    return {
        name: Plan(round=1, run_seed=0, model_version=0, quota=quota, micro_batch_size=8)
        for name, quota in zip(NAMES, quotas, strict=True)
    }


def update(
    name: str, values_P: Tensor, *, weight: int, quota: int, clip_bit: Literal[0, 1] | None = None
) -> Update:
    step = Step(num_examples=quota, weight=weight, loss=0.0, seconds=0.0, peak_bytes=0)
    report = UpdateReport(
        name=name,
        round=1,
        num_examples=quota,
        weight=weight,
        loss_sum=0.0,
        micro_batch_size=8,
        seconds=0.0,
        steps=(step,),
        reason="quota",
        clip_bit=clip_bit,
    )
    return Update(values_P=values_P, report=report)


def test_all_plans_of_a_round_have_the_same_terms() -> None:
    privacy = RunPrivacy(settings(), num_values=4)
    private = privacy.private_plans(plans(), max_weight_per_example=3, owned=OWNED)
    terms = terms_of(private.values())
    assert terms.norm_bound == 0.5 * 16 * 3  # of the largest planned weight
    assert terms.noise_multiplier == 2.0
    unchanged = {name: plan.model_copy(update={"terms": {}}) for name, plan in private.items()}
    assert unchanged == plans()


def test_the_bound_of_an_example_is_the_clip_norm_times_its_largest_weight() -> None:
    privacy = RunPrivacy(settings(**BY_EXAMPLE), num_values=4)
    terms = terms_of(privacy.private_plans(plans(), max_weight_per_example=3, owned=OWNED).values())
    assert (terms.unit, terms.example_bound, terms.max_examples) == ("example", 1.5, 16)
    assert terms.norm_bound == pytest.approx(1.5 * 16, rel=1e-5)


def test_rounds_within_an_epoch_cost_examples_what_one_round_does(tmp_path: Path) -> None:
    chosen = settings(out=tmp_path, **BY_EXAMPLE)
    privacy, epsilons = RunPrivacy(chosen, num_values=3), []
    for round_number in range(1, 9):
        if round_number == 4:  # another process goes on
            privacy = RunPrivacy(chosen, num_values=3)
            privacy.open_file(num_rounds=3)
        terms = terms_of(
            privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED).values()
        )
        privacy.add_noise(CohortSum(layout()), terms, round_number=round_number, names=NAMES)
        epsilons.append(privacy.epsilon)
    # 100 examples, at most 16 a round: the seventh round begins the second epoch.
    assert epsilons == [epsilons[0]] * 6 + [epsilons[6]] * 2
    assert epsilons[6] > epsilons[0]
    assert spent_in(tmp_path) == {"epsilon": epsilons[-1], "delta": 1e-5, "unit": "example"}
    by_device = RunPrivacy(settings(), num_values=3)
    by_device.private_plans(plans(), max_weight_per_example=1, owned=OWNED)
    by_device.add_noise(CohortSum(layout()), terms, **OF_ROUND)
    assert by_device.epsilon == pytest.approx(epsilons[0])


def test_a_round_that_a_crash_undid_costs_its_examples_again(tmp_path: Path) -> None:
    privacy = RunPrivacy(settings(out=tmp_path, **BY_EXAMPLE), num_values=3)
    epsilons = []
    for _ in range(2):
        terms = terms_of(
            privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED).values()
        )
        privacy.add_noise(CohortSum(layout()), terms, **OF_ROUND)
        epsilons.append(privacy.epsilon)
        privacy = RunPrivacy(settings(out=tmp_path, **BY_EXAMPLE), num_values=3)
        privacy.open_file()
        assert privacy.epsilon == epsilons[-1]
    assert epsilons[1] > epsilons[0]


def test_a_run_whose_epochs_are_not_written_down_counts_every_round(tmp_path: Path) -> None:
    """Its first rounds were masked, where a device's place in its epoch is not known."""
    rows = [{"noise_multiplier": 2.0, "count": 3}]
    (tmp_path / PRIVACY_FILE).write_text(json.dumps({"sums": rows}))
    found = []
    for changes in ({}, BY_EXAMPLE):
        privacy = RunPrivacy(settings(out=tmp_path, **changes), num_values=3)
        privacy.open_file(num_rounds=3)
        found.append(privacy.epsilon)
    assert found[0] == found[1] > 0


def rounds_of(
    privacy: RunPrivacy, numbers: Mapping[int, Mapping[str, int]], *, rounds: int = 10
) -> list[tuple[list[str], float]]:
    """Run rounds of devices with ``numbers`` of examples, which change in the rounds named."""
    owned: Mapping[str, int] = {}
    found = []
    for number in range(1, rounds + 1):
        owned = numbers.get(number, owned)
        asked = {name: plan for name, plan in plans().items() if name in owned}
        asked = {name: plan.model_copy(update={"round": number}) for name, plan in asked.items()}
        private = privacy.private_plans(asked, max_weight_per_example=1, owned=owned)
        terms = terms_of(private.values())
        privacy.add_noise(CohortSum(layout()), terms, round_number=number, names=private)
        found.append(([*private], terms.noise_multiplier))
    return found


BY_EPSILON: dict[str, Any] = {
    "privacy": {"unit": "example", "epsilon": 4.0, "noise_multiplier": None},
    "cohort": {"min_clients": 2},
}


@pytest.mark.parametrize("told", [101, 99, 3, UNTOLD_EXAMPLES])
def test_a_device_that_tells_another_number_of_examples_is_left_out_alone(told: int) -> None:
    rounds = rounds_of(
        RunPrivacy(settings(**BY_EPSILON), num_values=3), {1: OWNED, 6: {**OWNED, "c": told}}
    )
    # In the last round no epoch begins any more, and it may take part again if it can afford it.
    assert [names for names, _ in rounds][:9] == [["a", "b", "c"]] * 5 + [["a", "b"]] * 4
    even = rounds_of(RunPrivacy(settings(**BY_EPSILON), num_values=3), {1: OWNED})
    # No later noise follows what c has begun.
    assert [noise for _, noise in rounds] == pytest.approx([noise for _, noise in even])


def test_a_device_that_never_tells_a_number_stays_and_its_rounds_all_count() -> None:
    untold = {**OWNED, "c": UNTOLD_EXAMPLES}
    privacy = RunPrivacy(settings(**BY_EPSILON), num_values=3)
    rounds = rounds_of(privacy, {1: untold})
    assert {len(names) for names, _ in rounds} == {3}
    assert privacy.epsilon == pytest.approx(4.0, rel=1e-3)
    told = rounds_of(RunPrivacy(settings(**BY_EPSILON), num_values=3), {1: OWNED})
    assert rounds[0][1] > 2 * told[0][1]


def test_it_stays_where_too_few_would_be_left_and_the_noise_follows_it() -> None:
    chosen = {**BY_EPSILON, "cohort": {"min_clients": 3}}
    privacy = RunPrivacy(settings(**chosen), num_values=3)
    rounds = rounds_of(privacy, {1: OWNED, 6: {**OWNED, "c": 101}})
    assert {len(names) for names, _ in rounds} == {3}
    assert rounds[5][1] > 2 * rounds[4][1]


def test_most_devices_are_not_left_out_for_the_sake_of_one() -> None:
    """A growing folder is no fault: where most devices' data grow, each round counts."""
    chosen = {**BY_EPSILON, "cohort": {"min_clients": 1}}
    privacy = RunPrivacy(settings(**chosen), num_values=3)
    rounds = rounds_of(privacy, {1: OWNED, 6: {"a": 100, "b": 101, "c": 101}})
    assert {len(names) for names, _ in rounds} == {3}
    assert privacy.epsilon <= 4.0


def test_the_noise_follows_no_device_that_is_in_no_coming_round() -> None:
    few = {**OWNED, "c": 1}
    gone = {name: number for name, number in OWNED.items() if name != "c"}
    privacy = RunPrivacy(settings(**BY_EPSILON), num_values=3)
    rounds = rounds_of(privacy, {1: few, 2: gone})
    assert rounds[0][1] > 2 * rounds[1][1]
    alone = rounds_of(RunPrivacy(settings(**BY_EPSILON), num_values=3), {1: gone})
    assert [noise for _, noise in rounds[1:]] == pytest.approx([noise for _, noise in alone[1:]])
    assert privacy.epsilon == pytest.approx(4.0, rel=1e-3)


def test_a_device_with_nothing_left_is_left_out_though_others_were_before() -> None:
    """Each grows in another round: the run goes on with those that have something left."""
    names = [f"d{at}" for at in range(8)]
    privacy = RunPrivacy(settings(**BY_EPSILON), num_values=3)
    owned, there = dict.fromkeys(names, 1000), list(names)
    for number in range(1, 11):
        if 3 <= number < 9:
            owned[names[number - 3]] += 1
        asked = {
            name: Plan(round=number, run_seed=0, model_version=0, quota=16, micro_batch_size=8)
            for name in there
        }
        private = privacy.private_plans(asked, max_weight_per_example=1, owned=owned)
        there = [*private]
        terms = terms_of(private.values())
        privacy.add_noise(CohortSum(layout()), terms, round_number=number, names=private)
    assert there == ["d6", "d7"]
    assert privacy.epsilon <= 4.0


def test_the_log_names_the_device_that_makes_the_noise_stronger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = rounds_of(
        RunPrivacy(settings(**BY_EPSILON), num_values=3),
        {1: {"a": 100, "b": 100}, 3: {**OWNED, "c": 3}},
    )
    assert rounds[2][1] > 1.5 * rounds[1][1]
    said = [one.getMessage() for one in caplog.records if "times as strong" in one.getMessage()]
    assert len(said) == 1, "once, and not in each round"
    assert "for 1 device with few examples, or whose rounds all count: c with 3" in said[0]


@pytest.mark.parametrize("epochs", [1, {}, {"round": 1, "rho": 1, "places": {"a": [1]}}])
def test_damaged_epochs_are_an_error(tmp_path: Path, epochs: Any) -> None:
    rows = [{"noise_multiplier": 2.0, "count": 3}]
    (tmp_path / PRIVACY_FILE).write_text(json.dumps({"sums": rows, "epochs": epochs}))
    privacy = RunPrivacy(settings(out=tmp_path, **BY_EXAMPLE), num_values=3)
    with pytest.raises(CheckpointCorrupt):
        privacy.open_file(num_rounds=3)


@pytest.fixture
def round_of_three() -> tuple[RunPrivacy, CohortSum, OpenRound, Callable[[str], Tensor]]:
    shape = layout()
    privacy = RunPrivacy(settings(), num_values=shape.num_parameters, random=zeros)
    private = privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED)
    total = CohortSum(shape)
    bits = plain_scale_bits(terms_of(private.values()))
    total.open(num_clients=3, planned_weight=40, scale_bits=bits)
    opened = OpenRound(plans=private, total=total, owned=dict.fromkeys(NAMES, 100))

    def values(name: str) -> Tensor:
        drawn = np.random.default_rng(NAMES.index(name)).normal(size=shape.num_parameters)
        return torch.from_numpy((drawn / np.linalg.norm(drawn)).astype(np.float32))

    return privacy, total, opened, values


def test_a_plain_private_mean_is_the_integers_sum_and_their_noise_bit_for_bit(
    round_of_three: Any,
) -> None:
    privacy, total, opened, values = round_of_three
    for name, quota in zip(NAMES, (16, 16, 8), strict=True):
        opened.take(update(name, 5 * values(name), weight=quota, quota=quota))
    assert not opened.refused
    terms = terms_of(opened.plans.values())
    privacy.add_noise(total, terms, **OF_ROUND)
    num_values, bits = layout().num_parameters, plain_scale_bits(terms)
    sigma = plain_sigma(terms, scale_bits=bits, num_values=num_values)
    expected = draw(sigma, num_values, RandomBits(zeros))
    for name in NAMES:
        scaled = (5 * values(name)).double() * 2.0**bits
        expected = expected + np.rint(scaled.numpy()).astype(np.int64)
    mean_P = total.close()
    np.testing.assert_array_equal(mean_P.numpy(), (expected * 2.0**-bits / 40).astype(np.float32))


def test_a_device_that_did_not_clip_is_clipped_by_the_server(round_of_three: Any) -> None:
    _, total, opened, values = round_of_three
    bound = terms_of(opened.plans.values()).norm_bound
    liar = 1e6 * values("a")
    opened.take(update("a", liar, weight=16, quota=16))
    mean_P = total.close()
    assert float(mean_P.double().norm()) * 16 == pytest.approx(bound, rel=1e-5)
    assert float(liar.double().norm()) == pytest.approx(1e6, rel=1e-5)  # its memory is untouched


@pytest.mark.parametrize("weight", [1, 15])
def test_a_weight_that_is_not_the_plan_s_is_refused(round_of_three: Any, weight: int) -> None:
    _, _, opened, values = round_of_three
    opened.take(update("a", values("a"), weight=weight, quota=16))
    assert opened.refused["a"].code == "CountOutOfRange"


def test_what_is_spent_is_on_disk_before_the_noise_is_drawn(tmp_path: Path) -> None:
    privacy = RunPrivacy(settings(out=tmp_path), num_values=3, random=zeros)
    terms = terms_of(privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED).values())

    class Watched(CohortSum):
        def add_integers(self, draw: Any) -> None:
            assert json.loads((tmp_path / PRIVACY_FILE).read_text())["sums"] == [
                {"noise_multiplier": 2.0, "count": 1}
            ]

    privacy.add_noise(Watched(layout()), terms, **OF_ROUND)
    assert privacy.epsilon > 0
    assert spent_in(tmp_path) == {"epsilon": privacy.epsilon, "delta": 1e-5, "unit": "device"}


def test_a_sum_that_cannot_be_written_down_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / f"{PRIVACY_FILE}.part").mkdir()
    privacy = RunPrivacy(settings(out=tmp_path), num_values=3)
    terms = terms_of(privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED).values())
    with pytest.raises(StateError):
        privacy.add_noise(CohortSum(layout()), terms, **OF_ROUND)
    assert privacy.epsilon == 0


def test_a_sum_whose_noise_the_standby_does_not_know_of_is_not_opened(tmp_path: Path) -> None:
    """Whoever takes over must not spend what was spent already."""
    privacy = RunPrivacy(settings(out=tmp_path), num_values=3)
    terms = terms_of(privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED).values())

    def publish() -> None:
        assert spent_in(tmp_path) is not None
        raise TermEnded("another server has the next term")

    class Closed(CohortSum):
        def add_integers(self, draw: Any) -> None:
            pytest.fail("the sum got its noise, and would be used")

    privacy.publish = publish
    with pytest.raises(TermEnded):
        privacy.add_noise(Closed(layout()), terms, **OF_ROUND)


def test_another_process_goes_on_with_what_was_spent(tmp_path: Path) -> None:
    chosen = settings(out=tmp_path, privacy={"noise_multiplier": None, "epsilon": 3.0})
    first = RunPrivacy(chosen, num_values=3)
    terms = terms_of(first.private_plans(plans(), max_weight_per_example=1, owned=OWNED).values())
    first.add_noise(CohortSum(layout()), terms, **OF_ROUND)
    second = RunPrivacy(chosen, num_values=3)
    second.open_file()
    assert second.epsilon == pytest.approx(first.epsilon)
    assert second.noise_multiplier(round_number=2) == pytest.approx(terms.noise_multiplier)
    again = second.noise_multiplier(round_number=1)  # round 1 was undone: more noise is due
    assert again == pytest.approx(terms.noise_multiplier * math.sqrt(10 / 9), rel=1e-3)


def test_a_run_ends_when_its_epsilon_is_spent_and_says_how_much_was(tmp_path: Path) -> None:
    rows = [{"noise_multiplier": 0.5, "count": 100}]
    (tmp_path / PRIVACY_FILE).write_text(json.dumps({"sums": rows}))
    chosen = settings(out=tmp_path, privacy={"noise_multiplier": None, "epsilon": 3.0})
    privacy = RunPrivacy(chosen, num_values=3)
    privacy.open_file()
    said = rf"have spent all of the run's epsilon: {privacy.epsilon:.3g} of 3 at delta 1e-05"
    with pytest.raises(PrivacySpent, match=said):
        privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED)


@pytest.mark.parametrize("text", ["", "{}", '{"sums": [{"noise_multiplier": 0, "count": 1}]}'])
def test_a_damaged_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / PRIVACY_FILE).write_text(text)
    privacy = RunPrivacy(settings(out=tmp_path), num_values=3)
    with pytest.raises(CheckpointCorrupt):
        privacy.open_file()


def opened_sum(members: int, survivors: int) -> UnmaskedSum:
    """Return an opened sum of so many survivors; its vector is not looked at."""
    setup = Cast(members, num_values=3, privacy=MASKED, device=private_devices(members))
    drop = FaultPlan()
    for at in range(survivors, members):
        drop = drop.drop(client=name_of(at), after="check_shares")
    return setup.play(drop).sum


MASKED = PrivacyTerms(norm_bound=8.0, noise_multiplier=2.0, min_survivors=0.7, corrupted=0.1)


def private_devices(number: int) -> dict[str, dict[str, Any]]:
    return {name_of(at): {"privacy": MASKED} for at in range(number)}


def test_a_round_of_disjoint_groups_costs_what_the_group_with_the_least_noise_does() -> None:
    """A device is in one group: the group with the least noise counts, and the others are free."""
    sums = {"many": opened_sum(10, 10), "few": opened_sum(10, 7)}
    found = {}
    for order in ("many few", "few many", "few", "many"):
        privacy = RunPrivacy(settings(), num_values=3)
        privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED)
        for name in order.split():
            privacy.note_unmasked(sums[name], MASKED)
        found[order] = privacy.epsilon
    assert found["many few"] == found["few many"] == found["few"] > found["many"]


def test_another_attempt_at_a_round_is_another_sum() -> None:
    privacy, one = RunPrivacy(settings(), num_values=3), opened_sum(5, 5)
    for _ in range(2):
        privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED)
        privacy.note_unmasked(one, MASKED)
    twice = privacy.epsilon
    privacy = RunPrivacy(settings(), num_values=3)
    privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED)
    privacy.note_unmasked(one, MASKED)
    assert twice > privacy.epsilon > 0


def following(**changes: Any) -> RunPrivacy:
    privacy = {"clip_quantile": 0.5, **changes.pop("privacy", {})}
    return RunPrivacy(settings(privacy=privacy, **changes), num_values=3)


def test_bits_are_paid_for_by_the_vectors_noise_and_not_by_the_round() -> None:
    privacy = following()
    terms = terms_of(privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED).values())
    assert terms.bit_multiplier == 8.0  # 4 z
    assert terms.vector_multiplier == pytest.approx(2 / math.sqrt(15 / 16))
    privacy.add_noise(CohortSum(layout()), terms, **OF_ROUND, clip_bits=[1, 1, 0])
    fixed = RunPrivacy(settings(), num_values=3)
    terms = terms_of(fixed.private_plans(plans(), max_weight_per_example=1, owned=OWNED).values())
    assert fixed.add_noise(CohortSum(layout()), terms, **OF_ROUND) is None
    assert privacy.epsilon == fixed.epsilon


def test_the_sum_of_bits_in_plain_rounds_has_the_noise_that_is_due() -> None:
    privacy = following()
    terms = terms_of(privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED).values())
    total = CohortSum(layout())
    sums = [privacy.add_noise(total, terms, **OF_ROUND, clip_bits=[1, 1, 0]) for _ in range(200)]
    noise = np.array(sums, dtype=float) - 1  # two bits within, and one beyond
    # chi-square with 200 degrees of freedom, within six standard deviations: one run in 10^8 fails
    assert abs((noise**2).sum() / 8.0**2 - 200) < 6 * math.sqrt(2 * 200)
    assert len(set(sums)) > 190


@pytest.mark.parametrize(("asked", "told"), [(0.5, None), (None, 1)])
def test_a_bit_that_is_missing_or_was_not_asked_for_is_refused(
    asked: float | None, told: Literal[1] | None
) -> None:
    privacy = following(privacy={"clip_quantile": asked})
    private = privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED)
    total = CohortSum(layout())
    total.open(num_clients=3, planned_weight=40, scale_bits=20)
    opened = OpenRound(plans=private, total=total, owned=dict.fromkeys(NAMES, 100))
    values = torch.zeros(layout().num_parameters)
    opened.take(update("a", values, weight=16, quota=16, clip_bit=told))
    assert opened.refused["a"].code == "CountOutOfRange"
    opened.take(update("b", values, weight=16, quota=16, clip_bit=None if told else 1))
    assert list(opened.accepted) == ["b"]
    assert opened.clip_bits == ([] if told else [1])


def test_the_clip_norm_follows_committed_rounds_and_is_the_next_plans() -> None:
    privacy = following()
    privacy.follow_clip(3.0, num_devices=3)  # all were within it
    assert privacy.clip.last_norm == 0.5
    assert privacy.clip.last_share == 1.0
    terms = terms_of(privacy.private_plans(plans(), max_weight_per_example=3, owned=OWNED).values())
    assert terms.norm_bound == pytest.approx(0.5 * math.exp(-0.2 * 0.5) * 16 * 3)


def test_a_resumed_run_goes_on_with_its_clip_norm_unless_the_start_was_changed() -> None:
    privacy = following()
    privacy.follow_clip(3.0, num_devices=3)
    saved = json.loads(json.dumps(privacy.clip.to_json()))
    assert following().clip.restored(saved).norm == privacy.clip.norm
    assert following(privacy={"clip": 2.0}).clip.restored(saved).norm == 2.0
    assert RunPrivacy(settings(), num_values=3).clip.restored(saved).norm == 0.5
    assert following().clip.restored({}).norm == 0.5


def test_a_quantile_without_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is clipped without noise"):
        settings(privacy={"noise_multiplier": None, "clip_quantile": 0.5})


def test_the_next_round_expects_the_survivors_of_the_last_group_with_the_least_noise() -> None:
    chosen = settings(privacy={"noise_multiplier": None, "epsilon": 3.0})
    found = {}
    for survivors in ("10", "7", "10 7"):
        privacy = RunPrivacy(chosen, num_values=3)
        before = privacy.noise_multiplier(round_number=1)
        privacy.private_plans(plans(), max_weight_per_example=1, owned=OWNED)
        for number in survivors.split():
            terms = MASKED.model_copy(update={"noise_multiplier": before})
            privacy.note_unmasked(opened_sum(10, int(number)), terms)
        found[survivors] = privacy.noise_multiplier(round_number=2) / before
    gain = (10 - 1) / (7 - 1)  # honest survivors over those that the noise was calibrated for
    rest = (1 - 0.1 / gain) / 0.9  # of what nine rounds would have had
    assert found["10"] == pytest.approx(1 / math.sqrt(gain * rest), rel=1e-4)
    assert found["7"] == found["10 7"] == pytest.approx(1.0, rel=1e-4)
