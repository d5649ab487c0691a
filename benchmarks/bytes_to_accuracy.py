"""Bytes to a test accuracy: compressed local training beside Flower's FedAvg in float32.

Twenty equal devices train the bundled digits from the same initial model: alike data, a Dirichlet
draw of 0.3, or one label each; all devices in a round, or five. ``flower`` is
``flwr.serverapp.strategy.FedAvg`` with the loop of ``benchmarks.fedavg``, one or five local epochs;
the better of both is the peer. Ours takes five local epochs too and sends less, but for
``exact_...``, which take one exact step of Adam at 0.03 on 2,048 examples. Bytes are those of
vectors and models, up and down, without headers; a model that is sent whole counts whole.

For each way ``megabytes`` is the median over seeds of the bytes until the server's test first shows
95 % (null: not in all seeds within the rounds), ``final`` the median accuracy after the last round,
and ``share`` the megabytes over the peer's. ``benchmarks.error_feedback`` measures feedback.

``--picture FILE`` draws the accuracy by rounds and by bytes instead (docs/accuracy.png), of one
exact step of the defaults a round, of five local epochs in int8, and of Flower's FedAvg.
"""

from __future__ import annotations

import json
import logging
import random
import statistics
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.fedavg import Round, run_fedavg
from benchmarks.measure import Figures, arguments, report
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine

log = logging.getLogger(__name__)

Curve = list[tuple[float, float]]
"""The megabytes sent so far and the test accuracy, after each round."""

SEEDS = (0,)
NUM_CLIENTS, NUM_ROUNDS, RATE, BATCH_SIZE = 20, 30, 0.3, 16
PICTURE_ROUNDS, PICTURE_RATE = 60, 0.1
TARGET = 0.95
EPOCHS = (1, 5)
COHORTS = {"all": None, "five": 5}
PARTITIONS = {"iid": "iid", "dirichlet": "dirichlet:0.3", "one_label": "labels:1"}
FLEET = """
[[device]]
count = 20
examples_per_second = 100
memory_bytes = 4_000_000_000
upload_bytes_per_second = 1_200_000
"""
LOCAL = {
    "local.algorithm": "fedavg",
    "local.epochs": 5,
    "local.batch_size": BATCH_SIZE,
    "local.learning_rate": RATE,
}
INT8, INT4, INT2 = (
    {"compression.up": bits, "compression.down": bits} for bits in ("int8", "int4", "int2")
)
EXACT = {"plan.effective_batch_size": 2048, "optimizer.learning_rate": 0.03}
TOP = {"compression.up": "top-k", "compression.fraction": 0.05, "compression.down": "int8"}
WAYS: dict[str, dict[str, Any]] = {
    "float32": LOCAL,
    "int8": LOCAL | INT8,
    "int4": LOCAL | INT4,
    "int2": LOCAL | INT2,
    "top_k": LOCAL | TOP,
    "exact_int8": INT8 | EXACT,
    "exact_int4": INT4 | EXACT,
    "exact_int2": INT2 | EXACT,
}


def settings_of(seed: int, rounds: int, fleet: Path, changes: dict[str, Any]) -> Settings:
    given = {
        "task": "headwater.examples.digits:Digits",
        "seed": seed,
        "rounds": rounds,
        "threads": 1,
        "check_task": False,
        "simulation.fleet": fleet,
        "plan.set_micro_batch_size": BATCH_SIZE,
    }
    return with_fleet(load(None, given | changes))


def ours(settings: Settings) -> Curve:
    """Run a simulation."""
    rows: list[RoundRow] = []
    run_engine(settings, on_round=rows.append, resume=False)
    sent = accumulate(row.bytes_up + row.bytes_down for row in rows)
    return [
        (total / 1e6, row.metrics["test_accuracy"]) for total, row in zip(sent, rows, strict=True)
    ]


def flowers(settings: Settings, *, epochs: int, invited: int, rate: float = RATE) -> Curve:
    """Run Flower's FedAvg, which sends the model down and up in float32."""
    found: list[Round] = []
    random.seed(settings.seed)  # Flower draws a round's clients from it
    run_fedavg(
        settings,
        learning_rate=rate,
        deadline_seconds=None,
        on_round=found.append,
        num_epochs=epochs,
        invited=invited / NUM_CLIENTS,
    )
    round_bytes = invited * 2 * 4 * num_parameters(settings)
    return [(at * round_bytes / 1e6, one.accuracy) for at, one in enumerate(found, 1)]


