"""A window of which no example can be used is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.client.device.hardware import ThisMachine
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerPosition, SamplerState, permutation
from headwater.common.errors import CountOutOfRange, EmptyUpdate
from tests.plans import plan_of

# The first examples of the client's permutation are all NaN, the rest are good.
TASK = """
import torch
from torch import nn
from headwater.client.training.sampler import permutation

class HalfBad:
    def new_model(self):
        return nn.Linear(1, 1)

    def train_examples(self, *, data, part, num_parts):
        inputs = torch.ones(8, 1)
        inputs[torch.from_numpy(permutation(0, 0, "device", 8)[:4].copy())] = torch.nan
        return torch.utils.data.TensorDataset(inputs)

    def loss_sum(self, model, batch):
        return model(batch[0]).sum(), len(batch[0])
"""


def test_the_sampler_moves_past_a_window_without_usable_examples(tmp_path: Path) -> None:
    file = tmp_path / "half_bad.py"
    file.write_text(TASK)
    trainer = Trainer(f"{file}:HalfBad", batch_norm=None, check_task=False)
    identity = Identity(name="device", data=None, part=0, num_parts=1)
    plan = plan_of(round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=2)
    walk = SamplerState()
    with pytest.raises(EmptyUpdate):
        trainer.train(identity, ThisMachine(), plan, walk)
    walk = trainer.skip(identity, plan, walk).passed()
    assert walk == SamplerState(place=SamplerPosition(epoch=0, offset=4))
    update, _ = trainer.train(identity, ThisMachine(), plan, walk)
    assert update.report.num_examples == len(permutation(0, 0, "device", 8)[4:])


def test_a_plan_for_more_local_steps_than_a_device_can_list_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "half_bad.py"
    file.write_text(TASK)
    trainer = Trainer(f"{file}:HalfBad", batch_norm=None, check_task=False)
    identity = Identity(name="device", data=None, part=0, num_parts=1)
    plan = plan_of(
        round=1, run_seed=0, model_version=0, quota=2**40, micro_batch_size=2**31, local_steps=2
    )
    with pytest.raises(CountOutOfRange, match="1,099,511,627,776 examples, and the device has 8"):
        trainer.train(identity, ThisMachine(), plan, SamplerState())
