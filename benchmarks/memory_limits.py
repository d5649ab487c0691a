"""What becomes of a device as its memory limit falls from what it needs to half of that.

A perceptron, a CNN and a transformer on texts of unequal length each run ``headwater-client`` as a
user types it (with the check of the task) against a real server outside of the cgroup. The first
run has no limit; its peak, as the cgroup counts it, is what the device needs. Then follow limits
from that down to half of it. Each run ends ``trained`` (with the cgroup's peak), ``refused`` (with
the name of the error), or ``killed`` by the kernel, which must never happen.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import serving
from benchmarks.confine import Cage, Confinement, caged, can_make_cgroups
from benchmarks.measure import ROOT, Figures, argument_parser, report

MB = 10**6
NO_LIMIT = 16_000 * MB
TASKS = {
    "perceptron": "benchmarks/tasks.py:WidePerceptron",
    "cnn": "benchmarks/tasks.py:Pictures",
    "ragged": "benchmarks/tasks.py:RaggedTexts",
}
SHARES = (1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
PLAN = {"plan.effective_batch_size": 32}
LIMIT_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a device's run ended; ``error`` is the name of what it or the server refused."""

    end: Literal["trained", "refused", "killed", "unclear"]
    error: str = ""
    peak_bytes: int = 0
    text: str = ""

    @property
    def shown(self) -> str:
        """The outcome in a few words."""
        return " ".join([self.end, self.error or f"peak {self.peak_bytes // MB} MB"])


def run(
    task: str,
    limit_bytes: int,
    *,
    num_rounds: int = 2,
    plan: Mapping[str, Any] = PLAN,
    flags: Sequence[str] = (),
) -> Outcome:
    """Run a server, and one device in a cgroup of so many bytes."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-")))
        settings = {
            "task": task,
            "rounds": num_rounds,
            "threads": 1,
            "out": str(folder / "out"),
            "cohort.min_clients": 1,
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 0.001,
            **plan,
        }
        running = stack.enter_context(serving.server(settings, limit_seconds=LIMIT_SECONDS))
        cage = stack.enter_context(caged(Confinement(memory_bytes=limit_bytes)))
        log = folder / "log"
        with log.open("w") as written:
            device = _start(cage, running.port, task, folder, written, flags)
        stack.callback(serving.end, device)
        threading.Thread(target=_end_with, args=(device, running.process), daemon=True).start()
        num_done = sum(1 for _ in running.rows())
        with contextlib.suppress(subprocess.TimeoutExpired):
            device.wait(20)
        peak = cage.peak_bytes()
        kills = cage.num_kills()
        text = log.read_text()
    error = next((word for word in ("OutOfMemory",) if word in text), "")
    if kills or (device.returncode or 0) < 0:
        return Outcome(end="killed", peak_bytes=peak, text=text)
    if num_done == num_rounds and not device.returncode:
        return Outcome(end="trained", peak_bytes=peak, text=text)
    return Outcome(end="refused" if error else "unclear", error=error, peak_bytes=peak, text=text)


def _start(
    cage: Cage, port: int, task: str, folder: Path, log: Any, flags: Sequence[str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headwater.client", "--server", f"127.0.0.1:{port}"]
    command += ["--task", task, "--name", "device", "--state", str(folder / "state"), "--once"]
    return subprocess.Popen(
        [*command, "--threads", "1", *flags],
        cwd=ROOT,
        env=serving.environment() | {"OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=cage.enter,
    )


def _end_with(device: subprocess.Popen[bytes], server: subprocess.Popen[str]) -> None:
    """End the server when its only device has ended: it would wait for it forever."""
    device.wait()
    time.sleep(3.0)
    server.terminate()


def sweep(task: str, shares: Sequence[float]) -> Figures:
    """Return the outcome for each limit, from what the task needs down to half of it."""
    needed = run(task, NO_LIMIT)
    figures: Figures = {"no limit": needed.shown}
    for share in shares:
        limit = int(share * needed.peak_bytes)
        found = run(task, limit)
        figures[f"{share:.2f}, {limit // MB} MB"] = found.shown
        print(task, share, limit // MB, found.shown, file=sys.stderr, flush=True)
        if found.end in ("killed", "unclear"):
            print(found.text, file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Run the sweeps and report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", choices=TASKS, help="this model alone")
    chosen = parser.parse_args()
    if not can_make_cgroups():
        report({"cnn": "no cgroup can be made here"}, as_json=chosen.json, doc=__doc__)
        return
    shares = (0.6,) if chosen.quick else SHARES
    names = ["cnn"] if chosen.quick else [chosen.only] if chosen.only else list(TASKS)
    figures = {name: sweep(TASKS[name], shares) for name in names}
    report(figures, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
