"""The peak that a device foresees for a round, against the peak that the round then has.

A perceptron, convolutions, a transformer on texts of unequal length, and a causal model with LoRA
(transformers and peft; without them that row says so). Each row is a process of its own, which does
what ``headwater-client`` does: it checks the task, measures its speed and memory by the probe, and
has a line that foresees the resident bytes of a micro-batch. Then it trains on a window of four
micro-batches of the row's size, and reads its own peak. Texts count as so many of the usual length;
the micro-batch with the most tokens is the one to foresee.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util

import torch

from benchmarks.measure import ROOT, Figures, argument_parser, report
from headwater.client.device.hardware import ThisMachine
from headwater.client.memory.peak_model import PeakMeter
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState
from headwater.common.messages import Plan
from headwater.examples.causal_lm import CausalLm

MB = 10**6
NUM_MICRO_BATCHES = 4
TASKS = {
    "perceptron": "benchmarks/tasks.py:WidePerceptron",
    "cnn": "benchmarks/tasks.py:Pictures",
    "ragged": "benchmarks/tasks.py:RaggedTexts",
    "lora": f"{__file__}:Adapters",
}
SIZES = (1, 4, 16)
TARGET = 0.1


class Adapters(CausalLm):
    """The example's small model with adapters, on the help texts of Python."""

    lora_rank = 8


def measure(spec: str, size: int) -> Figures:
    """Return the foreseen and the measured peak of a window, in this process."""
    torch.set_num_threads(1)
    machine = ThisMachine()
    trainer = Trainer(spec, batch_norm="group", check_task=True)
    trainer.machine = machine
    identity = Identity(name="device", data=None, part=0, num_parts=1)
    trainer.examples(identity)
    trainer.measure(identity, machine)
    known = machine.memory.known
    assert known is not None
    foreseen_of = known.now
    plan = Plan(
        round=1,
        run_seed=0,
        model_version=0,
        quota=size * NUM_MICRO_BATCHES,
        micro_batch_size=size,
    )
    meter = PeakMeter()
    update, _ = trainer.train(identity, machine, plan, SamplerState())
    peak = meter.peak_bytes()
    foreseen = foreseen_of.at(max(step.size or size for step in update.report.steps))
    return {
        "foreseen_mb": foreseen / MB,
        "measured_mb": peak / MB,
        "foreseen_over_measured": foreseen / peak,
    }


def main() -> None:
    """Measure each task and size in a process of its own, and report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--measure", nargs=2, metavar=("SPEC", "SIZE"), help="one row, as JSON")
    chosen = parser.parse_args()
    if chosen.measure:
        spec, size = chosen.measure
        print(json.dumps(measure(spec, int(size))))
        return
    figures: Figures = {}
    for name in ("cnn",) if chosen.quick else TASKS:
        if name == "lora" and not (util.find_spec("transformers") and util.find_spec("peft")):
            figures[name] = "transformers and peft are not installed"
            continue
        for size in (4,) if chosen.quick else SIZES:
            command = [sys.executable, "-m", "benchmarks.foreseen_memory"]
            done = subprocess.run(
                [*command, "--measure", TASKS[name], str(size)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            figures[f"{name}_{size}"] = json.loads(done.stdout.splitlines()[-1])
    shares = [row["foreseen_over_measured"] for row in figures.values() if isinstance(row, dict)]
    figures["furthest_off"] = max(abs(share - 1) for share in shares)
    figures["target"] = TARGET
    report(figures, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
