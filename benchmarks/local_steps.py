"""Seconds of a simulated round of local steps: one device after another over all in one pass.

A hundred devices hold the digits as unevenly as the example deals them out, 1 to 46 each. Both ways
take the same steps: five epochs of SGD, or ten steps of AdamW, which are DiLoCo's. Their runs take
turns in one process, with one thread; the ratio is that of the medians of the rounds after each
run's first, which opens the data and tests the pass. ``apart`` is the relative difference of the
last losses. The target: a ratio of 2.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.measure import Figures, arguments, report
from headwater.common.settings.sources import load
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine

WORK: dict[str, dict[str, Any]] = {
    "fedavg_5_epochs": {"local.algorithm": "fedavg", "local.epochs": 5},
    "diloco_10_steps": {"local.algorithm": "diloco", "local.steps": 10},
}
WAYS = ("one-by-one", "vectorised")
TARGET = 2.0


def rounds_of(way: str, work: dict[str, Any], *, devices: int, rounds: int) -> list[RoundRow]:
    """Return the rows of a run."""
    given = {
        "task": "headwater.examples.digits:Digits",
        "rounds": rounds,
        "threads": 1,
        "check_task": False,
        "evaluation.every_rounds": rounds,
        "simulation.clients": devices,
        "simulation.compute": way,
        **work,
    }
    rows: list[RoundRow] = []
    run_engine(with_fleet(load(None, given)), on_round=rows.append, resume=False)
    return rows


def main() -> None:
    flags = arguments(__doc__)
    devices, rounds, turns = (10, 2, 1) if flags.quick else (100, 7, 4)
    figures: Figures = {}
    for name, work in WORK.items():
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        losses: dict[str, float] = {}
        for _ in range(turns):
            for way in WAYS:
                rows = rounds_of(way, work, devices=devices, rounds=rounds)
                seconds[way] += [row.seconds for row in rows[1:-1] or rows[1:]]
                losses[way] = rows[-1].loss
        alone, together = (statistics.median(seconds[way]) for way in WAYS)
        ratio = alone / together
        figures[name] = {
            "seconds": {"one-by-one": alone, "vectorised": together},
            "ratio": ratio,
            "target": TARGET,
            "is_met": ratio >= TARGET,
            "apart": abs(losses[WAYS[0]] / losses[WAYS[1]] - 1),
        }
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
