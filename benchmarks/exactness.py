"""How far off the step's gradient is, by who divides: once at the end, or each micro-batch.

A window of micro-batches of 32, 32, 32 and 5 examples (K = 4) is summed by
``client.features.train_round`` and divided once by its weight, as our server
does;
``mean of means`` divides each micro-batch's loss by its own size and by K, as accelerate and most
training loops do (accelerate itself runs too, if it is installed). Both are compared with the
gradient of the 101 examples in one batch: the error is the length of the difference over the length
of that gradient.

``fedavg``: two clients, with windows of 32, 32, 32, 5 and of 32, 32, weighed by Flower's own
``aggregate`` with their numbers of examples. FedAvg itself is exact where a client sends the
mean over its examples in one batch; it is off where the client accumulated a mean of means.

The medians are over windows of the digits' walk, at the model's start and after some training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.accumulation import Bench, Case, bench_of
from benchmarks.measure import Figures, arguments, has_peer, report
from headwater.client.features import train_round
from headwater.client.training.sampler import ExampleOrder, SamplerPosition, Window, split, window
from headwater.common.data.batches import batch_of
from headwater.common.messages import Plan

SIZE = 32
RAGGED, EVEN = 3 * SIZE + 5, 2 * SIZE
NUM_TRAINING_STEPS = 30


def flat_gradient(bench: Bench) -> Tensor:
    """Return the gradients of the model as one vector [P]."""
    grads = [p.grad.flatten() for p in bench.image.trainable() if p.grad is not None]
    return torch.cat(grads).double()


def single_batch(bench: Bench, positions: Sequence[int]) -> Tensor:
    """Return the mean gradient of all positions in one batch."""
    bench.image.model.zero_grad()
    batch = batch_of(bench.task, bench.examples, positions)
    loss: Any = bench.task.loss_sum(bench.image.model, batch)[0]
    (loss / len(positions)).backward()
    return flat_gradient(bench)


def mean_of_means(bench: Bench, positions: Sequence[int]) -> Tensor:
    """Divide each micro-batch by its size and by K."""
    bench.image.model.zero_grad()
    parts = split(positions, SIZE)
    for part in parts:
        batch = batch_of(bench.task, bench.examples, part)
        loss: Any = bench.task.loss_sum(bench.image.model, batch)[0]
        (loss / len(part) / len(parts)).backward()
    return flat_gradient(bench)


def accelerates(bench: Bench, positions: Sequence[int]) -> Tensor:
    """Let accelerate divide by K what the loop divided by the micro-batch's size."""
    from accelerate import Accelerator

    parts = split(positions, SIZE)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(parts))
    model = accelerator.prepare_model(bench.image.model)
    model.zero_grad()
    for part in parts:
        with accelerator.accumulate(model):
            loss: Any = bench.task.loss_sum(model, batch_of(bench.task, bench.examples, part))[0]
            accelerator.backward(loss / len(part))
    return flat_gradient(bench)


def ours(bench: Bench, positions: Sequence[int]) -> Tensor:
    """Sum the window as a device does and divide once, as the server does."""
    plan = Plan(round=1, run_seed=0, model_version=0, quota=RAGGED, micro_batch_size=SIZE)
    place = bench.context()
    order = ExampleOrder(0, "bench", len(bench.examples))
    chosen = Window(positions=tuple(positions), place=SamplerPosition(), order=order)
    update = train_round(plan, chosen, place)
    return update.values_P.double() / update.report.weight


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def fedavg(mean: Callable[[Bench, Sequence[int]], Tensor], bench: Bench, positions: Any) -> float:
    """Return the error of two clients' means, weighed by examples by Flower's own FedAvg."""
    from flwr.server.strategy.aggregate import aggregate

    first, second = positions[:RAGGED], positions[RAGGED:]
    results = [([mean(bench, part).numpy()], len(part)) for part in (first, second)]
    (averaged,) = aggregate(results)
    return error(torch.from_numpy(averaged), single_batch(bench, positions))


def errors(bench: Bench, offsets: Sequence[int]) -> Figures:
    """Measure every way on the windows at the given offsets; medians, and the extremes."""
    found: dict[str, list[float]] = {}
    for offset in offsets:
        whole = window(
            SamplerPosition(offset=offset),
            quota=RAGGED + EVEN,
            run_seed=0,
            name="bench",
            num_examples=len(bench.examples),
        ).positions
        positions = whole[:RAGGED]
        expected = single_batch(bench, positions)
        row = {
            "ours": error(ours(bench, positions), expected),
            "mean_of_means": error(mean_of_means(bench, positions), expected),
            "fedavg_of_mean_of_means": fedavg(mean_of_means, bench, whole),
            "fedavg_of_single_batches": fedavg(single_batch, bench, whole),
        }
        if has_peer("accelerate"):
            row["accelerate"] = error(accelerates(bench, positions), expected)
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    figures: Figures = {}
    for name, values in found.items():
        figures[f"{name}_error"] = statistics.median(values)
        figures[f"{name}_error_range"] = [min(values), max(values)]
    return figures


def take_steps(bench: Bench) -> None:
    """Train on batches of 32 by plain SGD."""
    optimizer = torch.optim.SGD(bench.image.trainable(), lr=0.1)
    for step in range(NUM_TRAINING_STEPS):
        positions = range(step * SIZE, (step + 1) * SIZE)
        batch = batch_of(bench.task, bench.examples, list(positions))
        optimizer.zero_grad()
        loss: Any = bench.task.loss_sum(bench.image.model, batch)[0]
        (loss / SIZE).backward()
        optimizer.step()


def main() -> None:
    flags = arguments(__doc__)
    torch.set_num_threads(1)
    case = Case(
        task="examples/digits.py:Digits", micro_batch_size=SIZE, accumulation_steps=4, turns=1
    )
    bench = bench_of(case)
    offsets = range(0, len(bench.examples) - RAGGED - EVEN, 400 if flags.quick else 10)
    figures: Figures = {"num_windows": len(offsets), "at_start": errors(bench, offsets)}
    take_steps(bench)
    figures[f"after_{NUM_TRAINING_STEPS}_steps"] = errors(bench, offsets)
    figures["peers_not_installed"] = [] if has_peer("accelerate") else ["accelerate"]
    figures["target"] = "ours_error is float32 rounding (below 1e-6)"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
