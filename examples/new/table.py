"""A table: a CSV file on each device, with gaps and categories; a class comes out, or a number.

Each device reads the columns that are named here and scales them alike, by the ranges that stand
here: no device needs another's rows for that. A gap is a column of its own, and so is a category
that is not in the list. Columns that are not named are passed over.
"""

import csv
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

# begin: columns
NUMBERS: dict[str, tuple[float, float]] = {
    "age": (18.0, 90.0),
    "income": (0.0, 120000.0),
    "visits": (0.0, 40.0),
}
CATEGORIES: dict[str, tuple[str, ...]] = {
    "region": ("east", "north", "south", "west"),
    "plan": ("basic", "family", "student"),
}
LABEL = "renews"
CLASSES: tuple[str, ...] = ("no", "yes")
LABEL_RANGE = (0.0, 1.0)
# end: columns
# CLASSES are what the label's column holds. Without any, the label is a number, and LABEL_RANGE is
# where it usually lies.

TEST_FILE = Path(__file__).with_name("test.csv")
WIDTH = 64


class Table:
    """A row in, one of ``CLASSES`` out, or a number."""

    def new_model(self) -> nn.Module:
        num_inputs = 2 * len(NUMBERS) + sum(len(known) + 1 for known in CATEGORIES.values())
        return nn.Sequential(
            nn.Linear(num_inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, len(CLASSES) or 1)
        )

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        if data is None:
            raise ValueError("name each device's CSV file: --data 'devices/*.csv'")
        return _read(data)

    def test_examples(self) -> TensorDataset:
        return _read(TEST_FILE)

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        inputs, labels = batch
        outputs = model(inputs)
        if CLASSES:
            loss = functional.cross_entropy(outputs, labels, reduction="sum")
            return loss, len(labels), {"accuracy": (outputs.argmax(1) == labels).sum()}
        missed = outputs[:, 0] - labels
        low, high = LABEL_RANGE
        # The loss is of scaled labels, the error in their own unit.
        return missed.square().sum(), len(labels), {"mae": missed.abs().sum() * (high - low) / 2}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, object]:
        """Return what `headwater client predict` writes of each row."""
        outputs = model(batch[0])
        if CLASSES:
            probability, number = outputs.softmax(1).max(1)
            return {"prediction": [CLASSES[at] for at in number], "probability": probability}
        low, high = LABEL_RANGE
        return {"prediction": (outputs[:, 0] * (high - low) + low + high) / 2}


def _read(path: Path) -> TensorDataset:
    """Read a CSV file with a header row; other columns, and their order, do not matter.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing, or a cell is not what its column holds.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a CSV file with a header row, there is none at {path}")
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        missing = {LABEL, *NUMBERS, *CATEGORIES}.difference(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path} has no column {min(missing)!r}; it has {reader.fieldnames}")
        rows = [
            (_inputs(row, where), _label(row[LABEL], where))
            for row in reader
            for where in [f"{path}, line {reader.line_num}"]
        ]
    kind = torch.int64 if CLASSES else torch.float32
    return TensorDataset(
        torch.tensor([inputs for inputs, _ in rows], dtype=torch.float32),
        torch.tensor([label for _, label in rows], dtype=kind),
    )


def _inputs(row: dict[str, str], where: str) -> list[float]:
    """Return a row's numbers, each with whether it is missing, and its categories as 0 or 1."""
    inputs: list[float] = []
    for name, bounds in NUMBERS.items():
        is_gap = not (row[name] or "").strip()
        inputs += [0.0 if is_gap else _scaled(row[name], bounds, f"{where}, {name}"), float(is_gap)]
    for name, known in CATEGORIES.items():
        cell = (row[name] or "").strip()
        inputs += [float(cell == one) for one in known] + [float(cell not in known)]
    return inputs


def _label(cell: str | None, where: str) -> float:
    cell = (cell or "").strip()
    if not CLASSES:
        return _scaled(cell, LABEL_RANGE, f"{where}, {LABEL}")
    if cell not in CLASSES:
        raise ValueError(f"{where}: the label is {cell!r}, expected one of {', '.join(CLASSES)}")
    return CLASSES.index(cell)


def _scaled(cell: str, bounds: tuple[float, float], where: str) -> float:
    """Return a number whose usual range is -1 to 1."""
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {cell!r} is not a number")
    low, high = bounds
    return (2 * number - low - high) / ((high - low) or 1.0)
