"""What the benchmarks share: pairing, medians, memory, the machine, and one line of JSON.

A machine that others use too is slow at one moment and fast at the next. Therefore the things to
compare take turns, in an order that rotates, and a figure is the median of the ratios of neighbours
rather than the ratio of two medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

Figures = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
MODULES = {"accelerate": "accelerate", "fabric": "lightning"}


def arguments(
    doc: str | None, *, minutes: float | None = None, **parts: Sequence[str]
) -> argparse.Namespace:
    """Read the flags that every script has, and ``--minutes`` where there is a default for it.

    ``parts`` are hidden ones, for child processes.
    """
    parser = argument_parser(doc)
    if minutes is not None:
        parser.add_argument("--minutes", type=float, default=minutes, help="for how long")
    for name, choices in parts.items():
        parser.add_argument(f"--{name}", choices=choices or None, help=argparse.SUPPRESS)
    return parser.parse_args()


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every script has."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON, no table")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    return parser


def has_peer(name: str) -> bool:
    """Tell whether a peer is installed (the extra ``benchmarks``)."""
    return util.find_spec(MODULES[name]) is not None


def report(figures: Figures, *, as_json: bool, doc: str | None) -> None:
    """Print the figures as a table for people, or as one line of JSON."""
    figures = {**figures, "machine": machine()}
    if as_json:
        print(json.dumps(figures))
        return
    print((doc or "").partition("\n")[0])
    for name, value in _flat(figures):
        print(f"  {name:<58} {value:.5g}" if isinstance(value, float) else f"  {name:<58} {value}")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; all columns but the first are aligned to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value))
    return rows


def machine() -> Figures:
    """Return the machine and the versions that the figures hold for."""
    names = ("torch", "flwr", "grpcio", "numpy", "cryptography", "accelerate", "lightning")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1_minute": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
        **versions,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def take_turns(
    loops: Mapping[str, Callable[[], None]], *, turns: int, seconds_each: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run the loops by turns; return each turn's seconds per call, by the wall and of the CPU.

    A turn repeats its loop for about ``seconds_each``. The order rotates, so that nobody always
    runs behind the same neighbour. Two calls of each come first and are not counted. The CPU's
    seconds (of all threads) leave out the time that other processes took from this one.
    """
    calls = {name: _calls(loop, seconds_each) for name, loop in loops.items()}
    wall: dict[str, list[float]] = {name: [] for name in loops}
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(calls[name]):
                loops[name]()
            cpu[name].append((time.process_time() - cpu_start) / calls[name])
            wall[name].append((time.perf_counter() - start) / calls[name])
    return wall, cpu


def _calls(loop: Callable[[], None], seconds_each: float) -> int:
    loop()
    start = time.perf_counter()
    loop()
    return max(int(seconds_each / (time.perf_counter() - start)), 1)


def ratio(seconds: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of the ratios, turn by turn."""
    return statistics.median(a / b for a, b in zip(seconds, to, strict=True))


def spread(seconds: Sequence[float], to: Sequence[float]) -> list[float]:
    """Return the first and third quartile of the ratios, turn by turn."""
    ratios = [a / b for a, b in zip(seconds, to, strict=True)]
    if len(ratios) < 2:
        return [ratios[0], ratios[0]]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [low, high]


def memory_of(pid: int | str = "self") -> dict[str, int]:
    """Return a process's memory now and at its peak, in bytes.

    ``VmHWM`` is the peak of ``VmRSS``. (ru_maxrss is not used: a process inherits it from the one
    that started it.)
    """
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem"):
            found[name] = int(value.split()[0]) * 1024
    return found


def proportional_bytes(pid: int | str = "self") -> int:
    """Return a process's proportional set size: shared pages count by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/smaps_rollup has no Pss")


def num_threads(pid: int | str = "self") -> int:
    """Return how many threads a process has."""
    return len(os.listdir(f"/proc/{pid}/task"))


def num_descriptors(pid: int | str = "self") -> int:
    """Return how many files, sockets and pipes a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def cpu_seconds(pid: int | str = "self") -> float:
    """Return the CPU time that a process has used, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reset_peak() -> None:
    """Let ``VmHWM`` begin again at the present ``VmRSS``."""
    Path("/proc/self/clear_refs").write_text("5")


def child(module: str, *flags: str) -> Figures:
    """Run ``python -m module`` and return the JSON of its last line.

    Raises:
        RuntimeError: it failed; with the end of what it wrote.

    """
    done = subprocess.run(
        [sys.executable, "-m", module, *flags], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(flags)} failed:\n{done.stderr[-3000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures
