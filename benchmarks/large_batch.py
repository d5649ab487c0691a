"""Time and memory of K micro-batches of one example, against one batch of K examples.

Both are the work of a device on a window of K examples (``train_round``): ``accumulated`` has
micro-batches of one example, ``one_batch`` a single micro-batch of K. The update is the same to
float32's rounding. The model is the decoder of ``benchmarks.large_models``.

The two take turns in one process. ``time_ratio`` is the median over the turns of the CPU seconds of
``accumulated`` over those of ``one_batch``, ``wall_ratio`` the same by the wall's clock. Each peak
is of a process of its own: VmHWM less VmRSS just before the model was built, so it holds model,
vector and activations, but no imports.

    python -m benchmarks.large_batch --sizes tiny 60M 125M --examples 4 8
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch

from benchmarks.accumulation import Case, bench_of
from benchmarks.large_models import SIZES, TASK
from benchmarks.measure import (
    Figures,
    argument_parser,
    child,
    memory_of,
    ratio,
    report,
    reset_peak,
    spread,
    take_turns,
)
from headwater.client.features import train_round
from headwater.common.messages import Plan
from headwater.common.system.heap import use_one_heap
from headwater.common.task import load_task

LOOPS = ("accumulated", "one_batch")


def loops_of(num_examples: int) -> dict[str, Callable[[], None]]:
    """Return both ways of summing a window of so many examples, on one model."""
    case = Case(task=TASK, micro_batch_size=1, accumulation_steps=num_examples, turns=0)
    bench = bench_of(case)
    context = bench.context()

    def loop_of(micro_batch_size: int) -> Callable[[], None]:
        plan = Plan(
            round=1,
            run_seed=0,
            model_version=0,
            quota=num_examples,
            micro_batch_size=micro_batch_size,
        )

        def loop() -> None:
            train_round(plan, bench.window, context)

        return loop

    return dict(zip(LOOPS, (loop_of(1), loop_of(num_examples)), strict=True))


def compare(size: str, num_examples: int, *, turns: int, threads: int) -> Figures:
    """Measure both ways by turns, then the peak of each in a process of its own."""
    os.environ["HEADWATER_BENCHMARK_DECODER"] = SIZES[size]  # the children inherit it
    wall, cpu = take_turns(loops_of(num_examples), turns=turns, seconds_each=0.0)
    accumulated, one_batch = LOOPS
    figures: Figures = {
        f"{name}_cpu_seconds_per_example": statistics.median(cpu[name]) / num_examples
        for name in LOOPS
    }
    figures["time_ratio"] = ratio(cpu[accumulated], cpu[one_batch])
    figures["time_quartiles"] = spread(cpu[accumulated], cpu[one_batch])
    figures["wall_ratio"] = ratio(wall[accumulated], wall[one_batch])
    for name in LOOPS:
        part = ("--part", f"{name}/{num_examples}", "--threads", str(threads))
        figures[f"{name}_peak_mb"] = child("benchmarks.large_batch", *part)["peak_bytes"] / 1e6
    return figures


def peak_bytes(name: str, num_examples: int) -> int:
    """Return what this process holds at its peak beyond its imports."""
    load_task(TASK).train_examples(data=None, part=0, num_parts=1)
    reset_peak()
    before = memory_of()["VmRSS"]
    loop = loops_of(num_examples)[name]
    for _ in range(2):
        loop()
    return memory_of()["VmHWM"] - before


def main() -> None:
    """Compare at each size and number of examples, and report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "60M"], choices=SIZES)
    parser.add_argument("--examples", nargs="+", type=int, default=[4, 8], help="K")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    use_one_heap()  # as a device does
    torch.set_num_threads(chosen.threads)
    if chosen.part:
        name, _, num_examples = chosen.part.partition("/")
        print(f'{{"peak_bytes": {peak_bytes(name, int(num_examples))}}}')
        return
    sizes, counts = (["tiny"], [2]) if chosen.quick else (chosen.sizes, chosen.examples)
    figures: Figures = {
        f"{size}.K_{count}": compare(size, count, turns=chosen.turns, threads=chosen.threads)
        for size in sizes
        for count in counts
    }
    report(figures, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
