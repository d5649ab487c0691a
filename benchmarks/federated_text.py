"""The loss of a byte-level transformer on six devices, against a central run of as many tokens.

The texts are six packages of Python's standard library, whose authors differ, in equal parts; every
eighth file is for testing. Each device has one package and another memory, from 310 MB to 1 GB, so
K and the micro-batch differ on each. ``central`` is the test loss of a bare loop with the same
model, optimizer and number of tokens in each step, on batches of the shuffled union; ``loss`` that
of the run's model over it. ``another_order`` is a second central run, shuffled otherwise, over the
first: what the order of the examples is worth by itself.
"""

from __future__ import annotations

import random
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import nn

import headwater
from benchmarks.measure import Figures, arguments, report
from examples.text_transformer import TextTransformer, stretches
from headwater.common.data.batches import batch_of
from headwater.common.model.parameters import build_model

PACKAGES = ("asyncio", "email", "xml", "multiprocessing", "tkinter", "idlelib")
BYTES_EACH, TEST_EVERY, NUM_TESTS = 160_000, 8, 600
MEMORY_MB = (310, 320, 335, 360, 450, 1000)
RATE, EXAMPLES_A_ROUND = 0.003, 192
SEED = 4


class Packages(TextTransformer):
    """Each device has the modules of one package."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[bytes]:
        return _texts()[0][part]

    def test_examples(self) -> list[bytes]:
        return _texts()[1]


@cache
def _texts() -> tuple[list[list[bytes]], list[bytes]]:
    """Return each package's stretches for training, and the test's of all."""
    train, test = [], []
    for package in PACKAGES:
        folder = Path(sysconfig.get_path("stdlib")) / package
        names = [name for name in sorted(folder.rglob("*.py")) if "test" not in str(name)]
        files = [name.read_bytes() for name in names]
        own = b"".join(text for at, text in enumerate(files) if at % TEST_EVERY)
        train.append(stretches([own[:BYTES_EACH]]))
        test += stretches(files[::TEST_EVERY])
    return train, random.Random(SEED).sample(test, NUM_TESTS)


def federated(num_rounds: int, *, is_masked: bool) -> headwater.Run:
    """Train on the six devices."""
    with tempfile.TemporaryDirectory(prefix="headwater-") as folder:
        fleet = Path(folder) / "six.toml"
        fleet.write_text(
            "".join(
                f"[[device]]\nexamples_per_second = 200\nmemory_bytes = {megabytes}_000_000\n"
                "upload_bytes_per_second = 2_500_000\n"
                for megabytes in MEMORY_MB
            )
        )
        return headwater.simulate(
            Packages(),
            fleet=fleet,
            rounds=num_rounds,
            optimizer="adam",
            learning_rate=RATE,
            effective_batch_size=EXAMPLES_A_ROUND,
            secure_aggregation="semi-honest" if is_masked else "off",
            seed=SEED,
            threads=1,
            progress=False,
        )


def central(tokens_of_steps: Sequence[int], *, order: int) -> float:
    """Train on the union, each step on as many tokens or a few more; return the test loss."""
    task = Packages()
    model = build_model(task, seed=SEED).model
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    examples = [one for part in _texts()[0] for one in part]
    shuffle, left = random.Random(order), list[bytes]()
    for wanted in tokens_of_steps:
        batch, num_tokens = list[bytes](), 0
        while num_tokens < wanted:
            if not left:
                left = shuffle.sample(examples, len(examples))
            batch.append(left.pop())
            num_tokens += len(batch[-1])
        loss, weight, _ = task.loss_sum(model, task.collate(batch))
        optimizer.zero_grad()
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return held_out_loss(model)


def held_out_loss(model: nn.Module) -> float:
    """Return the loss of a byte of the test, in nats."""
    task = Packages()
    total, num_bytes = 0.0, 0
    with torch.no_grad():
        for start in range(0, NUM_TESTS, 50):
            batch = batch_of(task, _texts()[1], range(start, min(start + 50, NUM_TESTS)))
            loss, weight, _ = task.loss_sum(model.eval(), batch)
            total, num_bytes = total + loss.item(), num_bytes + weight
    model.train()
    return total / num_bytes


def main() -> None:
    given = arguments(__doc__)
    torch.set_num_threads(1)
    num_rounds = 1 if given.quick else 60
    start = time.perf_counter()
    figures: Figures = {"untrained": held_out_loss(build_model(Packages(), seed=SEED).model)}
    for name in ("plain", "masked"):
        run = federated(num_rounds, is_masked=name == "masked")
        tokens = [row.weight for row in run.history]
        peer = central(tokens, order=1)
        figures[name] = {
            "tokens": sum(tokens),
            "accumulation_steps": [row.accumulation_steps for row in run.history[-1].clients],
            "micro_batch_sizes": [row.micro_batch_size for row in run.history[-1].clients],
            "central": peer,
            "loss": held_out_loss(run.model) / peer,
            "another_order": central(tokens, order=2) / peer,
        }
    figures |= {
        "seconds": time.perf_counter() - start,
    }
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