def num_parameters(settings: Settings) -> int:
    """Return the parameters of the task's model."""
    from headwater.common.model.parameters import build_model
    from headwater.common.task import load_task

    assert settings.task is not None
    return build_model(load_task(settings.task), seed=0).layout.num_parameters


def median(curves: list[Curve]) -> Figures:
    """Return the figures of one way, over its seeds."""
    found = (next((mb for mb, part in curve if part >= TARGET), None) for curve in curves)
    reached = [megabytes for megabytes in found if megabytes is not None]
    is_reached = len(reached) == len(curves)
    return {
        "megabytes": statistics.median(reached) if is_reached else None,
        "final": statistics.median(curve[-1][1] for curve in curves),
    }


def main() -> None:
    flags = arguments(__doc__, picture=())
    if flags.picture:
        draw(Path(flags.picture))
        return
    seeds, rounds = (SEEDS[:1], 1) if flags.quick else (SEEDS, NUM_ROUNDS)
    figures: Figures = {}
    with TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.toml"
        fleet.write_text(FLEET)
        for partition, kind in PARTITIONS.items():
            for cohort, size in COHORTS.items():
                line = {"partition.kind": kind} | ({} if size is None else {"cohort.size": size})
                figures[f"{partition}_{cohort}"] = _line(seeds, rounds, fleet, line, size)
                if flags.quick:
                    report(figures, as_json=flags.json, doc=__doc__)
                    return
    report(figures, as_json=flags.json, doc=__doc__)


def _line(
    seeds: tuple[int, ...], rounds: int, fleet: Path, line: dict[str, Any], size: int | None
) -> Figures:
    """Return the figures of one partition and cohort."""
    invited = size or NUM_CLIENTS
    plain = {"partition.kind": line["partition.kind"]}
    result: Figures = {}
    for epochs in EPOCHS:
        result[f"flower_epochs_{epochs}"] = median(
            [
                flowers(settings_of(seed, rounds, fleet, plain), epochs=epochs, invited=invited)
                for seed in seeds
            ]
        )
    known = [one["megabytes"] for one in result.values() if one["megabytes"] is not None]
    peer = min(known, default=None)
    for name, way in WAYS.items():
        found = median([ours(settings_of(seed, rounds, fleet, line | way)) for seed in seeds])
        if peer is not None and found["megabytes"] is not None:
            found["share"] = found["megabytes"] / peer
        result[name] = found
    log.info("%s", json.dumps({str(line): result}))
    return result


def draw(path: Path) -> None:
    """Draw docs/accuracy.png: two of the ten digits on each device, the median of three seeds."""
    from matplotlib.figure import Figure

    digits = {"partition.kind": "labels:2"}
    exact = {"optimizer.name": "adam", "optimizer.learning_rate": 0.01}
    local = LOCAL | INT8 | {"local.learning_rate": PICTURE_RATE}
    curves: dict[str, list[Curve]] = {}
    with TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.toml"
        fleet.write_text(FLEET)
        for seed in range(3):
            for name, way in {
                "Headwater, one exact step": exact,
                "Headwater, 5 local epochs, int8": local,
            }.items():
                chosen = settings_of(seed, PICTURE_ROUNDS, fleet, digits | way)
                curves.setdefault(name, []).append(ours(chosen))
            for epochs in EPOCHS:
                chosen = settings_of(seed, PICTURE_ROUNDS, fleet, digits)
                curve = flowers(chosen, epochs=epochs, invited=NUM_CLIENTS, rate=PICTURE_RATE)
                name = f"Flower's FedAvg, {epochs} local epoch{'s' * (epochs > 1)}"
                curves.setdefault(name, []).append(curve)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    by_round, by_bytes = figure.subplots(1, 2, sharey=True)
    for name, found in curves.items():
        middle = [
            100 * statistics.median(part for _, part in one) for one in zip(*found, strict=True)
        ]
        by_round.plot(range(1, len(middle) + 1), middle, label=name)
        by_bytes.semilogx([megabytes for megabytes, _ in found[0]], middle)
    by_round.set_xlabel("rounds")
    by_bytes.set_xlabel("megabytes sent, up and down, all devices")
    by_round.set_ylabel("test accuracy, %")
    by_round.legend(fontsize=8)
    for axes in (by_round, by_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
