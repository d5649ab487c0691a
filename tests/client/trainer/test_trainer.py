"""Clients that share one process do not affect each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headwater.client.device.hardware import ThisMachine
from headwater.client.memory.peak_model import resident_bytes
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerPosition, SamplerState
from headwater.common.errors import (
    BuffersChanged,
    EmptyUpdate,
    ModelMismatch,
    NoFiniteExample,
    OutOfMemory,
)
from headwater.common.messages import DescribeRequest, Plan
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import ClientSettings
from tests.plans import plan_of
from tests.tasks import TwoLayers

COUNTED_FILE = """
from tests.tasks import TwoLayers

class Counted(TwoLayers):
    num_built = 0

    def new_model(self):
        type(self).num_built += 1
        return super().new_model()
"""

TASK_FILE = """
import torch
from tests.tasks import NAN_LOSS, RAISES_FORWARD, TwoLayers, examples

class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros(1))

class Faulty(TwoLayers):
    '''Part 1 changes a buffer.'''

    def new_model(self):
        return Counting()

    def train_examples(self, *, data, part, num_parts):
        self_kinds = [0] * 8 if part == 0 else [0] * 4 + [NAN_LOSS] * 4
        return examples(8, seed=part, kinds=self_kinds)

    def loss_sum(self, model, batch):
        if (batch[2] == NAN_LOSS).any():
            model.count += 1
        return (model.linear(batch[0]) + model.count).square().sum(), len(batch[0])

class AllBad(TwoLayers):
    def train_examples(self, *, data, part, num_parts):
        return examples(8, kinds=[NAN_LOSS] * 8)
"""


def identity(part: int) -> Identity:
    return Identity(name=str(part), data=None, part=part, num_parts=2)


def plan(round_number: int = 1, quota: int = 8, counted_round: int | None = None) -> Plan:
    return plan_of(
        round=round_number,
        run_seed=0,
        model_version=0,
        quota=quota,
        micro_batch_size=4,
        counted_round=counted_round,
    )


def trainer(spec: str = "tests/tasks.py:TwoLayers", *, check_task: bool = False) -> Trainer:
    return Trainer(spec, batch_norm=None, check_task=check_task)


def test_buffers_changed_by_one_client_are_restored_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "faulty_buffers.py").write_text(TASK_FILE)
    home = trainer(f"{tmp_path}/faulty_buffers.py:Faulty")
    image = bytes(home.image.buffer())
    home.loaded_model.load(1, 0, image)
    with pytest.raises(BuffersChanged):
        home.train(identity(1), ThisMachine(), plan(), SamplerState())
    home.loaded_model.load(1, 0, image)
    assert bytes(home.image.buffer()) == image


def test_a_model_of_the_same_version_is_loaded_once_and_of_another_run_again() -> None:
    home = trainer()
    first = bytes(build_model(TwoLayers(), seed=1).buffer())
    other = bytes(build_model(TwoLayers(), seed=2).buffer())
    home.loaded_model.load(1, 0, first)
    home.loaded_model.load(2, 0, other)
    assert bytes(home.image.buffer()) == other
    home.loaded_model.load(2, 1, first)
    assert bytes(home.image.buffer()) == first


def test_a_model_that_failed_to_load_does_not_count_as_loaded() -> None:
    home = trainer()
    image = bytes(build_model(TwoLayers(), seed=1).buffer())
    home.loaded_model.load(1, 0, image)
    with pytest.raises(ModelMismatch):
        home.loaded_model.load(1, 1, image[:-1])
    home.loaded_model.load(1, 0, image)
    assert bytes(home.image.buffer()) == image


def test_the_own_model_is_known_again_without_a_second_one(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED_FILE)
    home = trainer(f"{tmp_path}/counted.py:Counted")
    assert home.loaded_model.is_own()
    home.loaded_model.load(1, 0, bytes(build_model(TwoLayers(), seed=7).buffer()))
    assert not home.loaded_model.is_own()
    assert type(home.task).num_built == 1  # type: ignore[attr-defined]


def test_the_sampler_advances_only_if_the_round_was_counted() -> None:
    home = trainer()
    _, walk = home.train(identity(0), ThisMachine(), plan(1), SamplerState())
    assert (walk.place, walk.pending_place) == (SamplerPosition(), SamplerPosition(offset=8))
    _, again = home.train(identity(0), ThisMachine(), plan(2), walk)
    assert again.place == SamplerPosition()
    _, after = home.train(identity(0), ThisMachine(), plan(3, counted_round=2), again)
    assert after.place == SamplerPosition(offset=8)


def test_a_device_that_does_not_know_of_a_counted_round_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its state folder is new, or was put back from a backup."""
    device, own = trainer(), identity(0)
    _, sampler = device.train(own, ThisMachine(), plan(1), SamplerState())
    device.train(own, ThisMachine(), plan(2, counted_round=1), sampler)
    assert "does not know of it" not in caplog.text
    device.train(own, ThisMachine(), plan(3, counted_round=2), sampler)
    assert "round 2 counted, and this device's state does not know of it" in caplog.text


