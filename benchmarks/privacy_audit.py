"""An audit of differential privacy: what an attacker really learns, beside the epsilon promised.

Each device is a canary: with a coin it sends a vector of its own, of the norm that the clip allows,
or zeros, which is the difference that the promise is about (docs/privacy.md). With
``--privacy-unit example`` each example of each device is such a canary. The attacker knows all
vectors and the trained model, and guesses the coins: of those canaries whose vectors fit the
model's change best that they took part, of those that fit it least that they did not. From the
number of right guesses follows, with 95 % confidence, a lower bound of epsilon: Steinke, Nasr and
Jagielski, "Privacy Auditing with One (1) Training Run" (2023), theorem 5.2.

The runs go through the simulator's real path, in plain rounds and under masks. A lower bound above
the promised epsilon would show a fault. The last line is a run without noise, to show that the
audit finds one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater
from benchmarks.measure import Figures, arguments, report

Mode = Literal["off", "semi-honest"]
Unit = Literal["device", "example"]

COORDINATES, SEED = 50_000, 3
EXAMPLES = 8
"""On each device, as masked plans have at least so many; equal ones if the device is a canary."""
GUESSED = 0.1
"""The part of the canaries guessed to have taken part, and the part guessed not to have."""
CONFIDENCE = 0.95
DELTA = 1e-5
UNITS: tuple[Unit, ...] = ("device", "example")


class Canaries:
    """Canaries of one vector each; ``coins`` says which of them are there, and not zeros."""

    def __init__(self, num_canaries: int, unit: Unit) -> None:
        random = np.random.default_rng(SEED)
        signs = random.choice([-1.0, 1.0], size=(num_canaries, COORDINATES))
        self.vectors = torch.from_numpy((signs / math.sqrt(COORDINATES)).astype(np.float32))
        self.coins = torch.from_numpy(random.random(num_canaries) < 0.5)
        self._each = EXAMPLES if unit == "example" else 1

    @property
    def num_devices(self) -> int:
        return len(self.coins) // self._each

    def new_model(self) -> nn.Module:
        model = nn.Linear(COORDINATES, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        own = slice(part * self._each, (part + 1) * self._each)
        vectors = self.vectors[own] * self.coins[own, None]
        return TensorDataset(vectors.repeat(EXAMPLES // self._each, 1))

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        """Return a loss whose gradient is the sum of the vectors."""
        return model(batch[0]).sum(), len(batch[0])


def main() -> None:
    """Audit each mode and report."""
    chosen = arguments(__doc__)
    num_canaries, num_masked = (80, 80) if chosen.quick else (2_000, 320)
    multipliers = (1.0,) if chosen.quick else (0.5, 1.0)
    modes: tuple[tuple[Mode, Unit, int], ...] = (
        ("off", "device", num_canaries),
        ("semi-honest", "device", num_masked),
        ("off", "example", num_canaries),
        ("semi-honest", "example", num_masked),
    )
    figures: Figures = {
        f"{mode}, {unit}, z = {multiplier:g}": audit(number, mode, unit, multiplier=multiplier)
        for mode, unit, number in modes
        for multiplier in multipliers
    }
    for unit in UNITS:
        name = f"off, {unit}, without noise"
        figures[name] = audit(num_canaries, "off", unit, multiplier=None)
    report(figures, as_json=chosen.json, doc=__doc__)


def audit(num_canaries: int, mode: Mode, unit: Unit, *, multiplier: float | None) -> Figures:
    """Train for one round, guess the coins, and return both epsilons."""
    task = Canaries(num_canaries, unit)
    noise = {"privacy.noise_multiplier": multiplier, "privacy.delta": DELTA, "privacy.unit": unit}
    run = headwater.simulate(
        task,
        clients=task.num_devices,
        rounds=1,
        optimizer="sgd",
        learning_rate=1.0,
        accumulation_steps=1,
        micro_batch_size=EXAMPLES,
        secure_aggregation=mode,
        threads=1,
        settings=noise if multiplier is not None else {},
    )
    change = -next(run.model.parameters()).detach().reshape(-1)
    num_correct, num_guesses = guess(task.vectors @ change, task.coins)
    found = epsilon_shown(num_canaries, num_guesses=num_guesses, num_correct=num_correct)
    promised = run.history[-1].epsilon
    return {
        "canaries": num_canaries,
        "right_guesses": num_correct,
        "guesses": num_guesses,
        "epsilon_shown": found,
        "epsilon_promised": promised,
    }


def guess(scores: Tensor, coins: Tensor) -> tuple[int, int]:
    """Return how many of the surest guesses are right, and their number."""
    number = max(1, int(GUESSED * len(scores)))
    order = scores.argsort()
    right = (~coins[order[:number]]).sum() + coins[order[-number:]].sum()
    return int(right), 2 * number


def epsilon_shown(num_canaries: int, *, num_guesses: int, num_correct: int) -> float:
    """Return the largest epsilon that so many right guesses refute; 0 if they refute none."""
    low, high = 0.0, 50.0
    if probability(0.0, num_canaries, num_guesses, num_correct) > 1 - CONFIDENCE:
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        is_refuted = probability(middle, num_canaries, num_guesses, num_correct) <= 1 - CONFIDENCE
        low, high = (middle, high) if is_refuted else (low, middle)
    return low


def probability(epsilon: float, num_canaries: int, num_guesses: int, num_correct: int) -> float:
    """Return a bound on the probability of so many right guesses under (epsilon, DELTA)-DP.

    With delta = 0 each guess is right with a probability of at most e^epsilon / (1 + e^epsilon),
    whatever the others are, so the number is below a binomial one. delta moves probability from
    results up to i below to this one, at most 2 x canaries x delta / i of it.
    """
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(num_correct - 1, num_guesses, chance))
    below = binom.pmf(np.arange(num_correct - 1, -1, -1), num_guesses, chance)
    within: NDArray[np.float64] = np.cumsum(below) / np.arange(1, num_correct + 1)
    moved = 2 * num_canaries * DELTA * float(within.max(initial=0.0))
    return min(tail + moved, 1.0)


if __name__ == "__main__":
    main()
