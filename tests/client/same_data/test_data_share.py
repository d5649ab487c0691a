"""A digest tells equal examples from others, whatever they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from headwater.client.same_data.data_share import data_share, digest_of
from headwater.client.training.context import Identity

IDENTITY = Identity(name="pi", data=None, part=1, num_parts=3)


@dataclass
class Box:
    corners: torch.Tensor
    label: str


def graph(seed: int) -> Any:
    random = torch.Generator().manual_seed(seed)
    return Box(torch.rand(2, 2, generator=random), f"label {seed}")


KINDS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda seed: (torch.full((3,), float(seed)), seed),
    "arrays": lambda seed: {"x": np.arange(4) + seed, "y": np.float32(1)},
    "texts": lambda seed: f"text {seed}",
    "objects": graph,
    "bfloat16": lambda seed: torch.ones(2, dtype=torch.bfloat16) * seed,
    "numbers": lambda seed: [seed, None, True],
}


@pytest.mark.parametrize("kind", KINDS)
def test_equal_examples_have_one_digest_and_others_another(kind: str) -> None:
    make = KINDS[kind]
    first, again, other = ([make(seed) for seed in range(start, start + 9)] for start in (0, 0, 1))
    assert digest_of(first, run_seed=1) == digest_of(again, run_seed=1)
    assert digest_of(first, run_seed=1) != digest_of(other, run_seed=1)
    assert digest_of(first, run_seed=1) != digest_of(first[:-1], run_seed=1)
    assert digest_of(first, run_seed=1) != digest_of(first, run_seed=2)


def test_augmentation_is_the_same_for_all_and_the_process_s_random_numbers_go_on() -> None:
    class Augmented:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, at: int) -> Any:
            return torch.rand(3) + at

    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = {digest_of(Augmented(), run_seed=1) for _ in range(2)}
    assert len(found) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("examples", [[object()] * 3, [[] for _ in range(0)], [open]])
def test_examples_that_cannot_be_read_have_no_digest_and_stop_nothing(examples: Any) -> None:
    share = data_share(IDENTITY, examples, run_seed=1)
    assert (share.part, share.num_parts) == (1, 3)
    if examples:
        assert share.digest is None
