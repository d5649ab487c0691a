"""Whole rounds of a large language model with LoRA on narrow frozen weights, in a cgroup.

A real server runs outside of the cgroup and ``headwater-client`` within it, as a user types it: it
builds the model, is sent the server's frozen part, checks the task, trains K micro-batches of one
example and sends the adapters' gradients. By default the model has the shape of TinyLlama, 1.1B (22
layers, width 2,048, 32 heads of which 4 have keys, perceptron 5,632, vocabulary 32,000); 3B is that
of OpenLLaMA 3B (3.4 billion parameters), 7B that of LLaMA 7B (6.7 billion). The adapters have rank
8. A device whose limit has no room for the model in bfloat16 builds it without the frozen weights.

``--masked`` hides the update by secure aggregation among three devices, two of them outside of the
cgroup. ``peak_mb`` is the cgroup's (memory.max_usage_in_bytes of version 1, which must be mounted),
with the pages of files, which the kernel takes back; ``resident_mb`` is the most that the process
held in memory, with pages of files that other processes share.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import serving
from benchmarks.confine import Confinement, caged, can_make_cgroups
from benchmarks.measure import ROOT, Figures, argument_parser, report
from headwater.examples.causal_lm import CausalLm, TokenExamples

TASK = f"{Path(__file__)}:Adapters"
SIZE = "HEADWATER_BENCHMARK_ADAPTERS"
GB, MB = 10**9, 10**6
SIZES = {  # layers, width, heads, heads with keys, perceptron, words, tokens of an example
    "tiny": (2, 64, 4, 2, 176, 512, 32),
    "370M": (24, 1024, 16, 16, 2816, 32000, 512),
    "1.1B": (22, 2048, 32, 4, 5632, 32000, 512),
    "3B": (26, 3200, 32, 32, 8640, 32000, 512),
    "7B": (32, 4096, 32, 32, 11008, 32000, 128),
}
NUM_EXAMPLES = 8
LIMIT_SECONDS = 14_400.0
# The process's own peak, of /proc, when it ends.
CLIENT = """
import re, sys
from pathlib import Path
from headwater.client.cli import app
try:
    app(args=sys.argv[2:])
finally:
    status = Path("/proc/self/status").read_text()
    Path(sys.argv[1]).write_text(re.search(r"VmHWM:\\s+(\\d+)", status)[1])
"""


class Adapters(CausalLm):
    """Random words; the frozen weights are drawn in bfloat16, by the seed of each side."""

    prompt = None  # a sample of random words would take minutes

    def __init__(self) -> None:
        *self._shape, self._num_words, self.context = SIZES[os.environ.get(SIZE, "tiny")]

    def new_model(self) -> nn.Module:
        layers, width, heads, with_keys, perceptron = self._shape
        config = LlamaConfig(
            vocab_size=self._num_words,
            hidden_size=width,
            intermediate_size=perceptron,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=with_keys,
            max_position_embeddings=2048,
            dtype=torch.bfloat16,
        )
        model = LlamaForCausalLM._from_config(config)
        settings = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        return cast(nn.Module, get_peft_model(model, settings))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TokenExamples:
        random = torch.Generator().manual_seed(part)
        shape = NUM_EXAMPLES, self.context + 1
        words = torch.randint(1, self._num_words, shape, generator=random)
        return TokenExamples(torch.stack([words[:, :-1], words[:, 1:]], dim=1))

    def test_examples(self) -> TokenExamples:
        return TokenExamples()


def device(size: str, chosen: argparse.Namespace) -> Figures:
    """Run a server and its devices, the first of them in a cgroup; return what that one took."""
    os.environ[SIZE] = size
    masks, num_devices = ("semi-honest", 3) if chosen.masked else ("off", 1)
    settings: dict[str, Any] = {
        "task": TASK,
        "rounds": chosen.rounds,
        "seed": 5,  # the devices' own frozen weights are of seed 0
        "cohort.min_clients": num_devices,
        "plan.accumulation_steps": chosen.steps,
        "plan.micro_batch_size": 1,
        "plan.precision": chosen.precision,
        "model.frozen_dtype": chosen.frozen_dtype,
        "secure.aggregation": masks,
        "secure.answer_factor": 2.0,
        "secure.phase_seconds": LIMIT_SECONDS,
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-")))
        settings["out"] = str(folder / "out")
        running = stack.enter_context(serving.server(settings, limit_seconds=LIMIT_SECONDS))
        limits = Confinement(memory_bytes=int(chosen.limit * GB))
        cage = stack.enter_context(caged(limits))
        begun, devices = time.monotonic(), []
        for part in range(num_devices):
            state = folder / f"state-{part}"
            command = [sys.executable, "-c", CLIENT, str(folder / f"peak-{part}")]
            command += ["--server", f"127.0.0.1:{running.port}", "--task", TASK]
            command += ["--name", f"device-{part}", "--state", str(state), "--once"]
            command += ["--part", str(part), "--num-parts", str(num_devices)]
            command += ["--secure-aggregation", masks, "--frozen-dtype", chosen.frozen_dtype]
            one = subprocess.Popen(command, cwd=ROOT, preexec_fn=None if part else cage.enter)
            stack.callback(serving.end, one)
            devices.append(one)
        watch = threading.Thread(target=_end_with, args=(devices[0], running.process), daemon=True)
        watch.start()
        rows = [(time.monotonic() - begun, row) for row in running.rows()]
        serving.end(devices[0])
        usage = (cage.folders["memory"] / "memory.max_usage_in_bytes").read_text()
        return {
            "is_killed": bool(cage.num_kills()),
            "rounds": len(rows),
            "peak_mb": int(usage) // MB,
            "resident_mb": int((folder / "peak-0").read_text()) * 1024 // MB,
            "frozen_mb": sum(one.stat().st_size for one in folder.glob("state-0/frozen/*")) // MB,
            "up_mb": rows[-1][1]["bytes_up"] / len(devices) / MB if rows else None,
            "seconds_to_the_first_step": rows[0][0] if rows else None,
            "seconds_of_the_last_round": rows[-1][1]["slowest_client_seconds"] if rows else None,
        }


def _end_with(device: subprocess.Popen[bytes], server: subprocess.Popen[str]) -> None:
    """End the server when the device has ended: it would wait for it forever."""
    device.wait()
    time.sleep(5.0)
    server.terminate()


def main() -> None:
    """Run the device and report."""
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="1.1B")
    parser.add_argument("--limit", type=float, default=4.0, help="GB that the cgroup may use")
    parser.add_argument("--steps", type=int, help="micro-batches in a round; 2, masked 8")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--frozen-dtype", default="bfloat16", choices=("bfloat16", "nf4"))
    parser.add_argument("--masked", action="store_true")
    chosen = parser.parse_args()
    chosen.steps = chosen.steps or (8 if chosen.masked else 2)  # 8: --min-quota
    figures: Figures = {"device": "no cgroup can be made here"}
    if can_make_cgroups():
        figures["device"] = device("tiny" if chosen.quick else chosen.size, chosen)
    report(figures, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
