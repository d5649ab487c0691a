"""A time series: a CSV file on each device with a value a line; the next value comes out.

Each example is ``PAST`` values in a row and the one after them. Values are scaled by the range that
stands here, so that every device scales alike and no device needs another's values for it.
"""

import csv
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

# begin: columns
VALUE = "load"
VALUE_RANGE = (0.0, 10.0)
PAST = 24
# end: columns

TEST_FILE = Path(__file__).with_name("test.csv")
WIDTH = 32


class Forecaster(nn.Module):
    """A recurrent network over the past values; it says by how much the next one differs."""

    def __init__(self) -> None:
        super().__init__()
        self.past = nn.GRU(1, WIDTH, batch_first=True)
        self.change = nn.Linear(WIDTH, 1)

    def forward(self, past_BT: Tensor) -> Tensor:
        states, _ = self.past(past_BT[:, :, None])
        next_B: Tensor = past_BT[:, -1] + self.change(states[:, -1])[:, 0]
        return next_B


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """All stretches of a series, with the value after each."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return max(len(self._values) - PAST, 0)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self._values[at : at + PAST], self._values[at + PAST]


class Series:
    """The last ``PAST`` values in, the next one out."""

    def new_model(self) -> nn.Module:
        return Forecaster()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> Windows:
        if data is None:
            raise ValueError("name each device's CSV file: --data 'devices/*.csv'")
        return Windows(_read(data))

    def test_examples(self) -> Windows:
        return Windows(_read(TEST_FILE))

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        past_BT, next_B = batch
        missed = model(past_BT) - next_B
        low, high = VALUE_RANGE
        # The loss is of scaled values, the error in their own unit.
        return missed.square().sum(), len(next_B), {"mae": missed.abs().sum() * (high - low) / 2}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return what `headwater client predict` writes of each value: the one that is expected."""
        low, high = VALUE_RANGE
        expected: Tensor = (model(batch[0]) * (high - low) + low + high) / 2
        return expected


def _read(path: Path) -> Tensor:
    """Read the values of a CSV file with a header row, scaled; a gap takes the value before it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the column is missing, its first value too, or a cell is not a number.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a CSV file with a header row, there is none at {path}")
    low, high = VALUE_RANGE
    values: list[float] = []
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        if VALUE not in (reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {VALUE!r}; it has {reader.fieldnames}")
        for row in reader:
            cell = (row[VALUE] or "").strip()
            where = f"{path}, line {reader.line_num}"
            if not cell and not values:
                raise ValueError(f"{where}: the first value is missing")
            scaled = (2 * _number(cell, where) - low - high) / (high - low) if cell else values[-1]
            values.append(scaled)
    return torch.tensor(values, dtype=torch.float32)


def _number(cell: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {cell!r} is not a number")
    return number
