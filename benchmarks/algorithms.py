"""Our algorithms beside Flower's own: rounds to a target on three tasks, by data and cohort.

Digits, their images through convolutions, and texts; examples dealt out to 20 devices at random, by
Dirichlet(0.3), and one label each; all devices in a round, or 5. Ours are those of
``headwater-simulate compare``: exact, FedAvg with 1 and 5 epochs, FedProx with 5, DiLoCo. Beside
them FedAvg with 1 and 5 epochs, FedProx with 5 and FedAdam, run by Flower
(``flower_strategies.py``). All have the same devices, initial models, size of a local step and
search for the rate.

The target is a test accuracy of 0.95 for the digits; elsewhere 97 % of the way to the best model at
the end, as ``compare`` chooses it. ``advice`` is compare's sentence for the line; ``held_out`` says
how often the advice of all seeds but one names the algorithm that was the best of that one seed, or
needed at most a tenth more rounds, or one round. With ``--lines FILE`` each line is kept in a file
as it ends, and the next call goes on behind it; ``--only WORDS`` takes lines that contain a word.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.flower_strategies import FLOWER, FlowerAlgorithm, FlowerRun
from benchmarks.measure import Figures, argument_parser, report
from headwater.common.settings.sources import load
from headwater.simulation.compare.advice import advice_of
from headwater.simulation.compare.budget import RESOURCES, Budget
from headwater.simulation.compare.candidates import Candidate, Shared
from headwater.simulation.compare.comparison import plan_comparison
from headwater.simulation.compare.rate_search import best_rate, first_rates, next_rate, score
from headwater.simulation.compare.standing import Standing, derived_target, ranked
from headwater.simulation.compare.trajectory import Trajectory, summed
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.sweep.worker import execute_run

NUM_DEVICES, FEW = 20, 5
DIGITS_TARGET = 0.95
FIRST_RATE = 0.1
"""Around which the search for Flower's local rates begins: the default of ours."""
NEAR_SHARE, NEAR_ROUNDS = 1.1, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A task, the column of its labels, and the size of its runs."""

    task: str
    column: str
    metric: str
    num_seeds: int
    rounds: int
    rounds_of_few: int
    batch_size: int
    """Examples of a local step."""


KINDS = {
    "digits": Kind(
        task="examples/digits.py:Digits",
        column="label",
        metric="test_accuracy",
        num_seeds=3,
        rounds=16,
        rounds_of_few=32,
        batch_size=32,
    ),
    "cnn": Kind(
        task="benchmarks.algorithm_tasks:Convolutions",
        column="label",
        metric="test_accuracy",
        num_seeds=3,
        rounds=12,
        rounds_of_few=24,
        batch_size=32,
    ),
    "text": Kind(
        task="benchmarks.algorithm_tasks:ShortTexts",
        column="module",
        metric="test_loss",
        num_seeds=2,
        rounds=6,
        rounds_of_few=12,
        batch_size=8,
    ),
}
PARTITIONS = {"iid": "iid", "dirichlet": "dirichlet:0.3:{}", "one label": "labels:1:{}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of the table: a task, its data on the devices, and the cohort."""

    name: str
    kind: Kind
    partition: str
    cohort: int
    seeds: tuple[int, ...]
    budget: Budget

    @property
    def metric(self) -> str:
        """The metric that is compared."""
        return self.kind.metric

    @property
    def shared(self) -> dict[str, Any]:
        """The settings that all algorithms share."""
        chosen = {
            "task": self.kind.task,
            "partition.kind": self.partition,
            "simulation.clients": NUM_DEVICES,
            "threads": 1,
            "check_task": False,
        }
        return chosen | ({"cohort.size": self.cohort} if self.cohort < NUM_DEVICES else {})


