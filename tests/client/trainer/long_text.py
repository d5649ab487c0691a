"""A device with one text that is fifty times as long as the others; run as a process of its own."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.client.device.hardware import ThisMachine
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState
from headwater.common.messages import DescribeRequest, Plan

NUM_TEXTS, USUAL, LONG, WIDTH, NUM_WORDS = 64, 60, 3000, 256, 100


class Attention(nn.Module):
    """One head whose matrix of T x T weights exists."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        query, key, value = self.mixed(self.norm(hidden_BTD)).chunk(3, dim=-1)
        future_TT = torch.ones(hidden_BTD.shape[1], hidden_BTD.shape[1]).triu(1).bool()
        scores_BTT = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(future_TT, -1e9)
        attended: Tensor = self.out(scores_BTT.softmax(-1) @ value)
        return hidden_BTD + attended


class Texts:
    """Next words of texts of 30 to 60 words, and of one of 3,000, which comes first."""

    max_weight_per_example = LONG

    def new_model(self) -> nn.Module:
        blocks = [Attention() for _ in range(4)]
        return nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), *blocks, nn.Linear(WIDTH, NUM_WORDS))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)
        usual = torch.randint(USUAL // 2, USUAL + 1, (NUM_TEXTS - 1,), generator=random)
        return [
            torch.randint(1, NUM_WORDS, (length,), generator=random)
            for length in [LONG, *usual.tolist()]
        ]

    def collate(self, examples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(examples, batch_first=True)

    def loss_sum(self, model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, int]:
        targets_BT = tokens_BT[:, 1:]
        logits_NV = model(tokens_BT[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(
            logits_NV, targets_BT.flatten(), ignore_index=0, reduction="sum"
        )
        return loss, int((targets_BT != 0).sum())


def main() -> None:
    """Check, describe and train on all texts; print what was summed."""
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)
    trainer = Trainer(f"{__file__}:Texts", batch_norm=None, check_task=True)
    identity, machine = Identity(name="pi", data=None, part=0, num_parts=1), ThisMachine()
    trainer.machine = machine
    request = DescribeRequest(
        run_seed=0,
        wants_speed=False,
        layout_digest=trainer.image.layout.digest,
        num_parameters=trainer.image.layout.num_parameters,
    )
    trainer.describe(identity, machine, request)
    plan = Plan(round=1, run_seed=0, model_version=0, quota=NUM_TEXTS, micro_batch_size=16)
    update, _ = trainer.train(identity, machine, plan, SamplerState())
    report = update.report
    print(
        json.dumps(
            {
                "num_examples": report.num_examples,
                "num_refused": report.num_refused,
                "num_steps": report.num_steps,
                "peak_bytes": max(step.peak_bytes for step in report.steps),
            }
        )
    )


if __name__ == "__main__":
    main()
