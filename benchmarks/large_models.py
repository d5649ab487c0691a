"""Memory and time of a device that trains a large language model, beside bare loops and peers.

A real server runs outside of the cgroup, ``headwater-client`` within it, as a user types it: with
the check of the task. One table has a row for each of ``--rows``:

* ``bare``, ``adamw``, ``trainer``, ``fabric``: see ``benchmarks.large_model_loops``; no limit.
  ``trainer`` and ``fabric`` need transformers, accelerate and lightning-fabric in this Python; a
  row whose package is missing says so. A venv with ``--system-site-packages`` may hold them.
* ``client:4.0``: a device that may use 4.0 GB. ``masked:4.0``: the same in a round of
  three devices with masks; the other two have no limit.

A row has its peak in MB (of its cgroup, version 1 or 2; root is needed), the seconds of a
micro-batch (of a device the last round's mean, of a loop that of all but the first and the last,
which has the optimizer's step), and of a device the micro-batches that the time from its start to
its first plan is worth. ``--phases`` adds the peak of each phase of a device (cgroup version 1).

    python -m benchmarks.large_models --steps 8 --rounds 1
    python -m benchmarks.large_models --steps 32 --rounds 1 --rows bare client:4.0
    python -m benchmarks.large_models --steps 8 --rounds 1 --rows client:4.0 masked:4.0
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
from pathlib import Path

from benchmarks import serving
from benchmarks.confine import Cage, Confinement, caged, can_make_cgroups
from benchmarks.large_model_loops import NEEDS, missing
from benchmarks.measure import ROOT, Figures, argument_parser, report

TASK = "benchmarks/tasks.py:Language"
GB, MB = 10**9, 10**6
SIZES = {  # layers, width, vocabulary, tokens of an example
    "tiny": "2 64 512 32",
    "60M": "10 512 50257 512",
    "125M": "12 768 50257 512",
    "350M": "24 1024 50257 512",
}
NO_LIMIT_BYTES = 64 * GB
ROWS = ("bare", "adamw", "trainer", "fabric", "client:4.0", "client:3.4")
MASKED_DEVICES = 3
LIMIT_SECONDS = 14_400.0

# headwater-client itself; each phase adds a line to the file that the first argument names.
CLIENT = """
import json, sys, time
notes, usage, sets_back = open(sys.argv[1], "a", buffering=1), sys.argv[2], sys.argv[3] == "1"

def begin(phase):
    with open(usage, "r+" if sets_back else "r") as file:
        peak = int(file.read())
        if sets_back:
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
from headwater.client.transport.upload import Upload
for owner, name, phase in (
    (Trainer, "__init__", "build"), (Trainer, "check", "check"), (Trainer, "measure", "probe"),
    (Trainer, "train", "train"), (Exchange, "begin_image", "receive"),
    (Upload, "send", "send"),
):
    phased(owner, name, phase)
try:
    app(args=sys.argv[4:])
finally:
    begin("end")
