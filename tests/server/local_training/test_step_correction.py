"""Devices that take unlike numbers of local steps: plain averages go astray, corrected ones do not.

Two devices with as many examples have the losses x^2 / 2 and (x - 1)^2 / 2, whose sum is smallest
at one half. One device takes two steps in a round, the other ten. A step of rate r multiplies the
distance to a device's own optimum by 1 - r; so H steps move the model by s(H) = 1 - (1 - r)^H of
it, and the rounds end where the two moves cancel: at s(10) / (s(2) + s(10)) for plain averages
(Wang et al. 2020, theorem 1), and at the same with s(H) / H for corrected ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.client.training.context import TrainingContext
from headwater.common.local_training.local_optimizer import path_length
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.messages import Plan
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.local_training.step_correction import correct_steps, mean_path_length
from tests.plans import changed, local_of
from tests.tasks import Given
from tests.training_contexts import plan, trained, training_context

RATE, NUM_EXAMPLES = 0.01, 20
STEPS = {"few": 2, "many": 10}
CENTRES = {"few": 0.0, "many": 1.0}
OPTIMUM = 0.5


def squared_distance(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    (centre_B,) = batch
    x = next(model.parameters()).sum()
    return (x - centre_B).square().sum() / 2, len(centre_B)


def device(name: str) -> TrainingContext:
    def model() -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    data = TensorDataset(torch.full((NUM_EXAMPLES,), CENTRES[name]))
    return training_context(Given(squared_distance, model), data)


def plans_of(terms: LocalTerms) -> dict[str, Plan]:
    return {
        name: plan(
            NUM_EXAMPLES, NUM_EXAMPLES, local_steps=number, local_learning_rate=RATE, local=terms
        )
        for name, number in STEPS.items()
    }


def end_of_rounds(
    terms: LocalTerms, plans: Mapping[str, Plan] | None = None, *, num_rounds: int = 120
) -> float:
    """Return where the rounds end that begin at the optimum of the sum."""
    devices, plans = {name: device(name) for name in STEPS}, plans or plans_of(terms)
    model_P = torch.full((1,), OPTIMUM)
    for _ in range(num_rounds):
        reports, sum_P, weight = {}, torch.zeros(1), 0
        for name, context in devices.items():
            context.image.values_P.copy_(model_P)
            update = trained(context, plans[name])
            reports[name] = update.report
            sum_P += update.values_P
            weight += update.report.weight
        done = RoundSum(
            names=tuple(STEPS),
            mean_P=sum_P / weight,
            weight=weight,
            num_examples=weight,
            summed_weight=weight,
            loss_sum=0.0,
            metric_sums={},
            noise=None,
        )
        correct_steps(done, plans, reports)
        model_P -= done.mean_P
    return model_P.item()


def moved(number: int) -> float:
    return 1 - (1 - RATE) ** number


@pytest.mark.slow
def test_plain_averages_of_unequal_steps_converge_to_a_wrong_point() -> None:
    expected = moved(10) / (moved(2) + moved(10))
    assert expected > OPTIMUM + 0.3
    assert end_of_rounds(LocalTerms()) == pytest.approx(expected, abs=1e-3)


def test_corrected_averages_of_unequal_steps_converge_to_the_optimum() -> None:
    few, many = moved(2) / 2, moved(10) / 10
    found = end_of_rounds(LocalTerms(is_normalized=True))
    assert found == pytest.approx(many / (few + many), abs=1e-3)
    # What is left is the drift within a round, of the order of the rate times the steps.
    assert abs(found - OPTIMUM) <= RATE * max(STEPS.values()) / 4


@pytest.mark.slow
@pytest.mark.parametrize("is_normalized", [True, False])
def test_steps_that_a_deadline_cuts_off_are_corrected_as_those_that_were_not_planned(
    is_normalized: bool,
) -> None:
    terms = LocalTerms(is_normalized=is_normalized)
    number = STEPS["many"]
    each = NUM_EXAMPLES // number  # examples of a step, of a second each
    # The last step may begin if it ends in time: the device has done two at the deadline.
    end = (STEPS["few"] + 0.5) * each
    cut = {
        name: changed(
            one,
            local_steps=number,
            micro_batch_size=each,
            weigh_as=NUM_EXAMPLES,  # as both own as many, whatever they have used
            deadline_seconds=end if name == "few" else None,
        )
        for name, one in plans_of(terms).items()
    }
    report = trained(device("few"), cut["few"]).report
    assert (report.local_steps, report.reason) == (STEPS["few"], "deadline")
    assert end_of_rounds(terms, cut) == pytest.approx(end_of_rounds(terms), abs=1e-3)


def test_with_equal_steps_the_correction_changes_nothing() -> None:
    terms = LocalTerms(is_normalized=True)
    equal = {name: changed(one, local_steps=4) for name, one in plans_of(terms).items()}
    assert mean_path_length(equal, equal, {}) == path_length(terms, 4, rate=RATE) == 4.0


def test_a_device_counts_with_the_steps_that_it_took_and_at_most_its_plan_s() -> None:
    plans = plans_of(LocalTerms(is_normalized=True))
    report = trained(device("many"), plans["many"]).report
    took_four, claims_more = (
        report.model_copy(update={"local_steps": number}) for number in (4, 2**50)
    )
    assert mean_path_length(plans, ["many"], {"many": took_four}) == 4
    assert mean_path_length(plans, ["many"], {"many": claims_more}) == STEPS["many"]
    assert mean_path_length(plans, ["few", "many"], {"many": took_four}) == (2 + 4) / 2


def test_the_length_of_a_stale_update_s_path_is_discounted_as_the_update_is() -> None:
    plans = plans_of(LocalTerms(is_normalized=True))

    def times(one: Plan, _num_windows: int) -> int:
        return 3 if local_of(one).steps == STEPS["few"] else 1

    assert mean_path_length(plans, ["few", "many"], {}, times) == (3 * 2 + 10) / 4


def test_a_sum_of_several_windows_counts_with_their_mean_path() -> None:
    plans = plans_of(LocalTerms(is_normalized=True))
    report = trained(device("many"), plans["many"]).report
    windows = {"num_windows": 4, "local_steps": 10 + 10 + 10 + 3}
    report = report.model_copy(update=windows)
    assert mean_path_length(plans, ["many"], {"many": report}) == (10 + 10 + 10 + 3) / 4


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("number", [1, 3, 10])
def test_momentum_makes_the_path_longer_by_the_papers_formula(momentum: float, number: int) -> None:
    # Wang et al. 2020, section 3.2: |a| = (H - m (1 - m^H) / (1 - m)) / (1 - m).
    expected = (number - momentum * (1 - momentum**number) / (1 - momentum)) / (1 - momentum)
    terms = LocalTerms(arguments={"momentum": momentum})
    assert path_length(terms, number, rate=RATE) == pytest.approx(expected, rel=1e-12)


def test_a_proximal_term_makes_the_path_shorter_by_the_papers_formula() -> None:
    # The gradient of step k is multiplied by (1 - rate mu) in each of the H - k steps after it.
    mu, number = 2.0, 7
    expected = sum((1 - RATE * mu) ** step for step in range(number))
    found = path_length(LocalTerms(proximal=mu), number, rate=RATE)
    assert found == pytest.approx(expected, rel=1e-12)


def test_adam_s_path_is_its_number_of_steps() -> None:
    assert path_length(LocalTerms(optimizer="adam"), 9, rate=RATE) == pytest.approx(9, rel=1e-6)


def test_the_paths_of_a_thousand_numbers_of_steps_take_a_few_runs_of_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_steps = 0
    step = torch.optim.SGD.step

    def counting(optimizer: torch.optim.SGD) -> None:
        nonlocal num_steps
        num_steps += 1
        step(optimizer)

    monkeypatch.setattr(torch.optim.SGD, "step", counting)
    terms = LocalTerms(arguments={"momentum": 0.25})
    found = [path_length(terms, number, rate=RATE) for number in range(1, 1_001)]
    assert all(shorter < longer for shorter, longer in pairwise(found))
    assert num_steps <= 2 * 1024
