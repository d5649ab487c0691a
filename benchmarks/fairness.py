"""Accuracy on the classes that slow devices alone own: weighting by samples, and by data set.

Thirty devices of digits (examples/slow_owners.py, examples/fleets/slow_owners.toml): 0 to 6 lie on
twenty fast ones, 7 to 9 on ten that are sixteen times slower. The planner gives a slow device few
examples in each round. With ``samples`` its update weighs as few, so its classes have a small part
in every step; with ``dataset`` it weighs what the device owns. ``K 1`` is the fleet without the
planner: the same quota for all, so each round waits for the slow ones. Every run has the same
virtual seconds.

``slow`` is the test accuracy on 7, 8 and 9, ``fast`` that on the others; medians over the seeds,
and the extremes of ``slow``. ``weight`` is the part of a round's weight that the slow devices have,
the mean over rounds; of the training examples they own ``share_of_examples``.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from benchmarks.measure import ROOT, Figures, argument_parser, markdown, report
from examples.slow_owners import SLOW_CLASSES
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.sources import load
from headwater.common.task import Task, load_task, open_train_examples
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine

TASK = "examples/slow_owners.py:SlowOwners"
FLEET = ROOT / "examples" / "fleets" / "slow_owners.toml"
NUM_DEVICES, FIRST_SLOW = 30, 20
BATCH = 300
VIRTUAL_SECONDS = (5.0, 20.0, 80.0)
SEEDS = (0, 1, 2, 3, 4)
MOST_ROUNDS = 10_000
RUNS: dict[str, dict[str, object]] = {
    "samples": {"plan.effective_batch_size": BATCH, "cohort.weighting": "samples"},
    "dataset": {"plan.effective_batch_size": BATCH, "cohort.weighting": "dataset"},
    # As many examples in a round, and as many from each device.
    "K 1": {"plan.accumulation_steps": 1, "plan.micro_batch_size": BATCH // NUM_DEVICES},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Of a model on the test examples, and what the slow devices weighed on the way to it."""

    slow: float
    fast: float
    weight: float
    num_rounds: int


def rounds_in(chosen: dict[str, object], seconds: float) -> int:
    """Return how many rounds take so many virtual seconds, by the later of the first ten rounds."""
    with TemporaryDirectory() as folder:
        run(chosen, seed=0, rounds=10, out=Path(folder))
        last = [row["slowest_client_seconds"] for row in read_rows(Path(folder))][3:]
    return max(round(seconds / statistics.fmean(last)), 1)


def run(chosen: dict[str, object], *, seed: int, rounds: int, out: Path) -> None:
    overrides = {
        "task": TASK,
        "seed": seed,
        "rounds": rounds,
        "threads": 1,
        "out": out,
        "optimizer.name": "adam",
        "optimizer.learning_rate": 0.01,
        "evaluation.every_rounds": MOST_ROUNDS,
        "simulation.fleet": FLEET,
        **chosen,
    }
    run_engine(with_fleet(load(None, overrides)), on_round=lambda _: None, resume=False)


def accuracy_of(chosen: dict[str, object], *, seed: int, rounds: int) -> Accuracy:
    task = load_task(TASK)
    with TemporaryDirectory() as folder:
        run(chosen, seed=seed, rounds=rounds, out=Path(folder))
        rows = read_rows(Path(folder))
        model = task.new_model()
        model.load_state_dict(load_file(Path(folder) / MODEL))
    images, labels = task.test_examples().tensors  # type: ignore[attr-defined] # of this task
    with torch.no_grad():
        is_right = model(images).argmax(1) == labels
    is_slow = torch.isin(labels, torch.tensor(SLOW_CLASSES))
    weights = [
        sum(c["weight"] for c in row["clients"] if int(c["name"]) >= FIRST_SLOW) / row["weight"]
        for row in rows
    ]
    return Accuracy(
        slow=is_right[is_slow].float().mean().item(),
        fast=is_right[~is_slow].float().mean().item(),
        weight=statistics.fmean(weights),
        num_rounds=len(rows),
    )


def over_seeds(chosen: dict[str, object], seconds: float, seeds: tuple[int, ...]) -> Figures:
    rounds = rounds_in(chosen, seconds)
    found = [accuracy_of(chosen, seed=seed, rounds=rounds) for seed in seeds]
    slow = [one.slow for one in found]
    return {
        "rounds": rounds,
        "slow": statistics.median(slow),
        "slow_range": [round(min(slow), 3), round(max(slow), 3)],
        "fast": statistics.median(one.fast for one in found),
        "weight": statistics.fmean(one.weight for one in found),
    }


def share_of_examples(task: Task) -> float:
    owned = [
        len(open_train_examples(task, data=None, part=part, num_parts=NUM_DEVICES))
        for part in range(NUM_DEVICES)
    ]
    return sum(owned[FIRST_SLOW:]) / sum(owned)


def table(figures: Figures) -> str:
    """Return the table of docs/fairness.md."""
    rows = []
    for after, ways in figures.items():
        for way, found in ways.items():
            seconds = after.removeprefix("after_").replace("_virtual_seconds", " s")
            least, most = (f"{share:.1%}" for share in found["slow_range"])
            slow, fast, weight = (f"{found[name]:.1%}" for name in ("slow", "fast", "weight"))
            begun = f"{seconds}, {found['rounds']} rounds, {way}"
            rows.append((begun, f"{slow} ({least} to {most})", fast, weight))
    header = ("after, weighting", "on 7, 8 and 9", "on 0 to 6", "weight of the slow clients")
    return markdown(header, rows)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--table", action="store_true", help="print the table of docs/fairness.md")
    flags = parser.parse_args()
    seconds, seeds = ((0.5,), SEEDS[:1]) if flags.quick else (VIRTUAL_SECONDS, SEEDS)
    with redirect_stdout(sys.stderr):  # how the devices are computed
        after: Figures = {
            f"after_{limit:g}_virtual_seconds": {
                name: over_seeds(chosen, limit, seeds) for name, chosen in RUNS.items()
            }
            for limit in seconds
        }
    if flags.table:
        print(table(after))
        return
    figures: Figures = {"share_of_examples": share_of_examples(load_task(TASK)), **after}
    figures["target"] = "none: it shows what a weighting does"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
