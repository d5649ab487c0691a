"""What error feedback is worth: the same encodings with it, and without.

Twenty equal devices train the bundled digits by one exact step a round, SGD at a rate of 0.5 on all
their examples, with the digits dealt out alike or one label to a device. An encoding leaves out 95
or 99 % of the coordinates (``top_k_5``, ``top_k_1``, ``random_k_5``), or rounds each to one of 255
steps (``int8``). The model travels whole.

For each ``final`` is the median test accuracy over seeds after the last round, ``least`` and
``most`` its extremes, and ``below`` the median behind that of float32.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.bytes_to_accuracy import FLEET, PARTITIONS, settings_of
from benchmarks.measure import Figures, arguments, report
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

SEEDS, NUM_ROUNDS, RATE = (0, 1, 2), 150, 0.5
STEP = {
    "optimizer.name": "sgd",
    "optimizer.learning_rate": RATE,
    "plan.effective_batch_size": 2048,
}
FLOAT32 = "float32"
WAYS: dict[str, dict[str, Any]] = {
    "int8": {"compression.up": "int8"},
    "int4": {"compression.up": "int4"},
    "int2": {"compression.up": "int2"},
    "int1": {"compression.up": "int1"},
    "top_k_5": {"compression.up": "top-k", "compression.fraction": 0.05},
    "top_k_1": {"compression.up": "top-k", "compression.fraction": 0.01},
    "random_k_5": {"compression.up": "random-k", "compression.fraction": 0.05},
}
LINES = ("iid", "one_label")


def final(chosen: dict[str, Any], *, seed: int, rounds: int, fleet: Path) -> float:
    """Return the test accuracy after the last round."""
    rows: list[RoundRow] = []
    settings = settings_of(seed, rounds, fleet, STEP | chosen)
    run_engine(settings, on_round=rows.append, resume=False)
    return rows[-1].metrics["test_accuracy"]


def main() -> None:
    flags = arguments(__doc__)
    seeds, rounds = (SEEDS[:1], 1) if flags.quick else (SEEDS, NUM_ROUNDS)
    figures: Figures = {}
    with TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.toml"
        fleet.write_text(FLEET)
        for name in LINES[:1] if flags.quick else LINES:
            line = {"partition.kind": PARTITIONS[name]}
            figures[name] = _line(line, seeds=seeds, rounds=rounds, fleet=fleet)
    report(figures, as_json=flags.json, doc=__doc__)


def _line(line: dict[str, Any], *, seeds: tuple[int, ...], rounds: int, fleet: Path) -> Figures:
    """Return the figures of one way of dealing out the digits."""
    ways: dict[str, dict[str, Any]] = {FLOAT32: {}} | {
        f"{name}_{kind}_feedback": way | {"compression.feedback": kind == "with"}
        for name, way in WAYS.items()
        for kind in ("with", "without")
    }
    result: dict[str, dict[str, float]] = {}
    for name, way in ways.items():
        found = [final(line | way, seed=seed, rounds=rounds, fleet=fleet) for seed in seeds]
        median = statistics.median(found)
        result[name] = {"final": median, "least": min(found), "most": max(found)}
        result[name]["below"] = result[FLOAT32]["final"] - median
    return dict(result)


if __name__ == "__main__":
    main()
