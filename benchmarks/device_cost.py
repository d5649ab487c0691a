"""Seconds and megabytes of a round on one device, for four models.

Measured: the parameters, the bytes of a round (the model down, the update up: four bytes a
parameter each way), and the CPU seconds of an example on one thread of this machine, as
``loss_sum`` and ``backward`` on micro-batches of 8 take them (median of the turns).

Estimated, as no board is at hand: the seconds of a round of 64 examples on a Raspberry Pi, by the
simulator's profiles (``simulation/fleet/profiles.py``): a thread of this machine counts as a laptop
of speed 1, and the transfer goes at the profile's rate.
"""

from __future__ import annotations

import statistics

import torch

from benchmarks.measure import Figures, arguments, report, take_turns
from headwater.common.data.batches import batch_of
from headwater.common.model.parameters import build_model
from headwater.common.task import load_task, loss_sum, open_train_examples
from headwater.simulation.fleet.profiles import PROFILES

TASKS = {
    "digits": "examples/digits.py:Digits",
    "images_16x16": "examples/image_folder.py:ImageFolder",
    "images_32x32": "benchmarks/tasks.py:Convolutions",
    "tokens": "benchmarks/tasks.py:Tokens",
}
EXAMPLES, MICRO_BATCH = 64, 8
BOARDS = ("pi5-8gb", "pi4-4gb")


def main() -> None:
    """Measure each model and report."""
    chosen = arguments(__doc__)
    torch.set_num_threads(1)
    turns = 3 if chosen.quick else 15
    figures = {name: cost(spec, turns=turns) for name, spec in TASKS.items()}
    report(figures, as_json=chosen.json, doc=__doc__)


def cost(spec: str, *, turns: int) -> Figures:
    """Return a model's figures."""
    task = load_task(spec)
    image = build_model(task, seed=0)
    examples = open_train_examples(task, data=None, part=0, num_parts=1)
    batch = batch_of(task, examples, range(MICRO_BATCH))

    def step() -> None:
        torch.autograd.backward(loss_sum(task, image.model, batch)[0])

    _, cpu = take_turns({"step": step}, turns=turns, seconds_each=0.1)
    seconds = statistics.median(cpu["step"]) / MICRO_BATCH
    bytes_each_way = 4 * image.layout.num_parameters
    boards = {each.profile: each for each in PROFILES if each.profile in BOARDS}
    return {
        "parameters": image.layout.num_parameters,
        "megabytes_a_round": 2 * bytes_each_way / 1e6,
        "milliseconds_an_example": 1e3 * seconds,
        **{
            f"estimated_seconds_a_round.{name}": EXAMPLES * seconds / board.relative_speed
            + 2 * bytes_each_way / board.upload_bytes_per_second
            for name, board in boards.items()
        },
    }


if __name__ == "__main__":
    main()
