"""The sentence of advice: whom it names, what to type, and why."""

from __future__ import annotations

from headwater.simulation.compare.advice import advice_of
from headwater.simulation.compare.budget import Budget, Resource
from headwater.simulation.compare.standing import Standing
from tests.simulation.compare.standings import curve, standing


def advice(*standings: Standing, target: float = 0.9, resource: Resource = "rounds") -> str:
    budget = Budget(resource=resource, amount=50)
    found = advice_of(standings, target=target, budget=budget, metric="test_accuracy")
    assert found is not None
    assert found.count(". ") == 0  # one sentence
    return found


EXACT = standing("exact", curve(0.2, 0.4, 0.6, 0.9, examples_each=100))
FEDAVG = standing("fedavg", curve(0.5, 0.9, examples_each=1000))


def test_it_names_the_best_what_to_type_and_what_exact_steps_need() -> None:
    assert advice(EXACT, FEDAVG) == (
        "Use --algorithm fedavg --local-learning-rate 0.1: it reaches a test accuracy of 0.9 in "
        "2 rounds, where exact needs 4; exact uses 5.0 times fewer examples."
    )


def test_the_best_depends_on_the_resource_of_the_budget() -> None:
    assert advice(EXACT, FEDAVG, resource="examples") == (
        "Use --algorithm exact --local-learning-rate 0.1: it reaches a test accuracy of 0.9 in "
        "400 examples, where fedavg needs 2,000; fedavg uses 2.0 times fewer rounds."
    )


def test_a_close_second_is_named_as_such() -> None:
    close = standing("fedprox", curve(0.1, 0.9), curve(0.1, 0.1, 0.9), curve(0.1, 0.1, 0.9))
    assert "where fedprox needs 3, which is within the spread of the seeds;" in advice(
        EXACT, FEDAVG, close
    )


def test_an_algorithm_that_does_not_reach_the_target_is_said_to() -> None:
    never = standing("exact", curve(0.1, 0.2))
    assert advice(never, FEDAVG).endswith("in 2 rounds, where exact does not reach it.")


def test_without_any_that_reaches_the_target_the_best_at_the_end_is_named() -> None:
    assert advice(EXACT, FEDAVG, standing("diloco", curve(0.95)), target=0.99) == (
        "Use --algorithm diloco --local-learning-rate 0.1: its test accuracy of 0.95 after "
        "50 rounds is the best, though no algorithm reaches 0.99."
    )


def test_a_single_candidate_needs_no_comparison() -> None:
    assert advice(FEDAVG).endswith("in 2 rounds.")


def test_without_a_run_there_is_no_advice() -> None:
    budget = Budget(resource="rounds", amount=50)
    gone = standing("exact", num_diverged=3)
    assert advice_of([gone], target=0.9, budget=budget, metric="test_loss") is None
