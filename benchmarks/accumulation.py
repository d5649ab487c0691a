"""Seconds and peak memory of summing K micro-batches, against plain PyTorch and two libraries.

``headwater`` is ``train_round`` (``headwater.client.features``) as a device runs
it: a window is split, the vector set to zero, each micro-batch seeded, fetched, run forward and
backward, checked for NaN, timed and reported, and the result is an ``Update``. Its clock is the
machine's.

``bare`` is the shortest loop that PyTorch allows, over the same examples by the same fetch:
``model.train()``, ``zero_grad()``, and K times ``loss_sum(model, batch)[0].backward()``. It reads
no loss, checks nothing, seeds nothing. ``bare_reading`` is the same and reads each loss, its weight
and metrics, as a loop that reports anything must.

``accelerate`` (``accelerator.accumulate`` and ``accelerator.backward``) and ``fabric`` (Lightning's
``no_backward_sync`` and ``fabric.backward``) run the bare loop in their own way. They are left out
if they are not installed. Nobody steps an optimizer. torch has one thread. A ``time_ratio`` is one
of CPU seconds, as nobody waits for anything here; ``wall_ratio`` is the same by the wall's clock.

Memory is measured in a process for each loop and model: the peak since just before the model was
built (``VmHWM`` minus ``VmRSS``), so it holds model, gradients and activations, but no imports.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measure import (
    Figures,
    arguments,
    child,
    has_peer,
    memory_of,
    ratio,
    report,
    reset_peak,
    spread,
    take_turns,
)
from headwater.client.device.hardware import MonotonicClock
from headwater.client.features import train_round
from headwater.client.memory.peak_model import ProcessMemory
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import SamplerPosition, Window, split, window
from headwater.common.data.batches import batch_of
from headwater.common.messages import Plan
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.task import Examples, Task, load_task, loss_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and how its window is cut."""

    task: str
    micro_batch_size: int
    accumulation_steps: int
    turns: int


