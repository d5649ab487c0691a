"""What an open page costs a simulation of many devices: seconds with it, as a ratio of without.

    python -m benchmarks.page_cost

Runs with a page that is read to its end, and runs without one, take turns; which of a pair comes
first alternates. Medians over the pairs, of the simulating process's CPU seconds and of the seconds
that passed. The reader is another process; on a machine of two cores it has one of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import urllib.request

from benchmarks.measure import ROOT, Figures, arguments, ratio, report, spread

CLIENTS, ROUNDS, PAIRS = 1000, 200, 5
RUN = """
import resource, time
from headwater.simulation.cli import app
begun = time.perf_counter()
try:
    app()
except SystemExit:
    pass
used = resource.getrusage(resource.RUSAGE_SELF)
print("seconds", used.ru_utime + used.ru_stime, time.perf_counter() - begun)
"""


def main() -> None:
    flags = arguments(__doc__)
    clients, rounds = (20, 3) if flags.quick else (CLIENTS, ROUNDS)
    cpu: dict[bool, list[float]] = {False: [], True: []}
    wall: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(1 if flags.quick else PAIRS):
        for has_page in (False, True) if pair % 2 == 0 else (True, False):
            used, passed = seconds_of(clients, rounds, has_page=has_page)
            cpu[has_page].append(used)
            wall[has_page].append(passed)
    figures: Figures = {
        "clients": clients,
        "rounds": rounds,
        "cpu_seconds_without": cpu[False],
        "cpu_seconds_with": cpu[True],
        "cpu_ratio": ratio(cpu[True], cpu[False]),
        "cpu_spread": spread(cpu[True], cpu[False]),
        "wall_seconds_without": wall[False],
        "wall_seconds_with": wall[True],
        "wall_ratio": ratio(wall[True], wall[False]),
        "wall_spread": spread(wall[True], wall[False]),
        "target": "1.05 at most",
    }
    report(figures, as_json=flags.json, doc=__doc__)


def seconds_of(clients: int, rounds: int, *, has_page: bool) -> tuple[float, float]:
    """Return a simulation's CPU seconds and the seconds that passed, perhaps with an open page."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *("--task", f"{ROOT}/examples/digits.py:Digits"),
            *("--clients", str(clients), "--rounds", str(rounds), "--out", f"{folder}/run"),
            *("--examples-per-device", "20", "--partition", "iid", "--no-check"),
            *(["--page", "127.0.0.1:0"] if has_page else []),
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines, reader = [], None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("page at "):
                url = line.split()[2]
                reader = threading.Thread(target=read_all, args=(url,), daemon=True)
                reader.start()
        process.wait()
        assert (reader is not None) == has_page, "".join(lines)
        found = [line.split()[1:] for line in lines if line.startswith("seconds ")]
        assert found, "".join(lines)
        used, passed = map(float, found[0])
        return used, passed


def read_all(url: str) -> None:
    """Read every change that the page is sent, as a browser does."""
    asked = urllib.request.Request(f"{url}changes", headers={"accept-encoding": "gzip"})
    with urllib.request.urlopen(asked) as changes:
        while changes.read(1 << 16):
            pass


if __name__ == "__main__":
    main()