def lines(*, quick: bool) -> Iterator[Line]:
    """Yield the lines of the table; of a quick run one."""
    for (name, kind), (data, text) in itertools.product(KINDS.items(), PARTITIONS.items()):
        for cohort in (NUM_DEVICES, FEW):
            is_few = cohort == FEW
            words = f"{cohort} of {NUM_DEVICES}" if is_few else "all"
            rounds = kind.rounds_of_few if is_few else kind.rounds
            line = Line(
                name=f"{name}, {data}, {words}",
                kind=kind,
                partition=text.format(kind.column),
                cohort=cohort,
                seeds=tuple(range(kind.num_seeds)),
                budget=Budget(resource="rounds", amount=rounds),
            )
            if not quick:
                yield line
            elif line.name == "digits, dirichlet, 5 of 20":
                yield replace(line, seeds=(0,), budget=Budget(resource="rounds", amount=1))


def ours(line: Line) -> list[Standing]:
    """Return how our algorithms stand, by the runs of a comparison in this process."""
    with tempfile.TemporaryDirectory() as folder:
        comparison = plan_comparison(
            Shared(overrides=line.shared | {"local.batch_size": line.kind.batch_size}),
            seeds=line.seeds,
            budget=line.budget,
            metric=line.metric,
            folder=Path(folder),
        )
        while runs := comparison.due():
            for run in runs:
                execute_run(run, on_round=lambda _: None)
        return comparison.standings()


def flowers(line: Line, algorithm: FlowerAlgorithm) -> Standing:
    """Return how an algorithm of Flower stands, after the same search for its rate."""
    tried: dict[float, float | None] = {}
    searched: list[Trajectory] = []

    def trial(rate: float) -> None:
        run = _flower_run(line, algorithm, rate, max(line.seeds) + 1, line.budget.search_rounds)
        searched.append(run)
        is_finite = all(map(math.isfinite, run.values))
        found = score(run.values, is_smaller_better=run.is_smaller_better)
        tried[rate] = found if is_finite else None

    for rate in first_rates(FIRST_RATE):
        trial(rate)
    while (further := next_rate(tried)) is not None:
        trial(further)
    best, rounds = best_rate(tried), int(line.budget.amount)
    runs = (
        [] if best is None else [_flower_run(line, algorithm, best, s, rounds) for s in line.seeds]
    )
    finite = [run for run in runs if all(map(math.isfinite, run.values))]
    return Standing(
        candidate=_candidate(algorithm.name, {}, "rate"),
        tried=tried,
        search_cost=summed(run.total for run in searched),
        rate=best,
        runs=tuple(finite),
        num_diverged=len(runs) - len(finite),
    )


def _flower_run(
    line: Line, algorithm: FlowerAlgorithm, rate: float, seed: int, rounds: int
) -> Trajectory:
    settings = with_fleet(load(None, line.shared | {"seed": seed, "rounds": rounds}))
    run = FlowerRun(settings, algorithm, rate=rate, batch_size=line.kind.batch_size)
    return run.run(line.metric)


def measured(
    line: Line, sides: Sequence[str], algorithms: Sequence[FlowerAlgorithm]
) -> Iterator[Figures]:
    """Yield a record of each side of a line: its algorithms, and the seconds of CPU they took."""
    for side in sides:
        start = time.process_time()
        standings = ours(line) if side == "ours" else [flowers(line, one) for one in algorithms]
        yield {
            "line": line.name,
            "side": side,
            "cpu_seconds": round(time.process_time() - start, 1),
            "algorithms": [_record(one) for one in standings],
        }


def _record(one: Standing) -> Figures:
    return {
        "name": one.candidate.name,
        "point": one.candidate.point,
        "rate_key": one.candidate.rate_key,
        "tried": list(one.tried.items()),
        "search_cost": one.search_cost,
        "rate": one.rate,
        "num_diverged": one.num_diverged,
        "runs": [
            {
                "values": run.values,
                "spent": [[cost[each] for each in RESOURCES] for cost in run.spent],
                "is_smaller_better": run.is_smaller_better,
            }
            for run in one.runs
        ],
    }


def _standing(record: Figures) -> Standing:
    runs = []
    for run in record["runs"]:
        spent = tuple(dict(zip(RESOURCES, cost, strict=True)) for cost in run["spent"])
        runs.append(
            Trajectory(
                spent=spent,
                values=tuple(run["values"]),
                total=spent[-1],
                is_smaller_better=run["is_smaller_better"],
            )
        )
    return Standing(
        candidate=_candidate(record["name"], record["point"], record["rate_key"]),
        tried=dict(record["tried"]),
        search_cost=record["search_cost"],
        rate=record["rate"],
        runs=tuple(runs),
        num_diverged=record["num_diverged"],
    )