def test_a_client_with_only_bad_examples_is_refused_by_the_check(tmp_path: Path) -> None:
    (tmp_path / "bad_only.py").write_text(TASK_FILE)
    home = trainer(f"{tmp_path}/bad_only.py:AllBad", check_task=True)
    with pytest.raises(NoFiniteExample, match="none of 8 examples has a finite loss"):
        home.examples(identity(0))


def test_the_check_keeps_to_the_limit_that_the_device_s_owner_set() -> None:
    home = trainer()
    home.machine = ThisMachine(ClientSettings(memory_limit_bytes=1))
    with pytest.raises(OutOfMemory, match=r"pi: one example alone does not fit: .* of 1 B"):
        home.check(home.examples(identity(0)), "pi")


HUNGRY_FILE = """
import torch
from torch import nn

class Hungry:
    '''One layer, so no block to recompute, and a loss that takes 1 GiB.'''

    def new_model(self):
        return nn.Linear(4, 1)

    def train_examples(self, *, data, part, num_parts):
        return torch.utils.data.TensorDataset(torch.ones(8, 4))

    def loss_sum(self, model, batch):
        output = model(batch[0]).sum()
        return output + torch.full((2**28,), 1e-9).sum(), len(batch[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="allocations are bounded on Linux alone")
def test_a_pass_that_nothing_predicts_is_refused_by_name_and_not_killed(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY_FILE)
    home = trainer(f"{tmp_path}/hungry.py:Hungry")
    limit = resident_bytes() + (256 << 20)
    home.machine = ThisMachine(ClientSettings(memory_limit_bytes=limit))
    with pytest.raises(OutOfMemory, match=r"[kMG]B are taken before it.*no blocks to checkpoint"):
        home.check(home.examples(identity(0)), "pi")


def test_unchecked_updates_of_only_bad_examples_are_refused_as_empty(tmp_path: Path) -> None:
    (tmp_path / "all_bad.py").write_text(TASK_FILE)
    home = trainer(f"{tmp_path}/all_bad.py:AllBad")
    with pytest.raises(EmptyUpdate):
        home.train(identity(0), ThisMachine(), plan(), SamplerState())


def test_another_layout_is_a_model_mismatch_that_names_the_tensor() -> None:
    layout = '[["0.weight",[7,3],"float32"]]'
    request = DescribeRequest(
        run_seed=0, wants_speed=False, layout_digest="another", num_parameters=1, layout=layout
    )
    with pytest.raises(ModelMismatch) as caught:
        trainer().describe(identity(0), ThisMachine(), request)
    assert "0.weight has shape (7, 3) in the server's model, (2, 3) in this" in str(caught.value)


def test_measuring_the_speed_leaves_no_gradient() -> None:
    home = trainer()
    request = DescribeRequest(
        run_seed=0, wants_speed=True, layout_digest=home.image.layout.digest, num_parameters=11
    )
    report = home.describe(identity(0), ThisMachine(), request)
    assert report.vitals.bytes_per_example is not None
    assert report.vitals.bytes_per_example > 0
    assert not home.accumulator.values_P.any()
    assert all(p.grad is not None for p in home.image.trainable())


def test_held_out_examples_are_never_trained_on() -> None:
    home = trainer()
    chosen = plan().model_copy(update={"run_seed": 3, "held_out_fraction": 0.25})
    train, apart = home.split(identity(0), chosen)
    assert (len(train), len(apart)) == (18, 6)
    rows = {tuple(torch.cat([part.flatten() for part in train[n]]).tolist()) for n in range(18)}
    whole = home.examples(identity(0))
    rows |= {tuple(torch.cat([part.flatten() for part in apart[n]]).tolist()) for n in range(6)}
    assert rows == {
        tuple(torch.cat([part.flatten() for part in whole[n]]).tolist()) for n in range(24)
    }
