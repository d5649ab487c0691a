"""Rounds to an accuracy where each device has one label: SCAFFOLD and client momentum by FedAvg.

Twenty equal devices have the bundled digits, one label each. All take the same local steps of plain
SGD, ten of 16 examples in a round; the server adds the moves. All devices are in each round, or 5.
Each algorithm's local rate is the one of ``RATES`` that needs the fewest rounds to 0.9 with a seed
that is not counted; then come three seeds. Figures are the rounds to each accuracy of the three
seeds, in order, and the median of the last accuracies; ``never`` stands for more than the rounds of
a run. SCAFFOLD sends twice the bytes of a round, each way.
"""

from __future__ import annotations

import math
import statistics

import headwater
from benchmarks.measure import Figures, arguments, report

ALGORITHMS = ("fedavg", "scaffold", "client-momentum")
RATES, SEEDS, SEARCH_SEED = (0.03, 0.1, 0.3), (0, 1, 2), 3
ACCURACIES = (0.8, 0.9, 0.95)
ROUNDS = {20: 60, 5: 150}


def train(algorithm: str, cohort: int, rate: float, seed: int) -> headwater.Run:
    return headwater.simulate(
        "examples/digits.py:Digits",
        clients=20,
        cohort_size=None if cohort == 20 else cohort,
        rounds=ROUNDS[cohort],
        partition="labels:1",
        fleet="equal",
        algorithm=algorithm,
        local_steps=10,
        local_learning_rate=rate,
        seed=seed,
        threads=1,
        progress=False,
        settings={"check_task": False},
    )


def rounds_to(run: headwater.Run, accuracy: float) -> float:
    """Return the first round whose model reaches an accuracy on the test's digits."""
    reached = (row.round for row in run.history if row.metrics["test_accuracy"] >= accuracy)
    return next(reached, math.inf)


def measured(algorithm: str, cohort: int, *, quick: bool) -> Figures:
    """Return the figures of one algorithm."""
    searched = {
        rate: train(algorithm, cohort, rate, SEARCH_SEED) for rate in RATES[:: 2 if quick else 1]
    }
    scores = {
        rate: (rounds_to(run, 0.9), -run.metrics["test_accuracy"]) for rate, run in searched.items()
    }
    rate = min(scores, key=lambda one: scores[one])
    runs = [train(algorithm, cohort, rate, seed) for seed in SEEDS[: 1 if quick else None]]
    figures: Figures = {"rate": rate}
    for accuracy in ACCURACIES:
        rounds = sorted(rounds_to(run, accuracy) for run in runs)
        words = ("never" if math.isinf(one) else str(one) for one in rounds)
        figures[f"rounds to {accuracy}"] = " ".join(words)
    figures["last accuracy"] = statistics.median(run.metrics["test_accuracy"] for run in runs)
    return figures


def main() -> None:
    given = arguments(__doc__)
    figures = {
        f"{cohort} of 20 devices": {
            algorithm: measured(algorithm, cohort, quick=given.quick) for algorithm in ALGORITHMS
        }
        for cohort in ((20,) if given.quick else ROUNDS)
    }
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