"""


def loop(kind: str, size: str, *, num_steps: int) -> Figures:
    """Return the peak of a loop and its seconds per micro-batch."""
    if absent := missing(kind):
        return {"left_out": f"{', '.join(absent)} not installed"}
    with caged(Confinement(memory_bytes=NO_LIMIT_BYTES)) as cage:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.large_model_loops", kind, str(num_steps)],
            cwd=ROOT,
            env=_environment(size),
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=cage.enter,
            check=False,
        )
        peak = cage.peak_bytes()
    seconds = [float(line) for line in done.stdout.splitlines() if line[:1].isdigit()]
    if done.returncode:
        return {"failed": done.returncode}
    return {
        "peak_mb": peak // MB,
        "micro_batch_seconds": statistics.mean(seconds[1:-1] or seconds[-1:]),
    }


def client(
    size: str,
    *,
    num_steps: int,
    num_rounds: int,
    limit_bytes: int,
    is_masked: bool = False,
    has_phases: bool = False,
) -> Figures:
    """Return the peak, the pace and the start of a device, and on request its phases."""
    num_devices = MASKED_DEVICES if is_masked else 1
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-")))
        os.environ["HEADWATER_BENCHMARK_DECODER"] = SIZES[size]  # for the server
        settings = {
            "task": TASK,
            "rounds": num_rounds,
            "out": str(folder / "out"),
            "cohort.min_clients": num_devices,
            "plan.accumulation_steps": num_steps,
            "plan.micro_batch_size": 1,
            "optimizer.name": "sgd",
            "secure.aggregation": "semi-honest" if is_masked else "off",
        }
        running = stack.enter_context(serving.server(settings, limit_seconds=LIMIT_SECONDS))
        cage = stack.enter_context(caged(Confinement(memory_bytes=limit_bytes)))
        notes = folder / "notes"
        flags = ["--server", f"127.0.0.1:{running.port}", "--task", TASK]
        flags += ["--num-parts", str(num_devices), "--once"]
        for part in range(1, num_devices):
            other = [sys.executable, "-m", "headwater.client", *flags, "--part", str(part)]
            other += ["--name", f"other-{part}", "--state", str(folder / f"other-{part}")]
            stack.callback(serving.end, subprocess.Popen(other, cwd=ROOT, env=_environment(size)))
        sets_back = has_phases and cage.version == 1
        command = [sys.executable, "-c", CLIENT, str(notes), str(_usage(cage)), str(int(sets_back))]
        command += [*flags, "--name", "device", "--state", str(folder / "state")]
        begun = time.time()
        device = subprocess.Popen(command, cwd=ROOT, env=_environment(size), preexec_fn=cage.enter)
        stack.callback(serving.end, device)
        threading.Thread(target=_end_with, args=(device, running.process), daemon=True).start()
        rounds = sum(1 for _ in running.rows())
        serving.end(device)
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
        lines.append(["", time.time(), cage.peak_bytes()])
        kills = cage.num_kills()
    if not kills and [name for name, _, _ in lines] == ["import", ""]:
        raise RuntimeError("the device's process failed before its command began, see above")
    phases = [(name, at, after[1], after[2]) for (name, at, _), after in itertools.pairwise(lines)]
    trained = [(at, end) for name, at, end, _ in phases if name == "train"]
    seconds = (trained[-1][1] - trained[-1][0]) / num_steps if trained else None
    figures: Figures = {
        "is_killed": bool(kills),
        "rounds": rounds,
        "peak_mb": max(peak for _, _, peak in lines) // MB,
        "micro_batch_seconds": seconds,
        "start_in_micro_batches": (trained[0][0] - begun) / seconds if seconds else None,
    }
    if has_phases:
        figures["phases"] = {
            f"{number:02} {name}": f"at {at - begun:.1f} s, {end - at:.1f} s, {peak // MB} MB"
            for number, (name, at, end, peak) in enumerate(phases)
        }
    return figures


def _end_with(device: subprocess.Popen[bytes], server: subprocess.Popen[str]) -> None:
    """End the server when its only device has ended: it would wait for it forever."""
    device.wait()
    time.sleep(5.0)
    server.terminate()


def _usage(cage: Cage) -> Path:
    name = "memory.peak" if cage.version == 2 else "memory.max_usage_in_bytes"
    return cage.folders["memory"] / name


def _environment(size: str) -> dict[str, str]:
    return {**serving.environment(), "HEADWATER_BENCHMARK_DECODER": SIZES[size]}


def main() -> None:
    """Measure the rows, one after another, and report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", default="350M", choices=SIZES)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"of {' '.join(ROWS)} masked:GB")
    parser.add_argument("--steps", type=int, default=8, help="micro-batches in a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--phases", action="store_true", help="the peak of each phase of a device")
    chosen = parser.parse_args()
    if not can_make_cgroups():
        report({"figures": "no cgroup can be made here"}, as_json=chosen.json, doc=__doc__)
        return
    size, num_steps = ("tiny", 3) if chosen.quick else (chosen.size, chosen.steps)
    figures: Figures = {}
    for row in chosen.rows or (("bare", "client:4.0") if chosen.quick else ROWS):
        kind, _, limit = row.partition(":")
        if kind in NEEDS:
            figures[row] = loop(kind, size, num_steps=num_steps)
        else:
            figures[row] = client(
                size,
                num_steps=num_steps,
                num_rounds=chosen.rounds,
                limit_bytes=int(float(limit) * GB),
                is_masked=kind == "masked",
                has_phases=chosen.phases,
            )
        if not chosen.json:
            print(row, figures[row], flush=True)
    bare = figures.get("bare", {}).get("micro_batch_seconds")
    for one in figures.values():
        if bare and one.get("micro_batch_seconds"):
            one["seconds_over_bare"] = one["micro_batch_seconds"] / bare
    report({"figures": figures}, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
