"""Accuracy against epsilon: noise of the server, of the devices under masks, and bare PyTorch.

Digits over simulated devices, each a device's whole part (device-level privacy). All ways take the
same rounds, cohorts (everybody), examples per device, clip norm, delta and server optimizer:

* ``central``: plain rounds, the server adds the noise.
* ``distributed``: masked rounds, each device adds its share. Calibrated for 0.7 survivors of which
  0.1 collude; nobody drops out, so there is more noise than asked for, which the accountant counts.
* ``bare``: no code of ours but the task and the noise multiplier: each device's mean gradient is
  clipped, summed, and ``torch.normal`` noise of the multiplier is added (DP-FedSGD; as Opacus does
  with an example in a device's place).

Each accuracy is that of the test after the last round, the median of SEEDS. ``seconds_ratio`` is
the median of the ratios of masked rounds with and without noise, by turns. ``--part`` runs one of
the three parts: 100 devices, 1,000 devices (without masks), the time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Figures, arguments, report
from headwater.common.settings.sources import load
from headwater.common.task import load_task
from headwater.server.privacy.accountant import largest_rho, multiplier_of_rest
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

TASK = "examples/digits.py:Digits"
EPSILONS: tuple[float | None, ...] = (None, 8.0, 4.0, 2.0, 1.0)
DELTA, CLIP, RATE = 1e-5, 0.5, 0.005
STEPS, SIZE = 2, 8
SEEDS = (0,)
PARTS: dict[str, tuple[str, ...]] = {
    "100": ("central", "distributed", "bare"),
    "1000": ("central", "bare"),
    "time": (),
}


def ours(
    number: int, rounds: int, epsilon: float | None, *, seed: int, is_masked: bool
) -> list[RoundRow]:
    """Return the rows of a run of the whole system."""
    rows: list[RoundRow] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = load(
            None,
            {
                "task": TASK,
                "seed": seed,
                "rounds": rounds,
                "out": Path(folder) / "out",
                "simulation.clients": number,
                "plan.accumulation_steps": STEPS,
                "plan.micro_batch_size": SIZE,
                "optimizer.learning_rate": RATE,
                "evaluation.every_rounds": rounds,
                "secure.aggregation": "semi-honest" if is_masked else "off",
                "check_task": False,
                **({} if epsilon is None else {"privacy.epsilon": epsilon, "privacy.clip": CLIP}),
            },
        )
        run_engine(settings, on_round=rows.append, resume=False)
    return rows


def bare(number: int, rounds: int, epsilon: float | None, *, seed: int) -> float:
    """Return the test accuracy of clipped device gradients with Gaussian noise, in bare PyTorch."""
    task: Any = load_task(TASK)
    torch.manual_seed(seed)
    model = task.new_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    data = [
        task.train_examples(data=None, part=part, num_parts=number).tensors
        for part in range(number)
    ]
    z = 0.0
    if epsilon is not None:
        z = multiplier_of_rest(largest_rho(epsilon, delta=DELTA), [], rounds=rounds)
    for _ in range(rounds):
        total = [torch.zeros_like(p) for p in parameters]
        for images, labels in data:
            if not len(labels):
                continue
            chosen = torch.randint(len(labels), (STEPS * SIZE,))
            loss, weight, *_ = task.loss_sum(model, (images[chosen], labels[chosen]))
            gradients = torch.autograd.grad(loss / weight, parameters)
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            factor = 1.0 if epsilon is None else min(1.0, CLIP / float(norm))
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_.add_(gradient, alpha=factor)
        for p, sum_ in zip(parameters, total, strict=True):
            noise = torch.normal(0.0, z * CLIP, p.shape) if z else torch.zeros(p.shape)
            p.grad = (sum_ + noise) / number
        optimizer.step()
    images, labels = task.test_examples().tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def accuracy(
    way: str, number: int, rounds: int, epsilon: float | None, seeds: tuple[int, ...]
) -> float:
    """Return the median accuracy over the seeds."""
    found = []
    for seed in seeds:
        if way == "bare":
            found.append(bare(number, rounds, epsilon, seed=seed))
        else:
            rows = ours(number, rounds, epsilon, seed=seed, is_masked=way == "distributed")
            found.append(rows[-1].metrics["test_accuracy"])
    return statistics.median(found)


def seconds_ratio(number: int, rounds: int, turns: int) -> float:
    """Return the time of masked rounds with noise over those without."""
    ratios = []
    for turn in range(turns):
        seconds = {}
        for epsilon in (None, 8.0) if turn % 2 else (8.0, None):
            rows = ours(number, rounds, epsilon, seed=0, is_masked=True)
            seconds[epsilon] = statistics.median(row.seconds for row in rows)
        ratios.append(seconds[8.0] / seconds[None])
    return statistics.median(ratios)


def main() -> None:
    given = arguments(__doc__, part=tuple(PARTS))
    figures: Figures = {}
    start = time.perf_counter()
    number_of_time = 10 if given.quick else 100
    for part in (given.part,) if given.part else tuple(PARTS):
        if part == "time":
            figures["seconds_ratio"] = seconds_ratio(number_of_time, 4, 1 if given.quick else 5)
            continue
        number = 10 if given.quick else int(part)
        for epsilon in (None, 8.0) if given.quick else EPSILONS:
            name = "none" if epsilon is None else f"{epsilon:g}"
            rounds, seeds = (3, SEEDS[:1]) if given.quick else (30, SEEDS)
            figures[f"devices_{part}.epsilon_{name}"] = {
                way: round(accuracy(way, number, rounds, epsilon, seeds), 4) for way in PARTS[part]
            }
    figures["minutes"] = (time.perf_counter() - start) / 60
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
