"""Seconds and memory of a partition: a thousand devices of a million, and a thousand of all.

60,000 examples, ten labels and 6,000 authors. ``drawn``: a population of 1,000,000 devices with 20
examples each, of which every thousandth is asked for what it has. ``dealt``: all examples dealt out
to 1,000 devices, and each asked. Seconds are the process' own, of one CPU; the median of five.
``peak_mb`` is what numpy and Python allocate meanwhile, the labels' array included.

With flwr-datasets installed, its partitioners deal the same out to 1,000 devices, and each is asked
for the length of what it has. (They know no population that shares examples.)
"""

from __future__ import annotations

import importlib.util
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import Figures, arguments, report
from headwater.common.data.partition import Column, partition_examples
from headwater.common.data.partition_spec import parse_rule

NUM_LABELS, NUM_AUTHORS, NUM_DEALT = 10, 6000, 1000
POPULATION, EXAMPLES_EACH = 1_000_000, 20
SEED = 0


def columns(num_examples: int) -> dict[str | None, Column | None]:
    """Return labels at random, and authors of as many examples each."""
    generator = np.random.default_rng(SEED)
    found = {
        "label": generator.integers(NUM_LABELS, size=num_examples),
        "author": np.arange(num_examples) % NUM_AUTHORS,
    }
    return {None: None} | {
        name: Column(codes_E=codes, values_V=np.arange(codes.max() + 1))
        for name, codes in found.items()
    }


def drawn(kind: str, by_name: dict[str | None, Column | None], num_examples: int) -> None:
    rule = parse_rule(kind, examples_per_device=EXAMPLES_EACH, seed=SEED)
    assert rule is not None
    dealing = partition_examples(
        rule, by_name[rule.column], num_examples=num_examples, num_devices=POPULATION
    )
    for device in range(0, POPULATION, POPULATION // 1000):
        dealing.positions(device)


def dealt(kind: str, by_name: dict[str | None, Column | None], num_examples: int) -> None:
    rule = parse_rule(kind, examples_per_device=None, seed=SEED)
    assert rule is not None
    dealing = partition_examples(
        rule, by_name[rule.column], num_examples=num_examples, num_devices=NUM_DEALT
    )
    for device in range(NUM_DEALT):
        dealing.positions(device)


def peers() -> dict[str, Callable[[], Any]]:
    """Return what makes flwr-datasets' partitioners anew, by our kind."""
    from flwr_datasets.partitioner import (
        DirichletPartitioner,
        GroupedNaturalIdPartitioner,
        IidPartitioner,
        PathologicalPartitioner,
    )

    return {
        "iid": lambda: IidPartitioner(NUM_DEALT),
        "dirichlet:0.3": lambda: DirichletPartitioner(
            NUM_DEALT, "label", 0.3, min_partition_size=0, self_balancing=False
        ),
        "labels:2": lambda: PathologicalPartitioner(NUM_DEALT, "label", 2),
        "column:author": lambda: GroupedNaturalIdPartitioner("author", NUM_AUTHORS // NUM_DEALT),
    }


def theirs(make: Callable[[], Any], dataset: Any) -> None:
    partitioner = make()
    partitioner.dataset = dataset
    for device in range(NUM_DEALT):
        len(partitioner.load_partition(device))


def seconds(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def peak_mb(work: Callable[[], object]) -> float:
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def main() -> None:
    given = arguments(__doc__)
    num_examples, times = (6000, 1) if given.quick else (60_000, 5)
    by_name = columns(num_examples)
    dataset: Any = None
    made: dict[str, Callable[[], Any]] = {}
    if importlib.util.find_spec("flwr_datasets") is not None:
        from datasets import Dataset

        told = {name: column.codes_E for name, column in by_name.items() if column and name}
        dataset, made = Dataset.from_dict(told), peers()
    figures: Figures = {}
    for kind in ("iid", "dirichlet:0.3", "labels:2", "column:author", "quantity:1"):
        figures[kind] = {
            "drawn_seconds": seconds(partial(drawn, kind, by_name, num_examples), times),
            "drawn_peak_mb": peak_mb(partial(drawn, kind, by_name, num_examples)),
            "dealt_seconds": seconds(partial(dealt, kind, by_name, num_examples), times),
        }
        if kind in made:
            work = partial(theirs, made[kind], dataset)
            figures[kind]["flwr_datasets_dealt_seconds"] = seconds(work, 1)
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
