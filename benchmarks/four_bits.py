"""Memory and time of a micro-batch on frozen weights in four bits, beside bfloat16.

A model of Llama's shape with LoRA of rank 8 (``benchmarks.adapters``), its weights drawn in
bfloat16. Each dtype is a process of its own, which does what a device does: it builds the model,
measures speed and memory by the probe, and trains on windows of micro-batches of one example. The
two take turns, one window each, so that neither has the machine at a better time. ``resident_mb``
is what the process holds when the model is built, ``peak_mb`` the most while it trains and
``foreseen_mb`` what the probe foresaw. ``ratio`` is the median over turns of nf4's CPU seconds over
bfloat16's, ``wall_ratio`` that of their seconds by the wall.

    python -m benchmarks.four_bits --size 370M --turns 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import IO, Any

import torch

from benchmarks.adapters import SIZE, SIZES, TASK
from benchmarks.measure import ROOT, Figures, argument_parser, report
from headwater.client.device.hardware import ThisMachine
from headwater.client.memory.peak_model import PeakMeter, resident_bytes
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState
from headwater.common.messages import Plan
from headwater.common.system.heap import release_freed_memory

MB = 10**6
DTYPES = ("bfloat16", "nf4")
TARGET = 1.15


def device(dtype: str, num_steps: int, precision: Any) -> None:
    """Build the model and print what it takes; train on a window for each line that comes in."""
    torch.set_num_threads(1)
    machine = ThisMachine()
    trainer = Trainer(TASK, batch_norm=None, check_task=False, frozen_dtype=dtype)
    trainer.machine = machine
    release_freed_memory()
    resident = resident_bytes()
    identity = Identity(name="device", data=None, part=0, num_parts=1)
    trainer.examples(identity)
    trainer.measure(identity, machine)
    known = machine.memory.known
    assert known is not None
    plan = Plan(
        round=1,
        run_seed=0,
        model_version=0,
        quota=num_steps,
        micro_batch_size=1,
        precision=precision,
    )
    begun = {
        "frozen_mb": trainer.image.layout.num_frozen_bytes / MB,
        "resident_mb": resident / MB,
        "foreseen_mb": known.now.at(1) / MB,
    }
    print(json.dumps(begun), flush=True)
    for _ in sys.stdin:
        meter, wall, cpu = PeakMeter(), time.perf_counter(), time.process_time()
        trainer.train(identity, machine, plan, SamplerState())
        row = {
            "cpu_seconds": (time.process_time() - cpu) / num_steps,
            "wall_seconds": (time.perf_counter() - wall) / num_steps,
            "peak_mb": meter.peak_bytes() / MB,
        }
        print(json.dumps(row), flush=True)


def measure(chosen: argparse.Namespace) -> Figures:
    """Return what each dtype takes, in turn."""
    size = "tiny" if chosen.quick else chosen.size
    devices = {dtype: _start(dtype, size, chosen) for dtype in DTYPES}
    found = {dtype: _row(one) for dtype, one in devices.items()}
    turns: dict[str, list[Figures]] = {dtype: [] for dtype in DTYPES}
    for turn in range(chosen.turns):
        for dtype in DTYPES[:: 1 if turn % 2 else -1]:
            stream: IO[str] = devices[dtype].stdin  # type: ignore[assignment]
            stream.write("\n")
            stream.flush()
            turns[dtype].append(_row(devices[dtype]))
    for dtype, one in devices.items():
        one.communicate()
        found[dtype] |= {
            "peak_mb": max(row["peak_mb"] for row in turns[dtype]),
            "cpu_seconds": statistics.median(row["cpu_seconds"] for row in turns[dtype]),
            "wall_seconds": statistics.median(row["wall_seconds"] for row in turns[dtype]),
        }
    ratios, walls = (_ratios(turns, kind) for kind in ("cpu_seconds", "wall_seconds"))
    return {
        "size": size,
        **found,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "wall_ratio": statistics.median(walls),
    }


def _ratios(turns: dict[str, list[Figures]], kind: str) -> list[float]:
    pairs = zip(turns["nf4"], turns["bfloat16"], strict=True)
    return [one[kind] / other[kind] for one, other in pairs]


def _start(dtype: str, size: str, chosen: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.four_bits", "--device", dtype]
    return subprocess.Popen(
        [*command, "--steps", str(chosen.steps), "--precision", chosen.precision],
        cwd=ROOT,
        env={**os.environ, SIZE: size},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _row(one: subprocess.Popen[str]) -> Figures:
    assert one.stdout is not None
    row: Figures = json.loads(one.stdout.readline())
    print(row, file=sys.stderr, flush=True)  # of a long run, how far it is
    return row


def main() -> None:
    """Measure, and report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="370M")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="micro-batches of a window")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", choices=DTYPES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.device:
        device(chosen.device, chosen.steps, chosen.precision)
        return
    report({**measure(chosen), "target": TARGET}, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
