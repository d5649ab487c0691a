"""Seconds of a masked round over a plain one: 20 devices, a million parameters, real training.

The simulator's in-process grid runs every device and the server one after another on one thread,
so the seconds are those of the CPU, for the whole cohort: training, encoding, masking, the six
phases, and unmasking. Plain and masked runs take turns; ``masked_over_plain`` is the median of the
ratios of neighbouring rounds. Each device sums 64 pictures (K = 4 micro-batches of 16), a quarter
of a second's work: with more the ratio falls. ``semi-honest`` is the complete
graph of 20, ``active`` has signatures and the consistency phase besides; 16 bits are rotated.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Figures, arguments, ratio, report, spread
from headwater.common.settings.schema import Settings
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "semi-honest": {"aggregation": "semi-honest"},
    "active": {"aggregation": "active"},
    "semi-honest, 16 bits": {"aggregation": "semi-honest", "ring_bits": 16},
}


def seconds_of(secure: dict[str, Any], *, devices: int, rounds: int, size: int) -> list[float]:
    """Return the seconds of a run's rounds, the first left out: it probes nothing but loads all."""
    seen: list[RoundRow] = []
    with tempfile.TemporaryDirectory(prefix="headwater-benchmark-") as folder:
        settings = Settings.model_validate(
            {
                "task": "benchmarks/tasks.py:Million",
                "rounds": rounds + 1,
                "threads": 1,
                "check_task": False,
                "out": Path(folder),
                "plan": {"accumulation_steps": 4, "micro_batch_size": size},
                "optimizer": {"name": "sgd", "learning_rate": 0.01},
                "simulation": {"clients": devices},
                "secure": secure,
            }
        )
        run_engine(settings, on_round=seen.append, resume=False)
    return [row.seconds for row in seen[1:]]


def main() -> None:
    """Take turns and report."""
    chosen = arguments(__doc__)
    devices, rounds, turns, size = (3, 1, 1, 2) if chosen.quick else (20, 2, 3, 16)
    seconds: dict[str, list[float]] = {name: [] for name in KINDS}
    for _ in range(turns):
        for name, secure in KINDS.items():
            seconds[name] += seconds_of(secure, devices=devices, rounds=rounds, size=size)
    plain = seconds["plain"]
    figures: Figures = {"plain_round_seconds": statistics.median(plain)}
    for name in list(KINDS)[1:]:
        figures[name] = {
            "masked_over_plain": ratio(seconds[name], plain),
            "quartiles": spread(seconds[name], plain),
        }
    report(figures, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
