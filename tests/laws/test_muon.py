"""Runs with Muon, on the server and in local steps, equal a plain loop with embeddings apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import headwater
from headwater.common.model.parameters import build_model
from headwater.common.optimizers.muon import IS_MATRIX, Muon

RATE, STEPS, ROUNDS, WORDS = 0.05, 3, 2, 7
EXAMPLES = [(at % WORDS, (at * at + 1) % WORDS) for at in range(12)]


class NextWord:
    """The next of seven words, by an embedding and two layers."""

    def new_model(self) -> nn.Module:
        layers = (nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, WORDS))
        return nn.Sequential(nn.Embedding(WORDS, 4), *layers)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[Any]:
        return EXAMPLES[part::num_parts]

    def test_examples(self) -> None:
        return None

    def collate(self, examples: Sequence[Any]) -> Tensor:
        return torch.tensor(examples)

    def loss_sum(self, model: nn.Module, batch_B2: Tensor) -> tuple[Tensor, int, dict[str, float]]:
        words_B, next_B = batch_B2.T
        loss = functional.cross_entropy(model(words_B), next_B, reduction="sum")
        return loss, len(next_B), {}


def by_a_plain_loop(start: nn.Module, num_steps: int, *, restarts: int, table: bool) -> Tensor:
    """Return the parameters after steps on all examples; ``table``: the embedding is a matrix."""
    embedding, *layers = start.parameters()
    for step in range(num_steps):
        if step % restarts == 0:
            groups = [{"params": layers}, {"params": [embedding], IS_MATRIX: table}]
            optimizer = Muon(groups, lr=RATE)
        optimizer.zero_grad()
        batch = NextWord().collate(EXAMPLES)
        loss, weight, _ = NextWord().loss_sum(start, batch)
        (loss / weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return nn.utils.parameters_to_vector(start.parameters()).detach()


CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "the server's steps": (
        {"optimizer": "muon", "learning_rate": RATE, "accumulation_steps": 12},
        ROUNDS,
        ROUNDS,
    ),
    "local steps": (
        {
            "algorithm": "fedavg",
            "local_steps": STEPS,
            "settings": {
                "local.optimizer": "muon",
                "local.learning_rate": RATE,
                "local.batch_size": len(EXAMPLES),
            },
        },
        ROUNDS * STEPS,
        STEPS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_a_plain_loop(case: str) -> None:
    given, num_steps, restarts = CASES[case]
    run = headwater.simulate(NextWord, clients=1, rounds=ROUNDS, seed=3, **given)
    found = nn.utils.parameters_to_vector(run.model.parameters()).detach()
    expected, other = (
        by_a_plain_loop(
            build_model(NextWord(), seed=3).model, num_steps, restarts=restarts, table=table
        )
        for table in (False, True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, other, atol=1e-2)
