"""What a sum of gradients in bfloat16 would lose over K micro-batches, against float32.

A byte-level transformer (``examples/text_transformer.py``) and windows of K micro-batches of two
texts. ``error`` is the distance between the vector that was added up in bfloat16 and the one in
float64, over its length, for the float32 sum too; the gradients of each micro-batch are the same
float32 ones. (bfloat16 has 8 significant bits, 2.4 digits: a term below 1/256 of the sum is lost.)
``loss`` is the loss after some steps of Adam with these sums, over that of the float32 sums.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from benchmarks.measure import Figures, arguments, report
from examples.text_transformer import TextTransformer
from headwater.common.model.parameters import build_model

ACCUMULATION_STEPS = (8, 32, 128)
MICRO_BATCH_SIZE, RATE, NUM_TESTS = 2, 0.003, 200


def gradient(task: TextTransformer, model: nn.Module, texts: list[bytes]) -> tuple[Tensor, int]:
    """Return the summed gradient [P] of a micro-batch, and its weight."""
    loss, weight, _ = task.loss_sum(model, task.collate(texts))
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([one.reshape(-1) for one in found]), weight


def errors(num_steps: int, train: list[bytes]) -> Figures:
    """Return the relative errors of sums of K micro-batches at the untrained model."""
    task = TextTransformer()
    model = build_model(task, seed=1).model
    sums: dict[torch.dtype, Tensor] = {}
    for step in range(num_steps):
        texts = train[step * MICRO_BATCH_SIZE : (step + 1) * MICRO_BATCH_SIZE]
        values_P, _ = gradient(task, model, texts)
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            sums[dtype] = sums.get(dtype, torch.zeros_like(values_P, dtype=dtype)) + values_P.to(
                dtype
            )
    exact_P = sums[torch.float64]
    return {
        str(dtype).removeprefix("torch."): float((sums[dtype] - exact_P).norm() / exact_P.norm())
        for dtype in (torch.bfloat16, torch.float32)
    }


def final_loss(num_steps: int, dtype: torch.dtype, train: list[bytes], num_updates: int) -> float:
    """Train with sums in a dtype, each update on K micro-batches; return the test loss."""
    task = TextTransformer()
    image = build_model(task, seed=1)
    image.values_P.requires_grad_()
    optimizer = torch.optim.Adam([image.values_P], lr=RATE)
    shuffle, examples = random.Random(1), list[bytes]()
    for _ in range(num_updates):
        total_P, weight = torch.zeros_like(image.values_P, dtype=dtype), 0
        for _ in range(num_steps):
            if len(examples) < MICRO_BATCH_SIZE:
                examples = shuffle.sample(train, len(train))
            texts = [examples.pop() for _ in range(MICRO_BATCH_SIZE)]
            values_P, own = gradient(task, image.model, texts)
            total_P, weight = total_P + values_P.to(dtype), weight + own
        image.values_P.grad = total_P.float() / weight
        optimizer.step()
    with torch.no_grad():
        loss, weight, _ = task.loss_sum(image.model, task.collate(task.test_examples()[:NUM_TESTS]))
    return loss.item() / weight


def main() -> None:
    given = arguments(__doc__)
    torch.set_num_threads(1)
    train = TextTransformer().train_examples(data=None, part=0, num_parts=1)
    random.Random(0).shuffle(train)
    num_examples = 64 if given.quick else 4096
    figures: Figures = {}
    for num_steps in ACCUMULATION_STEPS[:1] if given.quick else ACCUMULATION_STEPS:
        num_updates = max(num_examples // (num_steps * MICRO_BATCH_SIZE), 1)
        losses = {
            dtype: final_loss(num_steps, dtype, train, num_updates)
            for dtype in (torch.float32, torch.bfloat16)
        }
        figures[f"K_{num_steps}"] = {
            "error": errors(num_steps, train),
            "updates": num_updates,
            "loss_float32": losses[torch.float32],
            "loss": losses[torch.bfloat16] / losses[torch.float32],
        }
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
