"""The look over the examples has batches of like lengths, and passes over those without room."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from headwater.common.additivity.survey import look_over
from headwater.common.data.example_lengths import ExampleLengths, Positions, length_record
from tests.laws.architectures import LONGEST, Ragged


class Watched(Ragged):
    """Notes the tokens of each batch, with its padding."""

    seen: ClassVar[list[int]] = []

    def loss_sum(self, model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, int]:
        self.seen.append(tokens_BT.numel())
        return tokens_BT.float().sum(), len(tokens_BT)


def test_no_batch_has_more_tokens_than_so_many_usual_examples_and_a_long_one_is_passed_over() -> (
    None
):
    task, long = Watched(), torch.ones(50 * LONGEST, dtype=torch.int64)
    given = Ragged().train_examples(data=None, part=0, num_parts=1)
    texts = [long, *(given[at] for at in range(len(given)))]
    record = length_record(task, texts)
    assert record is not None
    lengths = ExampleLengths(texts, record)

    def may_pass(positions: Positions) -> bool:
        return lengths.tokens(positions) < len(long)

    Watched.seen.clear()
    survey = look_over(
        *(task, nn.Linear(1, 1), texts),
        batch_size=8,
        lengths=lengths,
        may_pass=may_pass,
        max_seconds=60.0,
    )
    assert sorted(survey.seen) == list(range(1, len(texts)))
    assert max(Watched.seen) <= 8 * lengths.usual
