"""How long processor and link of a device idle, with --overlap and without.

One device behind a home's link, 5 Mbit/s up and 50 down, trains a network of a million parameters;
the kernel makes the link (root, ip and tc). Each micro-batch takes a tenth of a second, mostly
asleep, so that other programs on the machine change it little, and K is such that a window takes as
long as its upload did in a first run. Idle shares are of the time from the end of the third step to
the end of the last one: of the processor, what no micro-batch took by the device's reports, and of
the link up, what its bytes did not take at its rate.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.measure import Figures, argument_parser, report
from tests.chaos.machines import namespace
from tests.processes import Processes, free_port, rows

WIDTH, NUM_INPUTS, NUM_EXAMPLES, MICRO_BATCH, STEP_SECONDS = 950, 100, 1 << 12, 8, 0.1
UP_BITS, DOWN_BITS = 5_000_000, 50_000_000
POLL_SECONDS, FIRST = 0.01, 3
TASK = f"""
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Network:
    def new_model(self):
        return nn.Sequential(
            nn.Linear({NUM_INPUTS}, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH}), nn.ReLU(),
            nn.Linear({WIDTH}, 10),
        )

    def train_examples(self, *, data, part, num_parts):
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn({NUM_EXAMPLES}, {NUM_INPUTS}, generator=random)
        return TensorDataset(inputs, inputs[:, :10].argmax(1))

    def loss_sum(self, model, batch):
        inputs, labels = batch
        time.sleep({STEP_SECONDS})
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)
"""
NUM_PARAMETERS = (NUM_INPUTS + 1) * WIDTH + (WIDTH + 1) * WIDTH + (WIDTH + 1) * 10
# The bytes of a coordinate that is sent.
CODINGS = {"float32": 4.0, "int4": 0.5}


def measured(coding: str, *, steps: int, num_rounds: int, overlaps: bool) -> Figures:
    """Run one device, and return its figures over the steps after the first ones."""
    compress = () if coding == "float32" else ("--compress", coding)
    with (
        tempfile.TemporaryDirectory() as name,
        namespace(UP_BITS, down_bits_per_second=DOWN_BITS) as home,
        Processes(Path(name)) as processes,
    ):
        path = Path(name) / "network.py"
        path.write_text(TASK)
        task, out = f"{path}:Network", Path(name) / "out"
        port = free_port()
        server = processes.server(
            *("--listen", f"{home.outer_address}:{port}", "--plain-text"),
            *("--rounds", num_rounds, "--buffer", 1, "--asynchronous", *compress),
            *("--accumulation-steps", steps, "--micro-batch-size", MICRO_BATCH),
            *(["--overlap"] if overlaps else []),
            task=task,
        )
        server.wait_for("listening|waiting")
        device = processes.client(
            *(port, 0, "--server", f"{home.outer_address}:{port}", "--plain-text"),
            task=task,
            prepare=home.enter,
        )
        ends: list[tuple[float, float]] = []
        while len(ends) < num_rounds:
            if len(rows(out)) > len(ends):
                ends.append((time.monotonic(), 8 * home.num_bytes_up() / UP_BITS))
            time.sleep(POLL_SECONDS)
        for process in (server, device):
            process.succeed()
        found = rows(out)[FIRST:]
    seconds, link = (last - first for first, last in zip(ends[FIRST - 1], ends[-1], strict=True))
    trained = sum(sum(client["step_seconds"]) for row in found for client in row["clients"])
    return {
        "rounds_an_hour": 3600 * len(found) / seconds,
        "seconds_a_round": seconds / len(found),
        "seconds_trained": trained / len(found),
        "seconds_sent": link / len(found),
        "processor_idle": 1 - trained / seconds,
        "link_idle": 1 - link / seconds,
        "staleness": found[-1]["staleness_max"],
        "K": steps,
    }


def compared(coding: str, *, num_rounds: int) -> Figures:
    """Return the figures of a coding without and with the overlap, and their ratio."""
    steps = round(CODINGS[coding] * NUM_PARAMETERS * 8 / UP_BITS / STEP_SECONDS)
    first = measured(coding, steps=steps, num_rounds=FIRST + 2, overlaps=False)
    steps = round(steps * first["seconds_sent"] / first["seconds_trained"])
    without = measured(coding, steps=steps, num_rounds=num_rounds, overlaps=False)
    overlapping = measured(coding, steps=steps, num_rounds=num_rounds, overlaps=True)
    ratio = overlapping["rounds_an_hour"] / without["rounds_an_hour"]
    return {
        "without": without,
        "overlap": overlapping,
        "times_as_many_rounds": ratio,
    }


def main() -> None:
    given = argument_parser(__doc__).parse_args()
    num_rounds = FIRST + (2 if given.quick else 10)
    codings = ["int4"] if given.quick else [*CODINGS]
    figures = {coding: compared(coding, num_rounds=num_rounds) for coding in codings}
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