def _candidate(name: str, point: dict[str, Any], rate_key: str) -> Candidate:
    return Candidate(
        name=name, point=point, rate_key=rate_key, first_rate=FIRST_RATE, other_branch=""
    )


def figures_of(line: Line, records: dict[str, Figures]) -> Figures:
    """Return a line of the table: what each algorithm needed, who was best, and the advice."""
    sides = {side: [_standing(one) for one in it["algorithms"]] for side, it in records.items()}
    everyone = [one for standings in sides.values() for one in standings]
    is_smaller_better = line.metric.endswith("loss")
    target = derived_target(everyone, is_smaller_better=is_smaller_better)
    if line.kind is KINDS["digits"]:
        target = DIGITS_TARGET
    if target is None:
        return {"target": None}
    figures: Figures = {"target": target}
    for one in everyone:
        cost, last = one.cost_to(target, "rounds"), one.last
        figures[one.candidate.name] = {
            "rate": one.rate,
            "rounds": "not reached" if cost is None else _text(cost),
            "at_the_end": "diverged" if last is None else _text(last, digits=3),
        }
    for side, standings in sides.items():
        order = ranked(standings, target, line.budget)
        figures[f"best of {side}"] = order[0].candidate.name if order else None
    if "ours" in sides:
        figures["advice"] = advice_of(
            sides["ours"], target=target, budget=line.budget, metric=line.metric
        )
        figures["held_out"] = _held_out(sides["ours"], target, line)
    return figures


def _held_out(standings: Sequence[Standing], target: float, line: Line) -> str:
    """Return how often the advice of all seeds but one suits the one that is left out."""
    num_right, num_seeds = 0, len(line.seeds)
    if num_seeds < 2 or any(len(one.runs) < num_seeds for one in standings):
        return "not measured"
    for place in range(num_seeds):
        others = [replace(one, runs=one.runs[:place] + one.runs[place + 1 :]) for one in standings]
        advised = ranked(others, target, line.budget)[0].candidate.name
        alone = [replace(one, runs=(one.runs[place],)) for one in standings]
        costs = {one.candidate.name: one.cost_to(target, "rounds") for one in alone}
        least = min((cost.median for cost in costs.values() if cost is not None), default=None)
        found = costs[advised]
        if found is not None and least is not None:
            num_right += found.median <= max(least * NEAR_SHARE, least + NEAR_ROUNDS)
        elif least is None:
            num_right += ranked(alone, target, line.budget)[0].candidate.name == advised
    return f"{num_right} of {num_seeds}"


def _text(spread: Any, *, digits: int | None = None) -> str:
    def one(value: float) -> str:
        if not math.isfinite(value):
            return "never"
        return f"{value:.{digits}f}" if digits else f"{value:g}"

    return f"{one(spread.median)} ({one(spread.low)} to {one(spread.high)})"


def main() -> None:
    """Measure the lines that are not measured yet, and report on all."""
    parser = argument_parser(__doc__)
    parser.add_argument("--lines", type=Path, help="keep each line in this file")
    parser.add_argument("--only", nargs="*", default=[""], help="lines that contain one of these")
    parser.add_argument("--sides", nargs="*", default=["ours", "Flower"], help="ours, Flower")
    flags = parser.parse_args()
    kept: Path | None = flags.lines
    records = []
    if kept is not None and kept.exists():
        records = [json.loads(text) for text in kept.read_text().splitlines()]
    figures: Figures = {}
    for line in lines(quick=flags.quick):
        if not any(word in line.name for word in flags.only):
            continue
        done = {it["side"]: it for it in records if it["line"] == line.name}
        missing = [side for side in flags.sides if side not in done]
        for record in measured(line, missing, FLOWER[:1] if flags.quick else FLOWER):
            done[record["side"]] = record
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        figures[line.name] = figures_of(line, done)
        figures[line.name]["cpu_seconds"] = sum(it["cpu_seconds"] for it in done.values())
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
