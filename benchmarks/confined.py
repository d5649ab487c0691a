"""Seconds in which real devices of unequal memory and speed finish, and whether any is killed.

Four devices, each a process over real gRPC: confined to 400 MB by a cgroup, to 600 MB by
RLIMIT_DATA, to 1 GB by a cgroup, and not at all; and each to another share of a core. The planner
knows nothing of them but what they report. Convolutions on pictures take about 2 MB an example, so
the smallest cannot hold a micro-batch that suits the largest.

``finish_spread`` is 1 - min/max of the devices' seconds in a round, from the third round on: the
median and the worst. ``fixed`` is the peer in the same run: the same devices with the same K and
micro-batch for all, of about as many examples a round. Then the limit of the third is lowered
while it works (``lowered``).
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import serving
from benchmarks.confine import Cage, Confinement, caged
from benchmarks.measure import ROOT, Figures, arguments, report
from headwater.server.operations.round_log import read_rows

TASK = "benchmarks/tasks.py:Pictures"
MB = 1_000_000
FLEET = (
    Confinement(memory_bytes=400 * MB, by="cgroup", cores=0.1),
    Confinement(memory_bytes=600 * MB, by="rlimit", cores=0.2),
    Confinement(memory_bytes=1000 * MB, by="cgroup", cores=0.3),
    Confinement(cores=0.4),
)
SETTLED_ROUND = 3


def run(
    fleet: Sequence[Confinement],
    *,
    num_rounds: int,
    plan: Mapping[str, Any],
    lower: tuple[int, int] | None = None,
) -> Figures:
    """Run a fleet; ``lower`` = (device, bytes) lowers that device's limit in the middle.

    Raises:
        RuntimeError: the run ended early, or a device was killed.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-")))
        settings = {
            "task": TASK,
            "rounds": num_rounds,
            "threads": 1,
            "out": str(folder / "out"),
            "cohort.min_clients": len(fleet),
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 0.01,
            **plan,
        }
        running = stack.enter_context(serving.server(settings))
        cages = [stack.enter_context(caged(chosen)) for chosen in fleet]
        devices = [
            _start(stack, cage, running.port, part, folder, num_parts=len(fleet))
            for part, cage in enumerate(cages)
        ]
        _end_with(devices, running.process)
        is_lowered = False
        for row in running.rows():
            if lower is not None and not is_lowered and row["round"] >= SETTLED_ROUND:
                is_lowered = True
                device, num_bytes = lower
                lowering = _lower(cages[device], devices[device], num_bytes)
                stack.callback(lowering.join)
        rows = read_rows(folder / "out")
        kills = sum(cage.num_kills() for cage in cages)
        status = [device.wait(30) for device in devices]
    if len(rows) != num_rounds or kills or any(status):
        raise RuntimeError(f"{len(rows)} of {num_rounds} rounds, {kills} kills, ends {status}")
    return _figures(rows)


def _start(
    stack: contextlib.ExitStack, cage: Cage, port: int, part: int, folder: Path, *, num_parts: int
) -> subprocess.Popen[bytes]:
    flags = serving.client_flags(port, TASK, part, folder / "state")
    device = subprocess.Popen(
        [sys.executable, "-m", "headwater.client", *flags, "--num-parts", str(num_parts)],
        cwd=ROOT,
        env=serving.environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        preexec_fn=cage.enter,
    )
    stack.callback(serving.end, device)
    return device


def _end_with(devices: Sequence[subprocess.Popen[bytes]], server: subprocess.Popen[str]) -> None:
    """End the server as soon as a device has failed: it would wait for it forever."""

    def watch() -> None:
        while server.poll() is None:
            if any(device.poll() for device in devices):
                server.terminate()
                return
            time.sleep(0.1)

    threading.Thread(target=watch, daemon=True).start()


def _lower(cage: Cage, device: subprocess.Popen[bytes], num_bytes: int) -> threading.Thread:
    """Lower a limit, again and again until the kernel can take back what is beyond it."""

    def insist() -> None:
        while device.poll() is None:
            try:
                cage.limit_memory(num_bytes, pid=device.pid)
                return
            except OSError:
                time.sleep(0.01)

    thread = threading.Thread(target=insist)
    thread.start()
    return thread


def _figures(rows: list[Figures]) -> Figures:
    settled = [row for row in rows if row["round"] >= SETTLED_ROUND]
    seconds = [[client["seconds"] for client in row["clients"]] for row in settled]
    spreads = [1 - min(of_round) / max(of_round) for of_round in seconds]
    last = sorted(rows[-1]["clients"], key=lambda client: str(client["name"]))
    return {
        "finish_spread": statistics.median(spreads),
        "finish_spread_worst": max(spreads),
        "round_seconds": statistics.median(max(of_round) for of_round in seconds),
        "examples_per_second": statistics.median(
            row["num_examples"] / row["slowest_client_seconds"] for row in settled
        ),
        "lost_micro_batches": sum(
            client["num_refused"] for row in rows for client in row["clients"]
        ),
        "dropouts": sum(len(row["refused"]) for row in rows),
        "last_round": {
            client["name"]: f"{client['num_examples']} examples in micro-batches of "
            f"{client['micro_batch_size']}, peak {client['peak_bytes'] / MB:.0f} MB, "
            f"{client['seconds']:.2f} s"
            for client in last
        },
    }


def main() -> None:
    """Run the fleet three times and report."""
    chosen = arguments(__doc__)
    num_rounds = 5 if chosen.quick else 10
    target = 400 if chosen.quick else 2000
    planned = run(FLEET, num_rounds=num_rounds, plan={"plan.effective_batch_size": target})
    size = 16
    fixed = run(
        FLEET,
        num_rounds=num_rounds,
        plan={
            "plan.accumulation_steps": round(target / len(FLEET) / size),
            "plan.micro_batch_size": size,
        },
    )
    lowered = run(
        FLEET,
        num_rounds=num_rounds,
        plan={"plan.effective_batch_size": target},
        lower=(2, 450 * MB),
    )
    figures = {"planned": planned, "fixed": fixed, "lowered": lowered}
    report(figures, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
