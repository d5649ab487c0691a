"""A device looks at its folder again at an epoch's end, and trains on what is there by then."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headwater.client.app import app
from headwater.client.flower.node import Node
from headwater.client.growing_data.listing import listing_digest
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.messages import UpdateReport
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.settings.sources import load
from tests.plans import plan_of

TASK = """
from pathlib import Path

import torch
from torch import nn


class Bits:
    '''The gradient of the one parameter is the sum of 2^n over the examples n: a set.'''

    def new_model(self):
        return nn.Linear(1, 1, bias=False)

    def train_examples(self, *, data, part, num_parts):
        return Files(data)

    def loss_sum(self, model, batch):
        return model(batch).sum(), len(batch)


class Files:
    def __init__(self, folder):
        if (folder / "broken").exists():
            raise ValueError("the folder is being copied")
        self._files = sorted(folder.iterdir())
        self.example_names = [file.name for file in self._files]

    def __len__(self):
        return len(self._files)

    def __getitem__(self, position):
        return torch.tensor([float(2 ** int(self._files[position].read_text()))])
"""


class Device:
    """A real node with a folder of its own; it may restart, with a new process's memory."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.data.mkdir(exist_ok=True)
        self._folder = folder
        task = folder / "task.py"
        task.write_text(TASK)
        self._settings = load(None, {"task": f"{task}:Bits", "check_task": False})
        self.round = 0
        self.counted: int | None = None
        self.restart()

    def restart(self) -> None:
        from headwater.client.trainer.run_trainer import run_trainer, trainer_of

        trainer_of.cache_clear()
        self.trainer: Trainer = run_trainer(self._settings)
        identity = Identity(name="pi", data=self.data, part=0, num_parts=1)
        self.node = Node(app, self.trainer, identity, self._settings, self._folder / "state")
        self.node.enter(7)

    def put(self, *numbers: int) -> None:
        for number in numbers:
            (self.data / f"{(7 * number) % 20:02}").write_text(str(number))

    def remove(self, *numbers: int) -> None:
        for number in numbers:
            (self.data / f"{(7 * number) % 20:02}").unlink()

    def train(self, quota: int, **changes: Any) -> tuple[set[int], UpdateReport]:
        """Train a round that counts; return the examples used, and the report."""
        self.round += 1
        plan = plan_of(
            round=self.round,
            run_seed=3,
            model_version=self.round,
            quota=quota,
            micro_batch_size=2,
            counted_round=self.counted,
            **changes,
        )
        answer = self.node.answer(
            message_id=str(self.round),
            message_type="train",
            head_json=plan.model_dump_json(),
            payload=bytes(self.trainer.image.buffer()),
        )
        assert answer.error is None, answer.error
        self.counted = self.round
        report = UpdateReport.model_validate(json.loads(answer.head_json))
        total = round(memoryview(answer.vector).cast("B").cast("f")[0])
        return {number for number in range(20) if total >> number & 1}, report


@pytest.fixture
def device(tmp_path: Path, a_process_of_its_own: None) -> Device:
    (tmp_path / "data").mkdir()
    for number in range(6):
        (tmp_path / "data" / f"{(7 * number) % 20:02}").write_text(str(number))
    return Device(tmp_path)


def counts(report: UpdateReport) -> tuple[int, int, int]:
    return report.num_joined, report.num_left, report.num_refused


def test_new_examples_join_and_removed_ones_leave_at_an_epoch_s_end(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    first, report = device.train(4)
    assert counts(report) == (0, 0, 0)
    device.put(6, 7)
    rest = set(range(6)) - first
    second, report = device.train(2)  # the same epoch: the folder is not looked at
    assert (second, counts(report)) == (rest, (0, 0, 0))
    device.remove(0, 1)
    with caplog.at_level(logging.INFO, "headwater.client.growing_data"):
        third, report = device.train(6)
    assert (third, counts(report)) == (set(range(2, 8)), (2, 2, 0))
    assert "2 examples joined, 2 examples left; epoch 1 has 6 examples" in caplog.text
    assert device.train(6)[0] == set(range(2, 8))


def test_a_window_across_the_epoch_s_end_uses_none_of_its_examples_again(device: Device) -> None:
    first, _ = device.train(4)
    crossing, _ = device.train(4)  # two of epoch 0, and two of epoch 1
    device.put(6, 7, 8)
    device.remove(5)
    of_epoch_1 = crossing & first
    rest = {0, 1, 2, 3, 4, 6, 7, 8} - of_epoch_1
    used, report = device.train(3)
    assert counts(report) == (3, 1, 0)
    assert used | device.train(len(rest) - 3)[0] == rest


def test_after_a_restart_in_mid_epoch_new_examples_wait_and_used_ones_stay_used(
    device: Device,
) -> None:
    first, _ = device.train(4)
    device.put(6, 7)
    gone = min(set(range(6)) - first)
    device.remove(gone)
    device.restart()
    second, report = device.train(1)
    assert second == set(range(6)) - first - {gone}
    assert counts(report) == (2, 1, 0)
    third, report = device.train(7)
    assert third == set(range(8)) - {gone}
    assert counts(report) == (0, 0, 0)


def test_a_restart_without_a_change_changes_nothing(device: Device) -> None:
    first, _ = device.train(4)
    device.restart()
    second, report = device.train(2)
    assert (first | second, first & second) == (set(range(6)), set())
    assert counts(report) == (0, 0, 0)


def test_data_that_cannot_be_opened_again_are_kept_until_they_can(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.train(6)
    (device.data / "broken").write_text("")
    device.put(6)
    assert device.train(6)[0] == set(range(6))
    assert "cannot be opened; the next epoch has the examples of the last one" in caplog.text
    (device.data / "broken").unlink()
    assert device.train(7)[0] == set(range(7))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"held_out_fraction": 0.2}, "between training and the held-out test"),
        ({"is_by_example": True}, "the budget of each example"),
    ],
)
def test_a_plan_that_forbids_it_keeps_the_examples_and_says_why_once(
    device: Device, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], why: str
) -> None:
    if changes.pop("is_by_example", False):
        changes["privacy"] = PrivacyTerms(norm_bound=1e7, noise_multiplier=1.0, example_bound=1e6)
    device.train(6, **changes)
    device.put(6)
    for _ in range(3):
        used, _ = device.train(4, **changes)
        assert 6 not in used
    assert caplog.text.count(why) == 1


def test_the_listing_changes_with_names_sizes_and_times_and_opens_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("1")
    found = [listing_digest(tmp_path)]
    assert listing_digest(tmp_path) == found[0]
    (tmp_path / "a" / "b").write_text("12")
    found.append(listing_digest(tmp_path))
    (tmp_path / "a" / "b").rename(tmp_path / "a" / "c")
    found.append(listing_digest(tmp_path))
    found.append(listing_digest(tmp_path / "none"))
    assert len(set(found)) == 4
