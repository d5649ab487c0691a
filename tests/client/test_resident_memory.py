"""Devices in one process of which one is short of memory: what it does is its own affair."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headwater.client.training.context import Clock, Memory, Restraint, Workplace
from headwater.client.training.micro_batches import Walk
from headwater.client.training.probe_fit import Speed
from headwater.client.training.trainer import Identity, Resident
from headwater.common.errors import OutOfMemory
from headwater.common.messages import Plan, Vitals
from tests.workplaces import FakeClock, FakeMemory

TASK = """
import torch
from torch import nn

class Deep:
    def new_model(self):
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)])

    def train_examples(self, *, data, part, num_parts):
        return torch.utils.data.TensorDataset(torch.ones(8, 4))

    def loss_sum(self, model, batch):
        return model(batch[0]).sum(), len(batch[0])
"""

# Of an example of nine layers of four: three groups hold their inputs, 16 bytes each, and of the
# three inputs in a group one is held already; twice that for the group at work.
FORESEEN = 3 * 16 + 2 * (2 * 16)


@dataclass(kw_only=True)
class Machine:
    """A machine whose memory the test sets; its first ``fails`` probes do not fit."""

    memory: Memory
    clock: Clock = field(default_factory=FakeClock)
    fails: int = 0

    def cores(self) -> float:
        return 1.0

    def vitals(self) -> Vitals:
        return Vitals()

    def restraint(self) -> Restraint:
        return Restraint()

    def speed(self, place: Workplace) -> Speed:
        if self.fails:
            self.fails -= 1
            raise OutOfMemory("one example alone does not fit")
        return Speed(seconds_per_micro_batch=0.0, seconds_per_example=1.0)


@pytest.fixture
def home(tmp_path: Path) -> Resident:
    (tmp_path / "deep.py").write_text(TASK)
    return Resident(f"{tmp_path}/deep.py:Deep", replace_batch_norm=False, check_task=True)


def identity(part: int) -> Identity:
    return Identity(name=str(part), data=None, part=part, num_parts=2)


PLAN = Plan(round=1, run_seed=0, model_version=0, quota=8, micro_batch_size=4)


def is_checkpointed(home: Resident, part: int, machine: Machine) -> bool:
    return home.train(identity(part), machine, PLAN, Walk())[0].report.is_checkpointed


def test_a_device_that_is_short_of_memory_computes_twice_and_the_others_do_not(
    home: Resident,
) -> None:
    short = FakeMemory(lambda n: 1000 + 2 * FORESEEN, each=1000.0)
    ample = Machine(memory=FakeMemory(lambda n: None))
    assert not is_checkpointed(home, 0, ample)
    assert is_checkpointed(home, 1, Machine(memory=short))
    assert (short.relieved, short.begun) == ([FORESEEN], [2, 2, 2, 2])
    assert not is_checkpointed(home, 0, ample)
    assert is_checkpointed(home, 1, Machine(memory=FakeMemory(lambda n: None)))


def test_a_device_that_cannot_be_measured_otherwise_is_measured_computing_twice(
    home: Resident,
) -> None:
    memory = FakeMemory(lambda n: None)
    home.measure(identity(0), Machine(memory=memory, fails=1))
    assert memory.relieved == [FORESEEN]
    assert is_checkpointed(home, 0, Machine(memory=memory))


def test_a_device_that_cannot_be_measured_at_all_is_out_of_memory(home: Resident) -> None:
    with pytest.raises(OutOfMemory):
        home.measure(identity(0), Machine(memory=FakeMemory(lambda n: None), fails=2))
