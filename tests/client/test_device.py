"""What a device says of itself, measured on its own examples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn
from torch.utils.data import TensorDataset

from client.accumulator import Accumulator
from client.device import MonotonicClock, ThisMachine, activation_bytes
from client.memory import ProcessMemory
from client.workplace import Workplace
from common.errors import TaskFailed
from common.parameters import build_model
from common.task import Task
from tests.tasks import NAN_LOSS, NUM_HIDDEN, RAISES_BACKWARD, RAISES_FORWARD, TwoLayers, examples


def workplace(data: TensorDataset, task: Task | None = None) -> Workplace:
    task = task or TwoLayers()
    image = build_model(task, seed=0)
    return Workplace(
        task=task,
        image=image,
        accumulator=Accumulator(image),
        examples=data,
        name="pi",
        clock=MonotonicClock(),
        memory=ProcessMemory(),
        stop=lambda: False,
    )


@pytest.mark.parametrize("num_examples", [1, 2, 8, 24])
def test_speed_and_memory_are_positive_however_few_the_examples(num_examples: int) -> None:
    speed = ThisMachine().speed(workplace(examples(num_examples)))
    assert speed.seconds_per_micro_batch >= 0
    assert speed.seconds_per_example > 0
    assert speed.bytes_per_example > 0
    assert speed.base_bytes > 2**20


@pytest.mark.parametrize("kind", [NAN_LOSS, RAISES_FORWARD, RAISES_BACKWARD])
def test_a_first_example_that_fails_does_not_keep_the_device_from_being_measured(
    kind: int,
) -> None:
    speed = ThisMachine().speed(workplace(examples(24, kinds=[kind])))
    assert speed.seconds_per_example > 0


def test_a_device_that_runs_out_of_memory_at_eight_examples_is_measured_with_fewer() -> None:
    speed = ThisMachine().speed(workplace(examples(24), TwoLayers(max_micro_batch=4)))
    assert speed.seconds_per_example > 0


def test_a_task_that_fails_on_all_first_examples_is_named() -> None:
    with pytest.raises(TaskFailed):
        ThisMachine().speed(workplace(examples(24, kinds=[RAISES_FORWARD] * 24)))


class Wide(TwoLayers):
    """One large activation, kept by the squares' backward pass."""

    width = 1000

    def new_model(self) -> nn.Module:
        return nn.Linear(3, self.width)

    def loss_sum(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).square().sum(), len(batch[0])


def test_an_example_keeps_at_least_its_widest_activation() -> None:
    kept = activation_bytes(workplace(examples(4), Wide()))
    inputs, activation = 4 * 3, 4 * Wide.width
    assert activation <= kept <= 2 * (inputs + activation)
    assert kept > 4 * NUM_HIDDEN


def test_a_limit_of_the_owner_counts_if_it_is_the_lowest() -> None:
    assert ThisMachine(2**20).memory_limit_bytes() == 2**20


def test_a_limit_of_the_owner_above_the_machine_does_not_count() -> None:
    limit = ThisMachine(2**60).memory_limit_bytes()
    assert limit is not None
    assert limit <= psutil.virtual_memory().total


def test_the_cores_are_those_that_the_process_may_use() -> None:
    assert 0 < ThisMachine().cores() <= (os.cpu_count() or 1)


def test_a_cgroup_limit_above_the_process_bounds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are cgroup v2's own: a limit on a parent holds for the child without one."""
    child = tmp_path / "sys" / "fs" / "cgroup" / "a" / "b"
    child.mkdir(parents=True)
    (child / "memory.max").write_text("max\n")
    (child.parent / "memory.max").write_text("1048576\n")
    (child / "cpu.max").write_text("max 100000\n")
    (child.parent / "cpu.max").write_text("50000 100000\n")
    proc = tmp_path / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("0::/a/b\n")
    monkeypatch.setattr("client.device.Path", lambda path: tmp_path / str(path).lstrip("/"))
    assert ThisMachine().memory_limit_bytes() == 1048576
    assert ThisMachine().cores() == 0.5
