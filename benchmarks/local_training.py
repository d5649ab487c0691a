"""Test accuracy of ``--algorithm fedavg`` beside Flower's FedAvg, after equal rounds of local SGD.

Twenty equal devices train the bundled digits from the same initial model, with the same local rate,
batch size and number of epochs, and each is tested on the server after the last round. ``flower``
is ``flwr.serverapp.strategy.FedAvg`` with the loop of ``benchmarks.fedavg``. Both walk the data in
orders of their own, so that single runs differ; the figures are medians over seeds, with their
range. The target: the medians differ by no more than the wider of the two ranges.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.fedavg import Round, run_fedavg
from benchmarks.measure import Figures, arguments, report
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine

SEEDS = (0, 1, 2, 3, 4)
NUM_ROUNDS, RATE, BATCH_SIZE = 10, 0.1, 16
EPOCHS = (1, 5)
# Equal devices without batteries, so that nothing shortens an epoch.
FLEET = """
[[device]]
count = 20
examples_per_second = 100
memory_bytes = 4_000_000_000
upload_bytes_per_second = 1_200_000
"""


def settings_of(seed: int, rounds: int, fleet: Path, **changes: object) -> Settings:
    given = {
        "task": "headwater.examples.digits:Digits",
        "seed": seed,
        "rounds": rounds,
        "threads": 1,
        "check_task": False,
        "simulation.fleet": fleet,
        "plan.set_micro_batch_size": BATCH_SIZE,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return with_fleet(load(None, given))


def ours(seed: int, rounds: int, epochs: int, fleet: Path) -> float:
    """Return the last test accuracy of our FedAvg."""
    rows: list[RoundRow] = []
    settings = settings_of(
        *(seed, rounds, fleet),
        local__algorithm="fedavg",
        local__epochs=epochs,
        local__batch_size=BATCH_SIZE,
        local__learning_rate=RATE,
    )
    run_engine(settings, on_round=rows.append, resume=False)
    return rows[-1].metrics["test_accuracy"]


def flowers(seed: int, rounds: int, epochs: int, fleet: Path) -> float:
    """Return the last test accuracy of Flower's FedAvg."""
    found: list[Round] = []
    run_fedavg(
        settings_of(seed, rounds, fleet),
        learning_rate=RATE,
        deadline_seconds=None,
        on_round=found.append,
        num_epochs=epochs,
    )
    return found[-1].accuracy


def main() -> None:
    flags = arguments(__doc__)
    seeds, rounds = (SEEDS[:1], 1) if flags.quick else (SEEDS, NUM_ROUNDS)
    figures: Figures = {}
    with TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.toml"
        fleet.write_text(FLEET)
        for epochs in EPOCHS:
            pair: Figures = {}
            for name, one in (("headwater", ours), ("flower", flowers)):
                found = [one(seed, rounds, epochs, fleet) for seed in seeds]
                pair[name] = {
                    "accuracy": statistics.median(found),
                    "range": [min(found), max(found)],
                }
            low, high = zip(*(side["range"] for side in pair.values()), strict=True)
            spread = max(b - a for a, b in zip(low, high, strict=True))
            apart = abs(pair["headwater"]["accuracy"] - pair["flower"]["accuracy"])
            pair |= {"apart": apart, "target": spread, "is_within": apart <= spread}
            figures[f"epochs_{epochs}"] = pair
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
