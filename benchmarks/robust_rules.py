"""What robust rules cost an honest fleet, and what they save if a fifth of it lies.

Digits on 20 simulated devices, 40 rounds of Adam at 0.01, K = 2 with micro-batches of 32, two
seeds; the devices' examples are alike (iid) or of one label each (labels:1). A liar sends -10 times
its update, which stays below the limit of the norms (``scaled -10``), or noise with the norm of its
update (``random``). The figures are accuracies on the test images after the last round, as the mean
of the seeds; ``sum`` is the default, with the norms' limit of 100 times the median.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Figures, arguments, report
from headwater.common.settings.sources import load
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

NUM_DEVICES, NUM_ROUNDS, NUM_SEEDS = 20, 40, 2
RATE = 0.01
RULES = ("sum", "clipped", "trimmed-mean", "median", "krum")
PARTITIONS = ("iid", "labels:1")
LIES = {
    "honest": "",
    "scaled -10": '[[liar]]\nshare = 0.2\nkind = "scaled"\nfactor = -10\n',
    "random": '[[liar]]\nshare = 0.2\nkind = "random"\n',
}


def accuracy(
    rule: str, partition: str, faults: Path | None, *, seed: int, devices: int, rounds: int
) -> float:
    """Return the accuracy on the test images after a run."""
    rows: list[RoundRow] = []
    settings = load(
        None,
        {
            "task": "examples/digits.py:Digits",
            "seed": seed,
            "rounds": rounds,
            "threads": 1,
            "check_task": False,
            "simulation.clients": devices,
            "simulation.compute": "one-by-one",
            "simulation.faults": faults,
            "partition.kind": partition,
            "optimizer.name": "adam",
            "optimizer.learning_rate": RATE,
            "plan.accumulation_steps": 2,
            "plan.micro_batch_size": 32,
            "aggregation.rule": rule,
            "evaluation.every_rounds": rounds,
        },
    )
    run_engine(settings, on_round=rows.append, resume=False)
    return rows[-1].metrics["test_accuracy"]


def main() -> None:
    """Measure every rule on every fleet."""
    flags = arguments(__doc__)
    seeds, devices, rounds = NUM_SEEDS, NUM_DEVICES, NUM_ROUNDS
    if flags.quick:
        seeds, devices, rounds = 1, 10, 1
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in LIES.items():
            faults = Path(folder) / f"{name}.toml"
            faults.write_text(text)
            for partition in PARTITIONS:
                for rule in RULES:
                    how: dict[str, Any] = {"devices": devices, "rounds": rounds}
                    found = [
                        accuracy(rule, partition, faults if text else None, seed=seed, **how)
                        for seed in range(seeds)
                    ]
                    figures[f"{name}, {partition}, {rule}"] = round(statistics.fmean(found), 3)
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
