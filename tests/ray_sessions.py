"""Simulators on Ray, and a Ray cluster of two workers, each in a session of its own.

Ray's agents overwrite their own environment and leave their parent: the session still tells whose
they are.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from headwater.simulation.cluster.ray_cluster import ADDRESS, QUIET, RAY_FOLDER_PARENT
from tests.processes import ROOT, until

PATIENCE_SECONDS = 280

# A node that is gone is noticed within seconds, by default within half a minute; a slow one is not.
ALERT = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "5",
}
# A head that computes nothing and workers of one core each, two and one more for each line of the
# standard input, until that ends. The address is the last line. (``Cluster.shutdown`` would forget
# another Ray of this machine as well.) Ray notes the address in its usual folder, which nobody has
# made on a fresh machine.
CLUSTER = """
import os, sys
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster

os.makedirs(os.path.dirname(get_ray_address_file(None)), exist_ok=True)

alike = {"include_dashboard": False, "include_log_monitor": False}
head = {"num_cpus": 0, "temp_dir": sys.argv[1], **alike}
cluster = Cluster(True, head_node_args=head, shutdown_at_exit=False)
for _ in range(2):
    cluster.add_node(num_cpus=1, wait=False, **alike)
cluster.wait_for_nodes(timeout=200)  # a busy machine needs more than its 30 seconds
print(cluster.address, flush=True)
for _ in sys.stdin:
    cluster.add_node(num_cpus=1, wait=False, **alike)
for node in (*cluster.worker_nodes, cluster.head_node):
    try:
        cluster.remove_node(node)
    except Exception as error:  # a test has killed it
        print(error)
"""


@dataclass
class Started:
    """What a test has started, each with its descendants in a session of its own."""

    address: str | None = None
    """Of the cluster on which simulators run; None: each on a Ray of its own."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def simulate(
        self, *arguments: str | Path, out: Path, folder: Path = ROOT, engine: str = "flower-ray"
    ) -> subprocess.Popen[str]:
        """Start a simulator on Ray in a folder."""
        chosen = ("--engine", engine, "--out", out)
        found = {"PYTHONPATH": str(ROOT)}
        if self.address is not None:
            found[ADDRESS] = self.address
        return self.run("-m", "headwater.simulation", *arguments, *chosen, folder=folder, **found)

    def run(
        self, *arguments: str | Path, folder: Path = ROOT, **environment: str
    ) -> subprocess.Popen[str]:
        """Start Python."""
        inherited = {key: value for key, value in os.environ.items() if key != ADDRESS}
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env=inherited | QUIET | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def named(self, name: str) -> list[psutil.Process]:
        """Return those that run and whose name begins so."""
        return [process for process in self.alive() if name_of(process).startswith(name)]

    def alive(self) -> list[psutil.Process]:
        """Return what runs of all sessions."""
        sessions = {process.pid for process in self.processes}
        return [process for process in psutil.process_iter() if session_of(process) in sessions]

    def until_nothing_runs(self) -> None:
        """Wait for the end of all processes."""
        until(lambda: not self.alive(), what=lambda: f"the end of {self.alive()}")

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.alive():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for opened in self.processes:
            opened.communicate()


def session_of(process: psutil.Process) -> int | None:
    """Return the session of a process that still runs, else None."""
    try:
        is_done = process.status() == psutil.STATUS_ZOMBIE
        return None if is_done else os.getsid(process.pid)
    except (psutil.NoSuchProcess, OSError):
        return None


def name_of(process: psutil.Process) -> str:
    """Return a process's name; an empty one if it has ended since it was found."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a process and return what it said."""
    said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return said


def until_committed(process: subprocess.Popen[str], out: Path) -> None:
    """Wait until a simulator has committed its first round."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not (out / "checkpoint.safetensors").exists():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < end, "no round was committed"
        time.sleep(0.2)


def interrupt(process: subprocess.Popen[str]) -> None:
    """Do as a terminal does at Ctrl-C."""
    os.killpg(process.pid, signal.SIGINT)


@contextmanager
def cluster() -> Iterator[tuple[str, Started]]:
    """Run a cluster; give its address and its processes."""
    it = Started()
    with TemporaryDirectory(prefix="headwater-", dir=RAY_FOLDER_PARENT) as folder:
        try:
            process = it.run("-c", CLUSTER, folder / Path("ray"), folder=Path(folder), **ALERT)
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if re.fullmatch(r"[\d.]+:\d+", line.strip()):
                    break
            else:
                raise AssertionError("no cluster: " + "".join(lines))
            address = lines[-1].strip()
            yield address, it
            finish(process)
            it.until_nothing_runs()
        finally:
            it.end()
