"""A table: a CSV file on each device, numbers in, one of a few classes out.

The file has a header row and its last column is the label. Columns are scaled by ranges that stand
in this file, so that every device scales alike and no device's rows are needed for it. Take yours
from what is publicly known of each column (an age lies between 0 and 120), never from the devices'
own rows. Those below are the ones that the data set's own description publishes::

    headwater-simulate --task examples/tabular_csv.py:TabularCsv --clients 20

Without --data the devices share the breast-cancer table that scikit-learn ships. With it each opens
a file of its own. Run as a module, this file writes some of the table as five such files::

    python -m headwater.examples.tabular_csv devices
    headwater-simulate --task examples/tabular_csv.py:TabularCsv --data 'devices/*.csv'
    headwater-client check --task examples/tabular_csv.py:TabularCsv --data devices/device1.csv

For another table copy this file and change ``RANGES`` and ``CLASSES``.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

CLASSES = ("malignant", "benign")
RANGES = {
    "mean radius": (6.981, 28.11),
    "mean texture": (9.71, 39.28),
    "mean perimeter": (43.79, 188.5),
    "mean area": (143.5, 2501.0),
    "mean smoothness": (0.053, 0.163),
    "mean compactness": (0.019, 0.345),
    "mean concavity": (0.0, 0.427),
    "mean concave points": (0.0, 0.201),
    "mean symmetry": (0.106, 0.304),
    "mean fractal dimension": (0.05, 0.097),
    "radius error": (0.112, 2.873),
    "texture error": (0.36, 4.885),
    "perimeter error": (0.757, 21.98),
    "area error": (6.802, 542.2),
    "smoothness error": (0.002, 0.031),
    "compactness error": (0.002, 0.135),
    "concavity error": (0.0, 0.396),
    "concave points error": (0.0, 0.053),
    "symmetry error": (0.008, 0.079),
    "fractal dimension error": (0.001, 0.03),
    "worst radius": (7.93, 36.04),
    "worst texture": (12.02, 49.54),
    "worst perimeter": (50.41, 251.2),
    "worst area": (185.2, 4254.0),
    "worst smoothness": (0.071, 0.223),
    "worst compactness": (0.027, 1.058),
    "worst concavity": (0.0, 1.252),
    "worst concave points": (0.0, 0.291),
    "worst symmetry": (0.156, 0.664),
    "worst fractal dimension": (0.055, 0.208),
}
TEST_FRACTION = 0.2
SPLIT_SEED = 7


class TabularCsv:
    """A row of numbers in, one of ``CLASSES`` out."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(len(RANGES), 32), nn.ReLU(), nn.Linear(32, len(CLASSES)))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        if data is not None:
            return TensorDataset(*_read(data))
        columns, labels, num_test = _sample()
        mine = slice(num_test + part, None, num_parts)
        return TensorDataset(columns[mine], labels[mine])

    def test_examples(self) -> TensorDataset:
        columns, labels, num_test = _sample()
        return TensorDataset(columns[:num_test], labels[:num_test])

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        columns, labels = batch
        logits = model(columns)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}


def _scaled(columns: Tensor) -> Tensor:
    """Map each column's range to -1..1, from float64; a value beyond it goes beyond too."""
    low, high = torch.tensor(list(RANGES.values()), dtype=torch.float64).unbind(1)
    return ((2 * columns - low - high) / (high - low)).float()


def _sample() -> tuple[Tensor, Tensor, int]:
    """Return the bundled table, shuffled once for all, and how many of its rows are for tests."""
    columns, labels = load_breast_cancer(return_X_y=True)
    shuffle = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    return (
        _scaled(torch.tensor(columns[shuffle])),
        torch.tensor(labels[shuffle], dtype=torch.int64),
        int(len(labels) * TEST_FRACTION),
    )


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Read a CSV file whose header names at least the columns of ``RANGES``, in any order.

    Raises:
        FileNotFoundError: the path is not a file.
        ValueError: a column is missing, or a cell is not a finite number or not a class.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a CSV file with a header row, there is none at {path}")
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.reader(lines)
        header = next(reader, [])
        if len(header) == 1 and ";" in header[0]:
            raise ValueError(
                f"{path} has semicolons between its columns: save it with commas and decimal points"
                ", or read it in your copy of this file with csv.reader(lines, delimiter=';')"
            )
        missing = [name for name in RANGES if name not in header[:-1]]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]!r} before its last, the label")
        places = {name: header.index(name) for name in RANGES}
        rows = [
            _numbers(row, header, places, where=f"{path}, line {reader.line_num}")
            for row in reader
            if row
        ]
    columns = torch.tensor([numbers for numbers, _ in rows], dtype=torch.float64)
    labels = torch.tensor([label for _, label in rows], dtype=torch.int64)
    return _scaled(columns.reshape(-1, len(RANGES))), labels


def _numbers(
    row: list[str], header: list[str], places: dict[str, int], *, where: str
) -> tuple[list[float], int]:
    if len(row) != len(header):
        raise ValueError(f"{where}: expected {len(header)} cells, found {len(row)}")
    numbers = []
    for name, place in places.items():
        try:
            numbers.append(float(row[place]))
        except ValueError:
            numbers.append(float("nan"))
        if not np.isfinite(numbers[-1]):
            found = f"found {row[place]!r}" if row[place].strip() else "the cell is empty"
            raise ValueError(f"{where}: {name!r} must be a number, {found}")
    names = (*CLASSES, *(str(number) for number in range(len(CLASSES))))
    if row[-1] not in names:
        raise ValueError(f"{where}: the label must be one of {CLASSES}, found {row[-1]!r}")
    return numbers, names.index(row[-1]) % len(CLASSES)


def write_files(folder: Path, num_files: int = 5) -> None:
    """Write the rows that are not for tests to CSV files, the n-th n times as long as the first."""
    columns, labels = load_breast_cancer(return_X_y=True)
    shuffle = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    rows = shuffle[int(len(labels) * TEST_FRACTION) :]
    ends = np.cumsum(np.arange(num_files + 1)) * len(rows) // (num_files * (num_files + 1) // 2)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, num_files + 1):
        with (folder / f"device{number}.csv").open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow([*RANGES, "label"])
            for row in rows[ends[number - 1] : ends[number]]:
                lines.writerow([*columns[row], CLASSES[labels[row]]])


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
