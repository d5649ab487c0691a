"""What unequal devices, liars and dropouts do to a simulated run, as tables of the documents.

``idle``: sixty devices, of which the fastest is sixteen times as fast as the slowest
(examples/fleets/sixteenfold.toml), ten rounds with the planner, with equal work for all, on
batteries and with jitter. The idle time is the mean over the rounds after the third, as the run
prints it; the seconds are the last round's. ``liars``: accuracy on the digits' test images with a
hundred devices, of which some falsify their updates, after thirty rounds of Adam at 0.01.
``dropouts``: the same accuracy after sixty rounds, plain and masked, where devices drop out at
random points, and the sessions that were aborted beside the share that follows from the protocol's
rules (``headwater.simulation.reports.session_aborts``).

The devices' seconds are virtual, so the tables are the same on every machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, argument_parser, markdown
from headwater.common.secagg.graph import Mode
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.reports.fleet_summary import SETTLING_ROUNDS, idle_time
from headwater.simulation.reports.session_aborts import abort_probability
from headwater.simulation.run import run_engine

SIXTEENFOLD = ROOT / "examples" / "fleets" / "sixteenfold.toml"
IDLE_ROUNDS, EXAMPLES = 10, 6000
PLANNER: dict[str, object] = {"plan.effective_batch_size": EXAMPLES}
EQUAL: dict[str, object] = {"plan.accumulation_steps": 6}
FLEETS: dict[str, tuple[str, dict[str, object]]] = {
    "the planner, 6,000 examples": ("", PLANNER),
    "`--accumulation-steps 6`": ("", EQUAL),
    "the planner, `on_battery = 0.2`": ("on_battery = 0.2", PLANNER),
    "the planner, `jitter = 0.02`": ("jitter = 0.02", PLANNER),
    "the planner, `jitter = 0.05`": ("jitter = 0.05", PLANNER),
    "the planner, `jitter = 0.1`": ("jitter = 0.1", PLANNER),
}
SEEDS, LIARS_ROUNDS, DEVICES = (0, 1, 2), 30, 100
LIARS = {
    "none": "",
    "10 %, `random`": 'share = 0.1\nkind = "random"',
    "10 %, `sign-flipped`": 'share = 0.1\nkind = "sign-flipped"',
    "30 %, `sign-flipped`": 'share = 0.3\nkind = "sign-flipped"',
    "5 %, `scaled` by -10": 'share = 0.05\nkind = "scaled"\nfactor = -10',
    "5 %, `scaled` by -1000": 'share = 0.05\nkind = "scaled"\nfactor = -1000',
}

SESSION_ROUNDS = 60
K_SET: dict[str, object] = {"plan.accumulation_steps": 4, "plan.micro_batch_size": 16}
DROPOUTS: dict[str, tuple[Mode, int, float, dict[str, object]]] = {
    "semi-honest, 8 devices, K = 4": ("semi-honest", 8, 0.3, K_SET),
    "active, 6 devices, K = 4": ("active", 6, 0.15, K_SET),
    "active, 6 devices, K planned": ("active", 6, 0.15, {}),
}


@contextmanager
def simulated(
    overrides: Mapping[str, object], tables: str
) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield the rows of a run of Adam at 0.01, with these tables as its fleet and faults."""
    with tempfile.TemporaryDirectory() as folder:
        (fleet := Path(folder) / "fleet.toml").write_text(tables)
        common = {"threads": 1, "out": f"{folder}/run", "optimizer.name": "adam"}
        if tables:
            common["simulation.fleet" if "[[device]]" in tables else "simulation.faults"] = str(
                fleet
            )
        settings = load(None, {**common, "optimizer.learning_rate": 0.01, **overrides})
        with redirect_stdout(sys.stderr):  # how the devices are computed
            run_engine(with_fleet(settings), on_round=lambda _: None, resume=False)
        yield read_rows(Path(folder) / "run")


def idle(rounds: int) -> str:
    """Return the table of idle time."""
    table = []
    for name, (row, plan) in FLEETS.items():
        fleet = SIXTEENFOLD.read_text().replace("[[device]]\n", f"[[device]]\n{row}\n")
        overrides = {"task": "examples/synthetic.py:Synthetic", "rounds": rounds, **plan}
        with simulated(overrides, fleet) as found:
            settled = [one for one in found if one["round"] > SETTLING_ROUNDS]
            shares = [share for one in settled if (share := idle_time(one).share) is not None]
        examples = statistics.fmean(one["num_examples"] for one in settled)
        seconds = f"{found[-1]['slowest_client_seconds']:.2f} s"
        table.append((name, f"{statistics.fmean(shares):.1%}", seconds, f"{examples:,.0f}"))
    return markdown(("plan", "idle", "a round takes", "examples a round"), table)


def liars(rounds: int) -> str:
    """Return the table of liars."""
    table = []
    for name, liar in LIARS.items():
        accuracies, refused = [], []
        for seed in SEEDS:
            overrides = {"task": "examples/digits.py:Digits", "simulation.clients": DEVICES}
            overrides |= {"seed": seed, "rounds": rounds, "evaluation.every_rounds": rounds}
            with simulated(overrides, f"[[liar]]\n{liar}\n" if liar else "") as found:
                accuracies.append(found[-1]["metrics"]["test_accuracy"])
                refused.append(sum(row["num_outliers"] for row in found))
        shares = statistics.fmean(accuracies), min(accuracies), max(accuracies)
        percents = (f"{share:.1%}" for share in shares)
        table.append((name, *percents, f"{statistics.fmean(refused):,.0f}"))
    return markdown(("liars", "mean", "from", "to", "updates refused"), table)


def dropouts(rounds: int) -> str:
    """Return the table of masked runs in which devices drop out."""
    table = []
    for name, (mode, devices, dropout, plan) in DROPOUTS.items():
        columns, num_aborted, num_sessions = [], 0, 0
        for masks in ("off", mode):
            for share in (0.0, dropout):
                overrides = {"task": "examples/digits.py:Digits", "rounds": rounds, **plan}
                overrides |= {"simulation.clients": devices, "simulation.dropout": share}
                overrides |= {"secure.aggregation": masks, "cohort.max_aborted_rounds": 50}
                overrides["evaluation.every_rounds"] = rounds
                accuracies = []
                for seed in SEEDS:
                    with simulated({**overrides, "seed": seed}, "") as found:
                        accuracies.append(f"{found[-1]['metrics']['test_accuracy']:.1%}")
                        if masks != "off" and share:
                            num_aborted += (aborted := sum(row["num_aborted"] for row in found))
                            num_sessions += aborted + rounds
                columns.append(", ".join(accuracies))
        secure = Settings().secure
        computed = abort_probability(
            devices,
            dropout=dropout,
            mode=mode,
            min_members=secure.min_members,
            min_survivors=secure.min_survivors,
        )
        sessions = f"{num_aborted} of {num_sessions} ({num_aborted / num_sessions:.1%})"
        table.append((f"{name}, P = {dropout}", *columns, sessions, f"{computed:.1%}"))
    header = ("", "plain, none", "plain, P", "masked, none", "masked, P", "sessions aborted")
    return markdown((*header, "computed"), table)


PARTS = {
    "idle": (idle, IDLE_ROUNDS),
    "liars": (liars, LIARS_ROUNDS),
    "dropouts": (dropouts, SESSION_ROUNDS),
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    chosen = parser.parse_args()
    table, rounds = PARTS[chosen.part]
    print(table(SETTLING_ROUNDS + 1 if chosen.quick else rounds))


if __name__ == "__main__":
    main()
