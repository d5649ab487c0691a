"""Random events of simulated devices: availability, battery, jitter, and vanishing in mid-round.

Every draw is a pure function of the run's seed, the device's number, the round, and the look or
micro-batch within it; the simulating machine has no influence. So a run is repeatable, and a
resumed run draws what the uninterrupted run would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headwater.client.trainer.client_examples import MAX_OPEN_DATASETS
from headwater.client.training.sampler import Seeds, seed_of, splitmix64
from headwater.simulation.fleet.faults import SECURE_STAGES, TRAIN, first_stage, unanswered_stage
from headwater.simulation.fleet.fleet_spec import FleetSpec

# The number of seeds that ``seed_of`` may return, all equally likely.
NUM_SEEDS = 2.0**63
# A float holds 53 of a random number's 64 bits; the lower 11 are dropped.
DROPPED_BITS, NUM_DRAWS = 11, 2.0**53

Floats = NDArray[np.float64]

# The round of the hardware that Flower's ClientApp builds. The app does not know it; the grid does.
_round: ContextVar[int] = ContextVar("round", default=1)


@contextmanager
def at_round(number: int) -> Iterator[None]:
    """Let hardware that is built in this context be that of round ``number``."""
    token = _round.set(number)
    try:
        yield
    finally:
        _round.reset(token)


def round_now() -> int:
    """Return the round that ``at_round`` has set; 1 without it."""
    return _round.get()


def is_connected(fleet: FleetSpec, part: int, *, round_number: int, look: int) -> bool:
    """Return whether a device is connected at the n-th look for a round's cohort, from 0.

    A server that finds too few devices looks again: a new draw, with the next entry of the trace.
    """
    share = fleet.device(part).availability.at(round_number - 1 + look)
    return _happens(share, "availability", fleet.seed, part, round_number, look)


def is_on_battery(fleet: FleetSpec, part: int, *, round_number: int) -> bool:
    """Return whether a device runs on its battery in a round."""
    share = fleet.device(part).on_battery
    if share == 0:
        return False
    draw: int = splitmix64(battery_seed(fleet.seed, part), round_number) >> DROPPED_BITS
    return draw < share * NUM_DRAWS


def are_on_battery(seeds_D: Seeds, shares_D: Floats, *, round_number: int) -> NDArray[np.bool_]:
    """Return ``is_on_battery`` of many devices, by their ``battery_seed`` and ``on_battery``."""
    draws_D = splitmix64(seeds_D, np.array([round_number], dtype=np.uint64)) >> DROPPED_BITS
    flags_D: NDArray[np.bool_] = draws_D < shares_D * NUM_DRAWS
    return flags_D


@lru_cache(maxsize=MAX_OPEN_DATASETS)
def battery_seed(run_seed: int, part: int) -> int:
    """Return the seed of a device's ``is_on_battery`` in all rounds."""
    return seed_of("battery", run_seed, part)


def may_vanish(fleet: FleetSpec) -> bool:
    """Return whether any device may ever vanish in the middle of a round."""
    return fleet.dropout > 0 or bool(fleet.faults.dropout)


def vanishes_at(fleet: FleetSpec, part: int, *, round_number: int, attempt: int) -> str | None:
    """Return the first message that an invited device leaves unanswered in a round; None if none.

    It vanishes at random (``simulation.dropout``) or by a fault, at the earlier of the two.
    """
    at_random = _vanishes_at_random(fleet, part, round_number, attempt)
    moment = fleet.moment(part, round_number=round_number)
    by_fault = unanswered_stage(fleet.faults, moment, attempt=attempt)
    return first_stage([stage for stage in (at_random, by_fault) if stage is not None])


def _vanishes_at_random(fleet: FleetSpec, part: int, round_number: int, attempt: int) -> str | None:
    """Draw whether a device vanishes, at a stage drawn from training and the secure phases.

    The secure phases count if updates are masked. A repeated round is another draw.
    """
    if not _happens(fleet.dropout, "dropout", fleet.seed, part, round_number, attempt):
        return None
    stages = [TRAIN, *SECURE_STAGES] if fleet.is_masked else [TRAIN]
    seed = seed_of("vanishes", fleet.seed, part, round_number, attempt)
    return stages[np.random.default_rng(seed).integers(len(stages))]


def jitter_seed(fleet: FleetSpec, part: int, *, round_number: int) -> int:
    """Return the seed of a device's jitter in a round."""
    return seed_of("jitter", fleet.seed, part, round_number)


def _happens(probability: float, *seed_parts: object) -> bool:
    return probability == 1 or (probability > 0 and seed_of(*seed_parts) < probability * NUM_SEEDS)


class Jitter:
    """Random factors of the seconds of micro-batches: lognormal with mean 1.

    exp(s z - s^2 / 2) with z normal; the n-th factor depends only on the seed and n.
    """

    def __init__(self, relative: float, seed: int) -> None:
        self._relative = relative
        self._generator = np.random.default_rng(seed) if relative else None

    def next_factor(self) -> float:
        """Return the factor of the next micro-batch; exactly 1 without jitter."""
        if self._generator is None:
            return 1.0
        normal = float(self._generator.standard_normal())
        return math.exp(self._relative * normal - self._relative**2 / 2)
