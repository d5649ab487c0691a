"""Correlated against independent noise at the same epsilon: prefix sums, and accuracy.

Digits over simulated devices that take part in turns, device-level privacy, noise by the server.
Both ways have the same devices, cohort size, rounds, clip norm, delta, seed, plain SGD and noise
multiplier z, so that each round costs a device that is in it the same; ``independent`` draws its
cohorts in seeded laps. (What a run shows for independent noise counts all rounds.)
``prefix_error_ratio`` is the error of the sums of all rounds so far (root of the mean
square over rounds and coordinates) of independent noise over that of banded noise, drawn by the
server's own code; ``accuracy`` that of the test after the last round, the median of the seeds;
``noise_seconds`` the drawing of one round's noise for a million parameters.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import Figures, arguments, report
from headwater.common.privacy.discrete_gaussian import RandomBits, draw
from headwater.common.privacy.noise_shares import plain_scale_bits, plain_sigma
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.settings.sources import load
from headwater.server.privacy.banded_noise import BandedNoise
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

TASK = "examples/digits.py:Digits"
CLIP, RATE, STEPS, SIZE = 0.5, 1.0, 2, 8
TERMS = PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0)


def prefix_errors(bands: int, rounds: int, num_values: int) -> tuple[float, float]:
    """Return the prefix sums' error of independent and of banded noise, in clip norms."""
    banded = BandedNoise(
        bands, multiplier=1.0, most=None, num_values=num_values, folder=None, random=os.urandom
    )
    steps = banded.scale_bits(TERMS)
    one = np.array([banded.next([f"d{at}"])(num_values) for at in range(rounds)])
    bits = plain_scale_bits(TERMS)
    sigma = plain_sigma(TERMS, scale_bits=bits, num_values=num_values)
    other = draw(sigma, rounds * num_values, RandomBits()).reshape(rounds, num_values)
    return _error(other) * 2.0**-bits, _error(one) * 2.0**-steps


def _error(noise: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    return math.sqrt(float((np.cumsum(noise, axis=0, dtype=np.float64) ** 2).mean()))


def noise_seconds(bands: int, num_values: int) -> float:
    """Return the seconds of one round's noise, once all bands are in use."""
    banded = BandedNoise(
        bands, multiplier=1.0, most=None, num_values=num_values, folder=None, random=os.urandom
    )
    banded.scale_bits(TERMS)
    seconds = []
    for at in range(bands + 2):
        start = time.perf_counter()
        banded.next([f"d{at}"])
        seconds.append(time.perf_counter() - start)
    return seconds[-1]


def accuracy(z: float, bands: int, number: int, cohort: int, rounds: int, seed: int) -> float:
    """Return the accuracy after a run with this noise; z = 0: without noise."""
    rows: list[RoundRow] = []
    privacy = {"privacy.noise_multiplier": z, "privacy.clip": CLIP, "privacy.bands": bands}
    with tempfile.TemporaryDirectory() as folder:
        settings = load(
            None,
            {
                "task": TASK,
                "seed": seed,
                "rounds": rounds,
                "out": Path(folder) / "out",
                "simulation.clients": number,
                "cohort.size": cohort,
                "plan.accumulation_steps": STEPS,
                "plan.micro_batch_size": SIZE,
                "optimizer.name": "sgd",
                "optimizer.learning_rate": RATE,
                "evaluation.every_rounds": rounds,
                "check_task": False,
                **(privacy if z else {}),
            },
        )
        run_engine(settings, on_round=rows.append, resume=False)
    return rows[-1].metrics["test_accuracy"]


def main() -> None:
    given = arguments(__doc__)
    number, cohort, rounds, seeds = (12, 3, 4, (0,)) if given.quick else (128, 8, 64, (0,))
    bands = number // cohort
    figures: Figures = {"devices": number, "cohort": cohort, "rounds": rounds, "bands": bands}
    independent, banded = prefix_errors(bands, rounds, 1_000 if given.quick else 5_000)
    figures["prefix_error_ratio"] = independent / banded
    size = 10_000 if given.quick else 1_000_000
    figures["noise_seconds"] = {
        name: noise_seconds(b, size) for name, b in (("bands_2", 2), (f"bands_{bands}", bands))
    }
    for z in (1.0,) if given.quick else (0.0, 0.5, 1.0, 2.0):
        found = {
            name: statistics.median(accuracy(z, b, number, cohort, rounds, seed) for seed in seeds)
            for name, b in ((("independent", 1), ("banded", bands)) if z else (("no noise", 1),))
        }
        figures[f"z_{z:g}"] = {name: round(value, 4) for name, value in found.items()}
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
