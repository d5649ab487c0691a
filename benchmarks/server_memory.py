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
``anonymous_beyond_three_models_mib`` is what the server holds beyond an idle one, three models and
the optimizer's state.

``--limit-mib 64`` runs each case in a cgroup that allows the server 64 MiB beyond those: an idle
server's peak in a cgroup, three models and the optimizer's state. The kernel kills it if it needs
more (``is_killed``); pages of files count too, but the kernel takes those back.

    python -m benchmarks.server_memory
    python -m benchmarks.server_memory --case 350000000:10:sgd --limit-mib 64
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import serving
from benchmarks.confine import Cage, Confinement, caged
from benchmarks.fake_device import FakeDevice
from benchmarks.measure import ROOT, Figures, argument_parser, memory_of, report
from headwater.common.model.parameters import build_model
from headwater.common.task import load_task
from headwater.common.transport.limits import CHUNK_BYTES

TASK = "benchmarks/tasks.py:Vector"
SMALL = 1_000
ROUNDS = 2
STAGING_BYTES = 64 * 2**20  # the setting's default
BYTES_PER_SECOND = 20e6  # of all devices together; a slower round counts as failed
NO_LIMIT_BYTES = 64 * 2**30


class Case(NamedTuple):
    """A model of so many parameters, so many clients, and the server's optimizer."""

    num_parameters: int
    num_clients: int
    optimizer: str

    @property
    def name(self) -> str:
        return f"P_{self.num_parameters}.clients_{self.num_clients}.{self.optimizer}"

    @property
    def model_bytes(self) -> int:
        return 4 * self.num_parameters

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps."""
        return 2 * self.model_bytes if self.optimizer == "adam" else 0


CASES = (
    Case(1_000_000, 10, "sgd"),
    Case(1_000_000, 100, "sgd"),
    Case(1_000_000, 1000, "sgd"),
    Case(1_000_000, 10, "adam"),
    Case(10_000_000, 1, "sgd"),
    Case(10_000_000, 1, "adam"),
    Case(10_000_000, 10, "sgd"),
)
QUICK_CASES = (Case(100_000, 1, "sgd"),)


def case_of(text: str) -> Case:
    """Read a case from the command line: ``parameters:clients:sgd``, or adam.

    Raises:
        ArgumentTypeError: it is none.

    """
    parts = text.split(":")
    if len(parts) == 3 and parts[2] in ("sgd", "adam") and all(map(str.isdecimal, parts[:2])):
        case = Case(int(parts[0]), int(parts[1]), parts[2])
        if case.num_parameters and case.num_clients:
            return case
    raise argparse.ArgumentTypeError(f"{text!r} is not PARAMETERS:CLIENTS:sgd or adam")


async def run_devices(port: int, number: int) -> None:
    """Play ``number`` devices until the server says goodbye."""
    layout = build_model(load_task(TASK), seed=0).layout
    update = bytes(4 * layout.num_parameters)  # of zeros: only read, they take no memory
    sha256 = hashlib.sha256(update).digest()
    names = [f"fake-{i}" for i in range(number)]
    devices = [FakeDevice(name, layout.digest, update, sha256=sha256) for name in names]
    await asyncio.gather(*(device.run(port) for device in devices))
    print(json.dumps({"num_reconnects": sum(device.num_reconnects for device in devices)}))


class RoundsFailed(Exception):
    """The server did not commit all rounds with all devices in time."""


def peaks(case: Case, *, staging_bytes: int = STAGING_BYTES, cage: Cage | None = None) -> Figures:
    """Run a server with that many fakes, and return its peaks; the server alone is in the cage.

    ``anonymous_at_start`` is before the first device has connected.

    Raises:
        RoundsFailed: it did not get through.

    """
    num_parameters, number, optimizer = case
    limit_seconds = serving.LIMIT_SECONDS + (
        ROUNDS * 2 * number * case.model_bytes / BYTES_PER_SECOND
    )
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
    with serving.server(
        settings, num_parameters=num_parameters, limit_seconds=limit_seconds, cage=cage
    ) as running:
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
        raise RoundsFailed(f"{len(rows)} of {ROUNDS} rounds within {limit_seconds:.0f} s")
    return {
        "peak": max(row["memory"]["VmHWM"] for row in rows),
        "anonymous": max(row["peaks"]["RssAnon"] for row in rows),
        "anonymous_at_start": at_start,
        "file": max(row["peaks"]["RssFile"] + row["peaks"]["RssShmem"] for row in rows),
        "round_seconds": statistics.median(row["seconds"] for row in rows),
        **json.loads(told.splitlines()[-1]),
    }


def measure(cases: Sequence[Case], *, limit_mib: int | None = None) -> Figures:
    """Measure every case beside the small models that it is held against."""
    numbers = sorted({1, *(case.num_clients for case in cases)})
    small = {number: peaks(Case(SMALL, number, "sgd")) for number in numbers}
    has_adam = any(case.optimizer == "adam" for case in cases)
    idle = {"sgd": small[1], "adam": peaks(Case(SMALL, 1, "adam")) if has_adam else small[1]}
    figures: Figures = {
        "idle_peak_bytes": small[1]["peak"],
        "idle_anonymous_bytes": small[1]["anonymous"],
    }
    for number, found in small.items():
        if number > 1:
            per = (found["anonymous"] - small[1]["anonymous"]) / (number - 1)
            figures[f"bytes_per_connection_of_{number}"] = per
    if limit_mib is not None:
        figures["idle_cgroup_bytes"] = _idle_cgroup_bytes()
    for case in cases:
        limit = None
        if limit_mib is not None:
            needed = 3 * case.model_bytes + case.state_bytes
            limit = figures["idle_cgroup_bytes"] + needed + limit_mib * 2**20
        with caged(Confinement(memory_bytes=limit)) as cage:
            try:
                found = peaks(case, cage=cage)
            except RoundsFailed as failed:
                figures[case.name] = {"failed": str(failed), "is_killed": bool(cage.num_kills())}
                continue
        connections = small[case.num_clients]
        figures[case.name] = _of(case, found, idle=idle[case.optimizer], connections=connections)
        figures[case.name]["limit_bytes"] = limit
    return figures


def _of(case: Case, found: Figures, *, idle: Figures, connections: Figures) -> Figures:
    """Return the figures of a case, in models, beyond an idle server and beyond connections."""
    model, number = case.model_bytes, case.num_clients
    staged = min(STAGING_BYTES, number * model)
    in_flight = 2 * min(CHUNK_BYTES, model) * number
    anonymous = found["anonymous"] - idle["anonymous"]
    return {
        "beyond_idle_models": (found["peak"] - idle["peak"]) / model,
        "beyond_connections_models": (found["peak"] - connections["peak"]) / model,
        "anonymous_beyond_idle_models": anonymous / model,
        "anonymous_beyond_connections_models": (
            (found["anonymous"] - connections["anonymous"]) / model
        ),
        "anonymous_beyond_three_models_mib": (anonymous - 3 * model - case.state_bytes) / 2**20,
        "peak_file_bytes": found["file"],
        "target_models": (3 * model + case.state_bytes + staged + in_flight) / model,
        "round_seconds": found["round_seconds"],
        "num_reconnects": found["num_reconnects"],
    }


def _idle_cgroup_bytes() -> int:
    """Return the peak of an idle server in a cgroup, with the pages of files that it read first."""
    with caged(Confinement(memory_bytes=NO_LIMIT_BYTES)) as cage:
        peaks(Case(SMALL, 1, "sgd"), cage=cage)
        return cage.peak_bytes()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--case",
        type=case_of,
        action="append",
        metavar="P:CLIENTS:OPTIMIZER",
        help="measure this one, for example 350000000:10:sgd; may be given more than once",
    )
    parser.add_argument("--limit-mib", type=int, help="see above; needs root")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.part:
        port, number = map(int, flags.part.split("/"))
        asyncio.run(run_devices(port, number))
        return
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    cases = flags.case or (QUICK_CASES if flags.quick else CASES)
    figures = measure(cases, limit_mib=flags.limit_mib)
    figures["staging_bytes"] = STAGING_BYTES
    figures["target"] = "anonymous_beyond_connections_models <= target_models"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
