"""Peak memory of the server, in models, with 10, 100 and 1,000 clients in a round.

The server is the real one (Intake, GrpcGrid, Training and its rounds). The devices are light
fakes in one process, which speak the real wire over loopback, each on a TCP connection of its own;
all upload at once, which is the worst case. A model is 4P bytes.

``beyond_idle_models`` is the peak of the server's resident memory (VmHWM) less that of a server
with one client and a model of 1,000 parameters, over 4P. ``beyond_connections_models`` subtracts
a server with as many clients and that small model instead: what is left is what the model costs.
``anonymous`` is the same for RssAnon, which the kernel cannot reclaim: uploads beyond
``staging_bytes`` lie in mapped files, which VmHWM counts and RssAnon does not. It is sampled every
5 ms. The target is three models, plus the optimizer's state (Adam: two models), plus
``staging_bytes``, plus two chunks of 1 MiB in flight for each client.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks import serving
from benchmarks.fake_device import FakeDevice
from benchmarks.measure import ROOT, Figures, arguments, memory_of, report
from headwater.common.model.parameters import build_model
from headwater.common.task import load_task
from headwater.common.transport.limits import CHUNK_BYTES

TASK = "benchmarks/tasks.py:Vector"
SMALL = 1_000
ROUNDS = 2
STAGING_BYTES = 64 * 2**20  # the setting's default
CASES = (
    # P, clients, optimizer
    (1_000_000, 10, "sgd"),
    (1_000_000, 100, "sgd"),
    (1_000_000, 1000, "sgd"),
    (1_000_000, 10, "adam"),
    (10_000_000, 1, "sgd"),
    (10_000_000, 1, "adam"),
    (10_000_000, 10, "sgd"),
)
QUICK_CASES = ((100_000, 1, "sgd"),)


async def run_devices(port: int, number: int) -> None:
    """Play ``number`` devices until the server says goodbye."""
    layout = build_model(load_task(TASK), seed=0).layout
    update = bytes(4 * layout.num_parameters)
    names = [f"fake-{i}" for i in range(number)]
    devices = [FakeDevice(name, layout.digest, update) for name in names]
    await asyncio.gather(*(device.run(port) for device in devices))
    print(json.dumps({"num_reconnects": sum(device.num_reconnects for device in devices)}))


class RoundsFailed(Exception):
    """The server did not commit all rounds with all devices in time."""


def peaks(
    num_parameters: int, number: int, optimizer: str, *, staging_bytes: int = STAGING_BYTES
) -> Figures:
    """Run a server with that many fakes, and return its peaks.

    ``anonymous_at_start`` is before the first device has connected.

    Raises:
        RoundsFailed: it did not get through.

    """
    settings = {
        "task": TASK,
        "rounds": ROUNDS,
        "threads": 1,
        "optimizer.name": optimizer,
        "plan.accumulation_steps": 1,
        "plan.micro_batch_size": 1,
        "cohort.min_clients": number,
        "cohort.max_aborted_rounds": 1,
        "server.staging_bytes": staging_bytes,
    }
    with serving.server(settings, num_parameters=num_parameters) as running:
        at_start = memory_of(running.process.pid)["RssAnon"]
        command = [sys.executable, "-m", "benchmarks.server_memory", "--part"]
        devices = subprocess.Popen(
            [*command, f"{running.port}/{number}"],
            cwd=ROOT,
            env=serving.environment(num_parameters),
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            rows = list(running.rows())
            told = devices.communicate(timeout=60)[0]
        except subprocess.TimeoutExpired:
            told = ""
        finally:
            serving.end(devices)
    if len(rows) != ROUNDS or any(row["num_clients"] != number for row in rows):
        raise RoundsFailed(f"{len(rows)} of {ROUNDS} rounds within {serving.LIMIT_SECONDS:.0f} s")
    return {
        "peak": max(row["memory"]["VmHWM"] for row in rows),
        "anonymous": max(row["peaks"]["RssAnon"] for row in rows),
        "anonymous_at_start": at_start,
        "file": max(row["peaks"]["RssFile"] + row["peaks"]["RssShmem"] for row in rows),
        "round_seconds": statistics.median(row["seconds"] for row in rows),
        **json.loads(told.splitlines()[-1]),
    }


def measure(cases: Any) -> Figures:
    """Measure every case beside the small models that it is held against."""
    small = {number: peaks(SMALL, number, "sgd") for number in sorted({1, *(c[1] for c in cases)})}
    adam = peaks(SMALL, 1, "adam") if any(case[2] == "adam" for case in cases) else small[1]
    idle = {"sgd": small[1], "adam": adam}
    figures: Figures = {
        "idle_peak_bytes": small[1]["peak"],
        "idle_anonymous_bytes": small[1]["anonymous"],
    }
    for number, found in small.items():
        if number > 1:
            per = (found["anonymous"] - small[1]["anonymous"]) / (number - 1)
            figures[f"bytes_per_connection_of_{number}"] = per
    for num_parameters, number, optimizer in cases:
        model = 4 * num_parameters
        case = f"P_{num_parameters}.clients_{number}.{optimizer}"
        try:
            found = peaks(num_parameters, number, optimizer)
        except RoundsFailed as failed:
            figures[case] = {"failed": str(failed)}
            continue
        staged = min(STAGING_BYTES, number * model)
        in_flight = 2 * min(CHUNK_BYTES, model) * number
        state = 2 * model if optimizer == "adam" else 0
        figures[case] = {
            "beyond_idle_models": (found["peak"] - idle[optimizer]["peak"]) / model,
            "beyond_connections_models": (found["peak"] - small[number]["peak"]) / model,
            "anonymous_beyond_idle_models": (
                (found["anonymous"] - idle[optimizer]["anonymous"]) / model
            ),
            "anonymous_beyond_connections_models": (
                (found["anonymous"] - small[number]["anonymous"]) / model
            ),
            "peak_file_bytes": found["file"],
            "target_models": (3 * model + state + staged + in_flight) / model,
            "round_seconds": found["round_seconds"],
            "num_reconnects": found["num_reconnects"],
        }
    return figures


def main() -> None:
    flags = arguments(__doc__, part=())
    if flags.part:
        port, number = map(int, flags.part.split("/"))
        asyncio.run(run_devices(port, number))
        return
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    figures = measure(QUICK_CASES if flags.quick else CASES)
    figures["staging_bytes"] = STAGING_BYTES
    figures["target"] = "anonymous_beyond_connections_models <= target_models"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
