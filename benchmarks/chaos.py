"""Runs every scenario of tests/chaos with real processes: does it end, and is its model exact.

What is held behind each scenario is told in docs/chaos.md. The flags name those to run; without
them all are run. What this machine does not let us do (mounts, network namespaces, a C compiler) is
left out by name.

For each scenario: ``is_passed`` (and ``why`` if it did not), ``rounds``, ``aborted`` rounds,
updates ``left_out`` of a round, ``is_unbroken`` (nobody missed a round, so that the model was held
against the simulator's bits), ``off_in_examples`` (the model's distance from the float64 reference,
in the smallest step by which one example would have moved it), ``memory_mb`` and ``descriptors`` of
the server without devices, before and after, and ``seconds`` in all.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import Figures, report
from tests.chaos import machines
from tests.chaos.runner import Outcome, run
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios import SCENARIOS, SHORT

QUICK = 1
MOST_CHARACTERS = 2000


def tried(scenario: Scenario) -> Figures:
    """Run one scenario and say what came of it."""
    if scenario.needs is not None and not machines.can(scenario.needs):
        return {"is_passed": None, "why": f"this machine has no {scenario.needs}"}
    with TemporaryDirectory(prefix="headwater-chaos-") as folder:
        try:
            return told(run(scenario, Path(folder) / "run"))
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{Path(where.filename).name}:{where.lineno}: {error}"
            return {"is_passed": False, "why": why[:MOST_CHARACTERS]}


def told(outcome: Outcome) -> Figures:
    """Return the figures of a scenario that passed."""
    return {
        "is_passed": True,
        "rounds": outcome.num_rounds,
        "aborted": outcome.num_aborted,
        "left_out": outcome.num_left_out,
        "is_unbroken": outcome.is_unbroken,
        "off_in_examples": outcome.off_in_examples,
        "memory_mb": [
            round(found.memory_bytes / 1e6, 1) for found in (outcome.before, outcome.after)
        ],
        "descriptors": [len(found.descriptors) for found in (outcome.before, outcome.after)],
        "seconds": round(outcome.seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--quick", action="store_true", help="the first of the short ones alone")
    parser.add_argument("words", nargs="*", help="only the scenarios with one of these in the name")
    chosen = parser.parse_args()
    # What was mounted and made is removed, and every process ended, whoever ends this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scenarios = SHORT[:QUICK] if chosen.quick else SCENARIOS
    if chosen.words:
        scenarios = tuple(s for s in scenarios if any(word in s.name for word in chosen.words))
    figures: Figures = {}
    for number, scenario in enumerate(scenarios, start=1):
        figures[scenario.name] = found = tried(scenario)
        line = f"{number} of {len(scenarios)}: {json.dumps({scenario.name: found})}"
        print(line, file=sys.stderr, flush=True)
    results = [found["is_passed"] for found in figures.values()]
    figures["passed"], figures["failed"] = results.count(True), results.count(False)
    report(figures, as_json=chosen.json, doc=__doc__)
    sys.exit(figures["failed"] != 0)


if __name__ == "__main__":
    main()
