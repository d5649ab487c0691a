"""What chance decides of a simulated device: who is there, who is on battery, who is held up.

Every draw is a pure function of the run's seed, the device's number, the round, and the look or the
micro-batch within it; the machine that simulates has no part in any. So a run can be repeated, and
one that is taken up again draws what the unbroken run would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headwater.client.training.micro_batches import Seeds, drawn, seed_of
from headwater.client.training.trainer import HELD
from headwater.common.settings.schema import Settings
from headwater.simulation.fleet import faults
from headwater.simulation.fleet.faults import SECURE_STAGES, TRAIN
from headwater.simulation.fleet.profiles import device_of, faults_of, moment_of

# ``seed_of`` gives as many, each as likely as another.
SEEDS = 2.0**63
# Of numbers of 64 bits those below are dropped that a float cannot hold.
DROPPED, DRAWS = 11, 2.0**53

Floats = NDArray[np.float64]

# Flower's ClientApp makes a device's hardware without a word of the round; the grid knows it.
_round: ContextVar[int] = ContextVar("round", default=1)


@contextmanager
def at_round(number: int) -> Iterator[None]:
    """Let the hardware that is made here be that of this round."""
    token = _round.set(number)
    try:
        yield
    finally:
        _round.reset(token)


def round_now() -> int:
    """Return the round that is set by ``at_round``; 1 if none is."""
    return _round.get()


def is_there(settings: Settings, part: int, *, round_number: int, look: int) -> bool:
    """Say whether a device is there when the round's cohort is chosen, at the n-th look from 0.

    A server that finds too few looks again: the draw is made anew, one entry further in the trace.
    """
    share = device_of(settings, part).availability.at(round_number - 1 + look)
    return _happens(share, "availability", settings.seed, part, round_number, look)


def is_on_battery(settings: Settings, part: int, *, round_number: int) -> bool:
    """Say whether a device has no mains in a round."""
    share = device_of(settings, part).on_battery
    return share > 0 and (
        drawn(battery_seed(settings.seed, part), round_number) >> DROPPED < share * DRAWS
    )


def are_on_battery(seeds_D: Seeds, shares_D: Floats, *, round_number: int) -> NDArray[np.bool_]:
    """Say of many devices what ``is_on_battery`` says of one; by their ``battery_seed``."""
    numbers_D = drawn(seeds_D, np.array([round_number], dtype=np.uint64)) >> DROPPED
    found: NDArray[np.bool_] = numbers_D < shares_D * DRAWS
    return found


@lru_cache(maxsize=HELD)
def battery_seed(run_seed: int, part: int) -> int:
    """Return the seed of all that decides when a device is on battery."""
    return seed_of("battery", run_seed, part)


def may_vanish(settings: Settings) -> bool:
    """Say whether a device may ever vanish in the middle of a round."""
    return settings.simulation.dropout > 0 or bool(faults_of(settings).dropout)


def vanishes_at(settings: Settings, part: int, *, round_number: int, attempt: int) -> str | None:
    """Return the message that an invited device does not answer any more in a round, if any.

    It vanishes by chance (``simulation.dropout``) or by the faults' file, whichever comes first.
    """
    at_random = _vanishes_at_random(settings, part, round_number, attempt)
    moment = moment_of(settings, part, round_number=round_number)
    by_file = faults.vanishes(faults_of(settings), moment, attempt=attempt)
    return faults.first_stage([stage for stage in (at_random, by_file) if stage is not None])


def _vanishes_at_random(
    settings: Settings, part: int, round_number: int, attempt: int
) -> str | None:
    """Draw whether a device vanishes, at a point drawn evenly from training and secure phases.

    The phases count if updates are masked. A round that is tried again is drawn anew.
    """
    share = settings.simulation.dropout
    if not _happens(share, "dropout", settings.seed, part, round_number, attempt):
        return None
    stages = [TRAIN]
    if settings.secure.aggregation != "off":
        stages += SECURE_STAGES
    seed = seed_of("vanishes", settings.seed, part, round_number, attempt)
    return stages[np.random.default_rng(seed).integers(len(stages))]


def jitter_seed(settings: Settings, part: int, *, round_number: int) -> int:
    """Return the seed of a device's jitter in a round."""
    return seed_of("jitter", settings.seed, part, round_number)


def _happens(share: float, *parts: object) -> bool:
    return share == 1 or (share > 0 and seed_of(*parts) < share * SEEDS)


class Jitter:
    """Factors by which micro-batches take longer or shorter: lognormal, of mean 1.

    exp(s z - s^2 / 2) with z normal; the n-th factor depends on the seed and n alone.
    """

    def __init__(self, relative: float, seed: int) -> None:
        self._relative = relative
        self._generator = np.random.default_rng(seed) if relative else None

    def next_factor(self) -> float:
        """Return the factor of the next micro-batch; exactly 1 where there is no jitter."""
        if self._generator is None:
            return 1.0
        normal = float(self._generator.standard_normal())
        return math.exp(self._relative * normal - self._relative**2 / 2)