CASES = {
    "mlp": Case(
        task="examples/digits.py:Digits", micro_batch_size=16, accumulation_steps=8, turns=61
    ),
    "cnn": Case(
        task="benchmarks/tasks.py:Convolutions", micro_batch_size=8, accumulation_steps=4, turns=31
    ),
    "transformer": Case(
        task="benchmarks/tasks.py:Tokens", micro_batch_size=4, accumulation_steps=4, turns=15
    ),
}
LOOPS = ("bare", "bare_reading", "headwater", "accelerate", "fabric")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What a loop works on."""

    case: Case
    task: Task
    image: ModelImage
    examples: Examples
    window: Window

    def batches(self) -> list[tuple[int, ...]]:
        return split(self.window.positions, self.case.micro_batch_size)

    def context(self) -> TrainingContext:
        """Return what a device trains in, with a vector of its own."""
        return TrainingContext(
            task=self.task,
            image=self.image,
            accumulator=Accumulator(self.image),
            examples=self.examples,
            name="bench",
            clock=MonotonicClock(),
            memory=ProcessMemory(),
            should_stop=lambda: False,
        )


def bench_of(case: Case) -> Bench:
    task = load_task(case.task)
    examples = task.train_examples(data=None, part=0, num_parts=1)
    chosen = window(
        SamplerPosition(),
        quota=case.micro_batch_size * case.accumulation_steps,
        run_seed=0,
        name="bench",
        num_examples=len(examples),
    )
    return Bench(
        case=case, task=task, image=build_model(task, seed=0), examples=examples, window=chosen
    )


def bare(bench: Bench) -> Callable[[], None]:
    model = bench.image.model

    def loop() -> None:
        model.train()
        model.zero_grad()
        for positions in bench.batches():
            batch = batch_of(bench.task, bench.examples, positions)
            loss: Any = bench.task.loss_sum(model, batch)[0]
            loss.backward()

    return loop


def bare_reading(bench: Bench) -> Callable[[], None]:
    model = bench.image.model

    def loop() -> None:
        model.train()
        model.zero_grad()
        loss_total, weight_total, totals = 0.0, 0, {"": 0.0}
        for positions in bench.batches():
            batch = batch_of(bench.task, bench.examples, positions)
            loss, weight, metrics = loss_sum(bench.task, model, batch)
            loss_total += loss.item()
            weight_total += weight
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
            loss.backward()  # type: ignore[no-untyped-call]

    return loop


def headwater(bench: Bench) -> Callable[[], None]:
    case = bench.case
    plan = Plan(
        round=1,
        run_seed=0,
        model_version=0,
        quota=case.micro_batch_size * case.accumulation_steps,
        micro_batch_size=case.micro_batch_size,
    )
    place = bench.context()

    def loop() -> None:
        train_round(plan, bench.window, place)

    return loop


def accelerate(bench: Bench) -> Callable[[], None]:
    from accelerate import Accelerator

    num_steps = bench.case.accumulation_steps
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
    model = accelerator.prepare_model(bench.image.model)

    def loop() -> None:
        model.train()
        model.zero_grad()
        for positions in bench.batches():
            with accelerator.accumulate(model):
                batch = batch_of(bench.task, bench.examples, positions)
                accelerator.backward(bench.task.loss_sum(model, batch)[0])

    return loop


def fabric(bench: Bench) -> Callable[[], None]:
    from lightning.fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=1)
    lightning.launch()
    model = lightning.setup_module(bench.image.model)

    def loop() -> None:
        model.train()
        model.zero_grad()
        batches = bench.batches()
        for number, positions in enumerate(batches, start=1):
            with lightning.no_backward_sync(model, enabled=number < len(batches)):
                batch = batch_of(bench.task, bench.examples, positions)
                lightning.backward(bench.task.loss_sum(model, batch)[0])

    return loop


MAKERS = {
    "bare": bare,
    "bare_reading": bare_reading,
    "headwater": headwater,
    "accelerate": accelerate,
    "fabric": fabric,
}


def available() -> list[str]:
    return [n for n in LOOPS if n not in ("accelerate", "fabric") or has_peer(n)]


def times(case: Case, *, turns: int, seconds_each: float) -> Figures:
    """Let the loops take turns, each on a model of its own."""
    loops = {name: MAKERS[name](bench_of(case)) for name in available()}
    wall, cpu = take_turns(loops, turns=turns, seconds_each=seconds_each)
    num_steps = case.accumulation_steps
    figures: Figures = {"bare_seconds_per_micro_batch": statistics.median(cpu["bare"]) / num_steps}
    for name in loops:
        if name != "bare":
            figures[f"{name}_time_ratio"] = ratio(cpu[name], cpu["bare"])
            figures[f"{name}_time_quartiles"] = spread(cpu[name], cpu["bare"])
            figures[f"{name}_wall_ratio"] = ratio(wall[name], wall["bare"])
    figures["headwater_to_bare_reading_time_ratio"] = ratio(cpu["headwater"], cpu["bare_reading"])
    # Of the same turn, so a slow moment falls on both.
    extra = [a - b for a, b in zip(cpu["headwater"], cpu["bare"], strict=True)]
    figures["headwater_extra_seconds_per_micro_batch"] = statistics.median(extra) / num_steps
    return figures


def peak_bytes(case: Case, name: str, *, calls: int) -> int:
    """Return what the loop's process held at its peak beyond its imports; run alone in it."""
    load_task(case.task).train_examples(data=None, part=0, num_parts=1)
    reset_peak()
    before = memory_of()["VmRSS"]
    loop = MAKERS[name](bench_of(case))
    for _ in range(calls):
        loop()
    return memory_of()["VmHWM"] - before


def memory(case_name: str, names: Sequence[str], *, repeats: int, calls: int) -> Figures:
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, found in peaks.items():
            flags = ("--part", f"{case_name}/{name}/{calls}")
            found.append(child("benchmarks.accumulation", *flags)["peak_bytes"])
    figures: Figures = {"bare_peak_bytes": statistics.median(peaks["bare"])}
    for name, found in peaks.items():
        if name != "bare":
            pairs = zip(found, peaks["bare"], strict=True)
            figures[f"{name}_extra_peak_bytes"] = statistics.median(a - b for a, b in pairs)
    return figures


def main() -> None:
    flags = arguments(__doc__, part=())
    torch.set_num_threads(1)
    if flags.part:
        case_name, name, calls = flags.part.split("/")
        if name in ("accelerate", "fabric"):
            MAKERS[name](bench_of(CASES["mlp"]))  # its imports are not what is measured
        found = peak_bytes(CASES[case_name], name, calls=int(calls))
        print(f'{{"peak_bytes": {found}}}')
        return
    figures: Figures = {}
    for name, case in CASES.items():
        if flags.quick and name != "mlp":
            continue
        turns, seconds_each = (3, 0.01) if flags.quick else (case.turns, 0.25)
        figures[name] = times(case, turns=turns, seconds_each=seconds_each)
        names, repeats = (("bare", "headwater"), 1) if flags.quick else (available(), 5)
        figures[name] |= memory(name, names, repeats=repeats, calls=4)
    left_out = [name for name in ("accelerate", "fabric") if not has_peer(name)]
    figures["peers_not_installed"] = left_out
    figures["time_target"] = "headwater_time_ratio <= 1.02"
    figures["memory_target"] = "headwater_extra_peak_bytes <= 2e6"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
