"""The table of a device's memory: its parts add up, and name what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.client.memory.footprint import Footprint
from headwater.client.memory.peak_model import PeakModel
from headwater.client.memory.process_limits import MemoryLimit
from headwater.client.operations.memory_table import (
    Part,
    check_fits,
    parts_at_rest,
    parts_of_training,
)
from headwater.client.trainer.trainer import Trainer
from headwater.common.errors import OutOfMemory
from headwater.common.estimates.linear_fit import Line

MB = 1_000_000
AT_REST = [Part("libraries", 200.0 * MB), Part("vector", 100.0 * MB)]
ADAPTED = """
import torch
from torch import nn

class Adapted:
    def new_model(self):
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
        model[0].to(torch.bfloat16).requires_grad_(False)
        model.register_buffer("scale", torch.ones(5))
        return model

    def train_examples(self, *, data, part, num_parts): ...

    def loss_sum(self, model, batch): ...
"""


def known(base: float, each: float) -> PeakModel:
    line = Line(base=base, each=each)
    return PeakModel(line=line, least_each=0.0, largest_size=1, rest_bytes=int(base))


def test_what_is_there_at_rest_is_told_apart_by_kind_and_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "adapted.py"
    path.write_text(ADAPTED)
    trainer = Trainer(f"{path}:Adapted", batch_norm=None, check_task=False)
    parts = {part.name: part for part in parts_at_rest(trainer, 300 * MB)}
    assert parts["parameters, trained"][1:] == (4 * 16, "16 float32")
    assert parts["parameters, frozen"][1:] == (2 * 32, "32 bfloat16")
    assert parts["buffers"][1:] == (4 * 5, "5 float32")
    assert parts["update vector"].num_bytes == 4 * 16
    assert sum(part.num_bytes for part in parts.values()) == 300 * MB


def test_weights_in_four_bits_count_with_the_bytes_of_their_codes(tmp_path: Path) -> None:
    path = tmp_path / "adapted.py"
    path.write_text(ADAPTED)
    trainer = Trainer(f"{path}:Adapted", batch_norm=None, check_task=False, frozen_dtype="nf4")
    parts = {part.name: part for part in parts_at_rest(trainer, 300 * MB)}
    assert parts["parameters, frozen"][1:] == (36, "32 nf4")  # a block of 64, not all filled
    assert trainer.image.layout.num_frozen_bytes == 36 + 4 * 5


def training_parts(*, num_tokens: int | None = None, is_masked: bool = False) -> dict[str, float]:
    found = Footprint(checkpointed=2.0 * MB, plain=6.0 * MB, kept=1.0 * MB, outside=0.5 * MB)
    parts = parts_of_training(
        AT_REST,
        known(320.0 * MB, 12.0 * MB),
        found,
        num_tokens=num_tokens,
        has_algorithm=False,
        is_masked=is_masked,
    )
    return {part.name: part.num_bytes for part in parts}


def test_rest_and_training_add_up_to_the_peak_that_training_goes_by() -> None:
    parts = training_parts()
    assert parts["a pass of any size"] == 20 * MB
    assert parts["activations, per example"] == 12 * MB
    assert parts["total at its peak"] == 332 * MB
    assert parts["optimizer"] == 0


def test_activations_are_told_per_token_where_examples_differ_in_length() -> None:
    assert training_parts(num_tokens=60)["  per token"] == 0.2 * MB
    assert "  per token" not in training_parts()


def test_masking_is_a_part_of_its_own_where_updates_are_masked() -> None:
    assert "masking" in training_parts(is_masked=True)
    assert "masking" not in training_parts()


def test_a_task_that_does_not_fit_is_out_of_memory_by_so_much() -> None:
    limit = MemoryLimit(num_bytes=330 * MB, source="memory limit as set")
    # Of 330 MB nine tenths may be filled: 332 - 297 = 35.
    with pytest.raises(OutOfMemory, match=r"is 332.0 MB of 330.0 MB \(memory limit.* 35.0 MB are"):
        check_fits("pi", known(320.0 * MB, 12.0 * MB), limit, fitting=0)
    check_fits("pi", known(320.0 * MB, 12.0 * MB), limit, fitting=1)


def test_the_table_s_lines_are_aligned() -> None:
    assert Part("vector", 4 * MB, "float32").line == f"  {'vector':<32} {'4.0 MB':>10}  float32"
