"""Each client's data set is a view of the whole, which is opened once per process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import TensorDataset

from headwater.common.data.batches import SubsetView
from headwater.common.data.client_datasets import ClientDatasets
from headwater.common.data.partition_spec import PartitionRule
from headwater.common.errors import EmptyDataset, MissingColumn, NoSuchPartition
from tests.tasks import TwoLayers, examples

IID = PartitionRule(kind="iid", seed=1)


class Counted(TwoLayers):
    """Counts how often its data are opened, and as which part."""

    def __init__(self, num_examples: int = 24) -> None:
        super().__init__()
        self.num_examples = num_examples
        self.opened: list[tuple[Path | None, int, int]] = []

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        self.opened.append((data, part, num_parts))
        return examples(self.num_examples, seed=part)


def test_the_whole_data_set_is_opened_once_for_all_clients() -> None:
    task = Counted()
    datasets = ClientDatasets(task)
    for part in range(5):
        datasets.of(IID, data=Path("rows"), part=part, num_parts=5)
    assert task.opened == [(Path("rows"), 0, 1)]


def test_all_clients_together_have_the_whole_data_set() -> None:
    task = Counted()
    datasets = ClientDatasets(task)
    held = [datasets.of(IID, data=None, part=part, num_parts=5) for part in range(5)]
    rows = [tuple(map(float, (*inputs, target))) for subset in held for inputs, target, _ in
            (subset[position] for position in range(len(subset)))]  # fmt: skip
    whole = task.train_examples(data=None, part=0, num_parts=1)
    expected = [
        tuple(map(float, (*whole[position][0], whole[position][1])))
        for position in range(len(whole))
    ]
    assert sorted(rows) == sorted(expected)


def test_without_a_rule_the_task_splits_its_own_data() -> None:
    task = Counted()
    opened = ClientDatasets(task).of(None, data=None, part=3, num_parts=5)
    assert isinstance(opened, TensorDataset)
    assert task.opened == [(None, 3, 5)]


def test_an_impossible_part_or_partition_is_named() -> None:
    for part in (-1, 2):
        with pytest.raises(NoSuchPartition, match="parts count from 0"):
            ClientDatasets(Counted()).of(IID, data=None, part=part, num_parts=2)
    with pytest.raises(NoSuchPartition, match=r"24 examples .* 25 devices"):
        ClientDatasets(Counted()).of(IID, data=None, part=0, num_parts=25)
    with pytest.raises(MissingColumn, match="no column 'author'"):
        ClientDatasets(Counted()).of(
            PartitionRule(kind="column", column="author"), data=None, part=0, num_parts=2
        )
    with pytest.raises(EmptyDataset):
        ClientDatasets(Counted(0)).of(IID, data=None, part=0, num_parts=1)


def test_a_client_s_examples_are_a_view_of_the_partition() -> None:
    datasets = ClientDatasets(Counted())
    first, again = (datasets.of(IID, data=None, part=1, num_parts=3) for _ in range(2))
    assert isinstance(first, SubsetView)
    assert isinstance(again, SubsetView)
    assert np.shares_memory(first.positions, again.positions)


class Units(TwoLayers):
    """Keeps on the task what it reads of each client's data."""

    def __init__(self, units: list[float]) -> None:
        super().__init__()
        self.units = units

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        self.unit = self.units[part]
        return examples(3, seed=part)


@pytest.mark.parametrize(("units", "is_told"), [([1.0, 2.0, 3.0], True), ([2.0, 2.0, 2.0], False)])
def test_what_one_client_s_data_put_on_the_task_of_all_is_told_once(
    units: list[float], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = ClientDatasets(Units(units))
    for part in range(3):
        datasets.of(None, data=None, part=part, num_parts=3)
    assert caplog.text.count("train_examples keeps unit on the task") == is_told
