"""The example tasks and fleets have the properties that the documentation claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.slow_owners import SLOW_CLASSES, SlowOwners
from examples.synthetic import EXAMPLES_PER_DEVICE, NUM_CLASSES, RightLabels, Synthetic
from headwater.common.settings.sources import load
from headwater.common.task import load_task
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_file import read_fleet
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine
from tests.additivity import check_additive

FLEETS = Path(__file__).parents[3] / "examples" / "fleets"
SLOW_OWNERS = "examples/slow_owners.py:SlowOwners"
NUM_DEVICES, FIRST_SLOW = 30, 20


@pytest.mark.parametrize(
    "spec", ["examples/synthetic.py:Synthetic", "examples/synthetic.py:RightLabels", SLOW_OWNERS]
)
def test_the_task_is_additive(spec: str) -> None:
    task = load_task(spec)
    check_additive(task, task.new_model(), task.train_examples(data=None, part=1, num_parts=3))


def test_a_fifth_of_the_synthetic_training_labels_are_random_and_test_labels_are_right() -> None:
    noisy, right = Synthetic(), RightLabels()
    readings, labels = noisy.train_examples(data=None, part=3, num_parts=60).tensors
    same_readings, true_labels = right.train_examples(data=None, part=3, num_parts=60).tensors
    assert torch.equal(readings, same_readings)
    expected = noisy.random_labels * (1 - 1 / NUM_CLASSES)
    found = float((labels != true_labels).double().mean())
    # Four standard deviations of a binomial share.
    assert abs(found - expected) <= 4 * (expected * (1 - expected) / EXAMPLES_PER_DEVICE) ** 0.5
    for mine, other in zip(
        noisy.test_examples().tensors, right.test_examples().tensors, strict=True
    ):
        assert torch.equal(mine, other)


def labels_of(part: int) -> Tensor:
    return SlowOwners().train_examples(data=None, part=part, num_parts=NUM_DEVICES).tensors[1]


@pytest.mark.slow
def test_only_the_slow_devices_own_the_slow_classes() -> None:
    speeds = [one.examples_per_second or 0.0 for one in read_fleet(FLEETS / "slow_owners.toml")]
    assert len(speeds) == NUM_DEVICES
    for part, speed in enumerate(speeds):
        owns = set(labels_of(part).tolist())
        is_slow = part >= FIRST_SLOW
        assert owns <= set(SLOW_CLASSES) if is_slow else owns.isdisjoint(SLOW_CLASSES)
        assert speed == (min(speeds) if is_slow else max(speeds))
    assert max(speeds) == 16 * min(speeds)
    counts = torch.cat([labels_of(part) for part in range(NUM_DEVICES)]).bincount()
    whole = SlowOwners().train_examples(data=None, part=0, num_parts=1).tensors[1]
    # One device alone is a slow one: there is no first two thirds of it.
    assert counts[list(SLOW_CLASSES)].tolist() == whole.bincount()[list(SLOW_CLASSES)].tolist()


def weights_of_the_slow(folder: Path, weighting: str) -> list[float]:
    chosen: dict[str, Any] = {
        "task": SLOW_OWNERS,
        "rounds": 3,
        "threads": 1,
        "out": folder / weighting,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 0.01,
        "plan.effective_batch_size": 300,
        "cohort.weighting": weighting,
        "simulation.fleet": FLEETS / "slow_owners.toml",
    }
    run_engine(with_fleet(load(None, chosen)), on_round=lambda _: None, resume=False)
    return [
        sum(c["weight"] for c in row["clients"] if int(c["name"]) >= FIRST_SLOW) / row["weight"]
        for row in read_rows(folder / weighting)
    ]


@pytest.mark.slow
def test_weighting_by_data_set_weighs_slow_devices_by_their_examples(tmp_path: Path) -> None:
    owned = [len(labels_of(part)) for part in range(NUM_DEVICES)]
    share = sum(owned[FIRST_SLOW:]) / sum(owned)
    assert weights_of_the_slow(tmp_path, "dataset") == [share] * 3
    assert all(weight < share / 1.5 for weight in weights_of_the_slow(tmp_path, "samples"))
