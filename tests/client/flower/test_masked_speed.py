"""A speed that is measured again under masks: on zeros, and never on a device's own examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from headwater.client.masked_rounds.masked_description import zeros_like
from tests.client.secagg.cohort import describe
from tests.masked import NodeDevice, trainer


@pytest.mark.parametrize(
    "value",
    [
        (torch.ones(2, 3), 7),
        [torch.arange(4), torch.ones((), dtype=torch.float64)],
        {"image": np.ones((2, 2), np.float32), "label": np.int64(3).item()},
        (torch.ones(3), {"mask": torch.ones(3, dtype=torch.bool), "weight": 0.5}),
    ],
)
def test_zeros_have_the_shapes_and_kinds_of_an_example_and_none_of_its_values(value: Any) -> None:
    def flat(one: Any) -> list[Any]:
        if isinstance(one, dict):
            return [part for item in one.values() for part in flat(item)]
        if isinstance(one, list | tuple):
            return [part for item in one for part in flat(item)]
        return [one]

    found = zeros_like(value)
    assert type(found) is type(value)
    for zero, own in zip(flat(found), flat(value), strict=True):
        assert type(zero) is type(own)
        assert getattr(zero, "shape", None) == getattr(own, "shape", None)
        assert getattr(zero, "dtype", None) == getattr(own, "dtype", None)
        assert not np.any(np.asarray(zero))


@pytest.mark.parametrize("value", ["a text", (torch.ones(1), "a path"), {"x": object()}, None])
def test_what_is_no_number_has_no_zeros(value: Any) -> None:
    assert zeros_like(value) is None


class Ragged(Dataset[Any]):
    """The first example is short, and the others are long."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return torch.ones(2 if at == 0 else 500, 16), at % 2


class Texts:
    def new_model(self) -> nn.Module:
        return nn.Linear(16, 2)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Ragged:
        return Ragged()

    def collate(self, rows: list[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
        return rows

    def loss_sum(self, model: nn.Module, batch: list[tuple[Tensor, int]]) -> tuple[Tensor, int]:
        losses = [cross_entropy(model(row).mean(0), torch.tensor(label)) for row, label in batch]
        return torch.stack(losses).sum(), len(batch)


def test_where_examples_differ_in_shape_the_first_measurement_stands(tmp_path: Path) -> None:
    """Zeros in the shape of a short example would lower the pace by which plans are refused."""
    task = "./tests/client/flower/test_masked_speed.py:Texts"
    device = NodeDevice(0, tmp_path, task=task, secure={"aggregation": "semi-honest"})
    layout = trainer(task).image.layout
    wanted = json.loads(describe()) | {
        "layout_digest": layout.digest,
        "num_parameters": layout.num_parameters,
    }
    wanted.pop("layout", None)
    told = [device.send("query.describe", json.dumps(wanted)).head.strip() for _ in range(3)]
    paces = [json.loads(head)["seconds_per_example"] for head in told]
    assert paces[0] == paces[1] == paces[2] > 0
