"""What an open page costs a simulation of many devices: CPU seconds with it, as a ratio of without.

    python -m benchmarks.page_cost

Runs alternate with and without a page that reads every change; medians over the pairs. In CPU time
of the simulating process, as the reader would have a machine of its own.
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
import resource, sys
from headwater.simulation.cli import app
try:
    app()
except SystemExit:
    pass
used = resource.getrusage(resource.RUSAGE_SELF)
print("cpu", used.ru_utime + used.ru_stime)
"""


def main() -> None:
    flags = arguments(__doc__)
    clients, rounds = (20, 3) if flags.quick else (CLIENTS, ROUNDS)
    without: list[float] = []
    with_page: list[float] = []
    for _ in range(1 if flags.quick else PAIRS):
        without.append(cpu_seconds(clients, rounds, has_page=False))
        with_page.append(cpu_seconds(clients, rounds, has_page=True))
    figures: Figures = {
        "clients": clients,
        "rounds": rounds,
        "cpu_seconds_without": without,
        "cpu_seconds_with": with_page,
        "ratio": ratio(with_page, without),
        "spread": spread(with_page, without),
        "target": "1.05 at most",
    }
    report(figures, as_json=flags.json, doc=__doc__)


def cpu_seconds(clients: int, rounds: int, *, has_page: bool) -> float:
    """Return the CPU seconds of a simulation, perhaps with a page that is read to its end."""
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
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("page at "):
                url = line.split()[2]
                threading.Thread(target=read_all, args=(url,), daemon=True).start()
        process.wait()
        found = [line.split()[1] for line in lines if line.startswith("cpu ")]
        assert found, "".join(lines)
        return float(found[0])


def read_all(url: str) -> None:
    """Read every change that the page is sent, as a browser does."""
    with urllib.request.urlopen(f"{url}changes") as changes:
        while changes.read(1 << 16):
            pass


if __name__ == "__main__":
    main()
