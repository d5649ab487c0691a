"""Resident memory of an idle device after some rounds, against the least that it could be.

``client`` is ``headwater-client`` with a model of 9,610 parameters, idle between two rounds after
several of them. ``least`` is a process that imports torch and ``flwr.clientapp`` and has run one
backward pass of the same model on the same data (``flwr.clientapp`` imports gRPC already). Both are
measured at the same time, so pages that they share count by their share in PSS.

``idle_share_of_a_core`` is the CPU time that the idle device takes in a minute of the last repeat,
over that minute: pings and the looks that its tasks take.

``has_dynamo`` says whether ``torch._dynamo`` was imported in the device: the first optimizer of
``torch.optim`` does so, and a device of ``local_steps = 1`` has none. ``by_import`` is what the
device's process grows by with each of its imports, in the order in which they come, measured in a
process of its own.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks import serving
from benchmarks.measure import (
    ROOT,
    Figures,
    arguments,
    cpu_seconds,
    memory_of,
    proportional_bytes,
    report,
)

TASK = "benchmarks/tasks.py:Perceptron"
ROUNDS = 20
# The server pauses for longer than the figures take, however slow the machine is.
PAUSE_SECONDS, IDLE_SECONDS = 120.0, 60.0

# headwater-client itself, which on SIGUSR1 writes the names of its modules to a file.
CLIENT = """
import os, signal, sys
def tell(*_):
    with open(sys.argv[1] + ".part", "w") as file:
        file.write("\\n".join(sys.modules))
    os.rename(sys.argv[1] + ".part", sys.argv[1])
signal.signal(signal.SIGUSR1, tell)
from headwater.client.cli import app
app(args=sys.argv[2:])
"""

LEAST = """
import importlib.util, sys, time
import torch
import flwr.clientapp
spec = importlib.util.spec_from_file_location("tasks", "benchmarks/tasks.py")
tasks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tasks)
torch.set_num_threads(1)
task = tasks.Perceptron()
model, examples = task.new_model(), task.train_examples(data=None, part=0, num_parts=1)
task.loss_sum(model, examples[:16])[0].backward()
print("ready", flush=True)
time.sleep(600)
"""

IMPORTS = (
    "torch",
    "flwr.clientapp",
    "grpc.aio",
    "typer",
    "rich.console",
    "pydantic",
    "headwater.common.settings.schema",
    "headwater.client.app",
    "headwater.client.transport.lasting_connection",
    "headwater.client.cli",
)

BY_IMPORT = """
import importlib, json, sys
def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
grown = {"python": resident()}
for name in json.loads(sys.argv[1]):
    before = resident()
    importlib.import_module(name)
    grown[name] = resident() - before
print(json.dumps(grown))
"""


def once(rounds: int, *, idle_seconds: float) -> Figures:
    """Measure the two processes side by side, and the device's idle CPU time for so long."""
    settings = {
        "task": TASK,
        "rounds": rounds + 1,
        "threads": 1,
        "plan.accumulation_steps": 4,
        "plan.micro_batch_size": 16,
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-")))
        least = _started(stack, LEAST)
        assert least.stdout is not None
        least.stdout.readline()
        pause = (rounds, PAUSE_SECONDS + idle_seconds)
        running = stack.enter_context(serving.server(settings, pause=pause))
        told = folder / "modules"
        flags = serving.client_flags(running.port, TASK, 0, folder)
        client = _started(stack, CLIENT, str(told), *flags)
        for row in running.rows():
            if row["round"] == rounds:
                break
        time.sleep(1.0)
        figures: Figures = {}
        for name, process in {"client": client, "least": least}.items():
            figures[f"{name}_rss_bytes"] = memory_of(process.pid)["VmRSS"]
            figures[f"{name}_anonymous_bytes"] = memory_of(process.pid)["RssAnon"]
            figures[f"{name}_pss_bytes"] = proportional_bytes(process.pid)
        if idle_seconds:
            before = cpu_seconds(client.pid)
            time.sleep(idle_seconds)
            spent = cpu_seconds(client.pid) - before
            figures["idle_share_of_a_core"] = spent / idle_seconds
        figures["has_dynamo"] = "torch._dynamo" in _modules(client, told)
        running.process.kill()  # rather than wait for the end of its pause
    return figures


def _modules(client: subprocess.Popen[str], told: Path) -> list[str]:
    """Return the names of the modules that a client has imported.

    Raises:
        RuntimeError: it has ended.
    """
    os.kill(client.pid, signal.SIGUSR1)
    while not told.exists():
        if client.poll() is not None:
            raise RuntimeError(f"the client ended with status {client.returncode}")
        time.sleep(0.05)
    return told.read_text().splitlines()


def _started(stack: ExitStack, code: str, *flags: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *flags],
        cwd=ROOT,
        env=serving.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(serving.end, process)
    return process


def by_import() -> dict[str, int]:
    """Return what each import adds to the resident memory of a process."""
    done = subprocess.run(
        [sys.executable, "-c", BY_IMPORT, json.dumps(IMPORTS)],
        cwd=ROOT,
        env=serving.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    grown: dict[str, int] = json.loads(done.stdout)
    return grown


def main() -> None:
    flags = arguments(__doc__)
    rounds, repeats, idle = (2, 1, 0.5) if flags.quick else (ROUNDS, 5, IDLE_SECONDS)
    found = [once(rounds, idle_seconds=0.0) for _ in range(repeats - 1)]
    found.append(once(rounds, idle_seconds=idle))
    figures: Figures = {
        name: statistics.median(f[name] for f in found) for name in found[0] if "bytes" in name
    }
    for kind in ("rss", "pss", "anonymous"):
        figures[f"{kind}_ratio"] = statistics.median(
            f[f"client_{kind}_bytes"] / f[f"least_{kind}_bytes"] for f in found
        )
    figures["idle_share_of_a_core"] = found[-1]["idle_share_of_a_core"]
    figures["has_dynamo"] = any(f["has_dynamo"] for f in found)
    figures["by_import_bytes"] = by_import()
    figures["rounds"] = rounds
    figures["target"] = "rss_ratio and pss_ratio <= 1.1, idle_share_of_a_core < 0.005"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
