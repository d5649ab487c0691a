"""Peak memory and time of a device that trains a large language model, phase by phase, in a cgroup.

A real server runs outside of the cgroup, ``headwater-client`` within it, as a user types it: with
the check of the task. At the start of each phase the cgroup's peak (memory.max_usage_in_bytes of
version 1, which must be mounted) is read and set back. ``bare`` is the plain loop of PyTorch on the
same model, loss and examples, in a cgroup of its own: ``loss.backward()`` K times.

``--size`` is that of the decoder, ``--limit`` the GB that each cgroup may use. A phase has the
seconds at which it began and which it took, and its peak in MB; ``micro_batch_seconds`` is the last
round's mean, of ``bare`` that of all but the first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import serving
from benchmarks.confine import Cage, Confinement, caged, can_make_cgroups
from benchmarks.measure import ROOT, Figures, argument_parser, report

TASK = "benchmarks/tasks.py:Language"
GB, MB = 10**9, 10**6
SIZES = {  # layers, width, vocabulary, tokens of an example
    "tiny": "2 64 512 32",
    "60M": "10 512 50257 512",
    "125M": "12 768 50257 512",
    "350M": "24 1024 50257 512",
}
NO_LIMIT = 64.0
LIMIT_SECONDS = 14_400.0

# headwater-client itself; each phase adds a line to the file that the first argument names.
CLIENT = """
import json, sys, time
notes, usage = open(sys.argv[1], "a", buffering=1), sys.argv[2]

def begin(phase):
    with open(usage, "r+") as file:
        peak = int(file.read())
        file.seek(0)
        file.write("0")
    notes.write(json.dumps([phase, time.time(), peak]) + "\\n")

def phased(owner, name, phase):
    plain = getattr(owner, name)
    def wrapped(*args, **kwargs):
        begin(phase)
        found = plain(*args, **kwargs)
        if not hasattr(found, "__await__"):
            begin("rest")
        return found
    setattr(owner, name, wrapped)

begin("import")
from headwater.client.cli import app
from headwater.client.trainer.trainer import Trainer
from headwater.client.transport.exchange import Exchange
for owner, name, phase in (
    (Trainer, "__init__", "build"), (Trainer, "check", "check"), (Trainer, "measure", "probe"),
    (Trainer, "train", "train"), (Exchange, "begin_image", "receive"),
    (Exchange, "_send_reply", "send"),
):
    phased(owner, name, phase)
try:
    app(args=sys.argv[3:])
finally:
    begin("end")
"""

BARE = """
import json, sys, time
import torch
from benchmarks.tasks import Language
from headwater.common.model.chunked_cross_entropy import adding_in_place
torch.set_num_threads(int(sys.argv[1]))
task = Language()
model, examples = task.new_model(), task.train_examples(data=None, part=0, num_parts=1)
for step in range(int(sys.argv[2])):
    start = time.perf_counter()
    loss, _ = task.loss_sum(model, [examples.tensors[0][step : step + 1]])
    with adding_in_place():
        loss.backward()
    print(json.dumps(time.perf_counter() - start), flush=True)
"""


def bare(size: str, *, num_steps: int, limit_bytes: int) -> Figures:
    """Return the peak of the plain loop and its seconds per micro-batch."""
    num_threads = len(os.sched_getaffinity(0))
    with caged(Confinement(memory_bytes=limit_bytes)) as cage:
        done = subprocess.run(
            [sys.executable, "-c", BARE, str(num_threads), str(num_steps)],
            cwd=ROOT,
            env=_environment(size),
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=cage.enter,
            check=False,
        )
        peak = int(_usage(cage).read_text())
    seconds = [float(line) for line in done.stdout.splitlines()]
    return {
        "is_killed": done.returncode < 0,
        "peak_mb": peak // MB,
        "micro_batch_seconds": statistics.mean(seconds[1:]) if seconds[1:] else None,
    }


def client(
    size: str, *, num_steps: int, num_rounds: int, limit_bytes: int, flags: Sequence[str] = ()
) -> Figures:
    """Return the peak and the seconds of each phase of a device."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-")))
        os.environ["HEADWATER_BENCHMARK_DECODER"] = SIZES[size]  # for the server
        settings = {
            "task": TASK,
            "rounds": num_rounds,
            "out": str(folder / "out"),
            "cohort.min_clients": 1,
            "plan.accumulation_steps": num_steps,
            "plan.micro_batch_size": 1,
            "optimizer.name": "sgd",
        }
        running = stack.enter_context(serving.server(settings, limit_seconds=LIMIT_SECONDS))
        cage = stack.enter_context(caged(Confinement(memory_bytes=limit_bytes)))
        notes = folder / "notes"
        command = [sys.executable, "-c", CLIENT, str(notes), str(_usage(cage))]
        command += ["--server", f"127.0.0.1:{running.port}", "--task", TASK, "--name", "device"]
        command += ["--state", str(folder / "state"), *flags]
        begun = time.time()
        device = subprocess.Popen(command, cwd=ROOT, env=_environment(size), preexec_fn=cage.enter)
        stack.callback(serving.end, device)
        threading.Thread(target=_end_with, args=(device, running.process), daemon=True).start()
        rounds = sum(1 for _ in running.rows())
        serving.end(device)
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
        lines.append(["", time.time(), int(_usage(cage).read_text())])
        kills = cage.num_kills()
    phases = [
        f"{phase} at {at - begun:.1f} s, {after[1] - at:.1f} s, {after[2] // MB} MB"
        for (phase, at, _), after in itertools.pairwise(lines)
    ]
    trained = [
        after[1] - at for (phase, at, _), after in itertools.pairwise(lines) if phase == "train"
    ]
    return {
        "is_killed": bool(kills),
        "rounds": rounds,
        "peak_mb": max(peak for _, _, peak in lines) // MB,
        "micro_batch_seconds": trained[-1] / num_steps if trained else None,
        "phases": dict(enumerate(phases)),
    }


def _end_with(device: subprocess.Popen[bytes], server: subprocess.Popen[str]) -> None:
    """End the server when its only device has ended: it would wait for it forever."""
    device.wait()
    time.sleep(5.0)
    server.terminate()


def _usage(cage: Cage) -> Path:
    return cage.folders["memory"] / "memory.max_usage_in_bytes"


def _environment(size: str) -> dict[str, str]:
    return {**serving.environment(), "HEADWATER_BENCHMARK_DECODER": SIZES[size]}


def main() -> None:
    """Run the bare loop, then the device, and report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", default="350M", choices=SIZES)
    parser.add_argument("--limit", type=float, default=NO_LIMIT, help="GB that each may use")
    parser.add_argument("--steps", type=int, default=32, help="micro-batches in a round")
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    if not can_make_cgroups():
        report({"figures": "no cgroup can be made here"}, as_json=chosen.json, doc=__doc__)
        return
    size, num_steps = ("tiny", 2) if chosen.quick else (chosen.size, chosen.steps)
    limit_bytes = int(chosen.limit * GB)
    figures = {
        "bare": bare(size, num_steps=num_steps, limit_bytes=limit_bytes),
        "client": client(
            size, num_steps=num_steps, num_rounds=chosen.rounds, limit_bytes=limit_bytes
        ),
    }
    report({"figures": figures}, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
