"""Activation checkpointing is switched on for the client that needs it, and for no other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor

from headwater.client.device.interfaces import Clock, Memory, Speed, SpeedProbe, TimeShare
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState
from headwater.common.errors import OutOfMemory
from headwater.common.messages import Plan, Vitals
from headwater.common.system import heap
from tests.training_contexts import FakeClock, FakeMemory

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
PREDICTED_BYTES = 3 * 16 + 2 * (2 * 16)


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

    def time_share(self) -> TimeShare:
        return TimeShare()

    def bounded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def speed(self, probe: SpeedProbe) -> Speed:
        if self.fails:
            self.fails -= 1
            raise OutOfMemory("one example alone does not fit")
        return Speed(seconds_per_micro_batch=0.0, seconds_per_example=1.0)


@pytest.fixture
def home(tmp_path: Path) -> Trainer:
    (tmp_path / "deep.py").write_text(TASK)
    return Trainer(f"{tmp_path}/deep.py:Deep", batch_norm=None, check_task=True)


def identity(part: int) -> Identity:
    return Identity(name=str(part), data=None, part=part, num_parts=2)


PLAN = Plan(round=1, run_seed=0, model_version=0, quota=8, micro_batch_size=4)


def is_checkpointed(home: Trainer, part: int, machine: Machine) -> bool:
    return home.train(identity(part), machine, PLAN, SamplerState())[0].report.is_checkpointed


def test_only_the_client_short_of_memory_uses_checkpointing(
    home: Trainer,
) -> None:
    short = FakeMemory(lambda n: 1000 + 2 * PREDICTED_BYTES, each=1000.0)
    ample = Machine(memory=FakeMemory(lambda n: None))
    assert not is_checkpointed(home, 0, ample)
    assert is_checkpointed(home, 1, Machine(memory=short))
    assert (short.checkpointed_to, short.begun) == ([PREDICTED_BYTES], [2, 2, 2, 2])
    assert not is_checkpointed(home, 0, ample)
    assert is_checkpointed(home, 1, Machine(memory=FakeMemory(lambda n: None)))


def test_a_client_whose_probe_fails_is_measured_with_checkpointing(
    home: Trainer,
) -> None:
    memory = FakeMemory(lambda n: None)
    home.measure(identity(0), Machine(memory=memory, fails=1))
    assert memory.checkpointed_to == [PREDICTED_BYTES]
    assert is_checkpointed(home, 0, Machine(memory=memory))


LARGE_ON_THE_WAY = TASK.replace(
    "        return nn.Sequential(",
    "        torch.empty(1024, 32768)  # 128 MiB that the model does not keep\n"
    "        return nn.Sequential(",
)


def test_passes_use_freed_blocks_again_once_the_model_is_in_its_place(tmp_path: Path) -> None:
    """While a large model is built, its tensors are mapped one by one, which passes would pay."""
    (tmp_path / "deep.py").write_text(LARGE_ON_THE_WAY)
    heap.raise_mmap_threshold()
    Trainer(f"{tmp_path}/deep.py:Deep", batch_norm=None, check_task=True)
    assert heap.keeps_freed_blocks()


@dataclass(kw_only=True)
class Holding(Machine):
    """A machine whose first probe fails while it holds a tensor, as a pass does."""

    held: ReferenceType[Tensor] | None = None
    is_freed: bool = False

    def speed(self, probe: SpeedProbe) -> Speed:
        if self.held is not None:
            self.is_freed = self.held() is None
            return super().speed(probe)
        activations = torch.zeros(1)
        self.held = ref(activations)
        return super().speed(probe)


def test_the_second_probe_begins_without_what_the_first_one_held(home: Trainer) -> None:
    """Else both passes are in memory together, and the second one fails as well."""
    machine = Holding(memory=FakeMemory(lambda n: None), fails=1)
    home.measure(identity(0), machine)
    assert machine.is_freed


def test_a_client_whose_second_probe_fails_is_out_of_memory(home: Trainer) -> None:
    with pytest.raises(OutOfMemory):
        home.measure(identity(0), Machine(memory=FakeMemory(lambda n: None), fails=2))
