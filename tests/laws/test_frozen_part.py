"""The law with a frozen part: low-rank adapters, tied embeddings, frozen layers and buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from headwater.client.device.hardware import ThisMachine
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState
from headwater.common.messages import Plan
from headwater.common.model.parameters import ModelImage, build_model
from headwater.server.aggregation.cohort_sum import CohortSum
from tests.adapted import TASK, Adapted

SEED = 5
RUN_IDS = itertools.count()


@cache
def device() -> Trainer:
    """Return the trainer of devices whose own task builds another frozen part."""
    return Trainer(TASK, batch_norm=None, check_task=False, seed=0)


def server() -> ModelImage:
    image = build_model(Adapted(), seed=SEED)
    assert image.frozen_digest
    return image


def gradient_of(image: ModelImage, examples: Sequence[tuple[TensorDataset, int]]) -> Tensor:
    """Return the sum of the gradients of single examples at the server's model, in float64."""
    total_P = torch.zeros(image.layout.num_parameters, dtype=torch.float64)
    task = Adapted()
    for data, position in examples:
        image.model.zero_grad(set_to_none=True)
        batch = [tensor[position : position + 1] for tensor in data.tensors]
        task.loss_sum(image.model, batch)[0].backward()  # type: ignore[no-untyped-call]
        parts = [
            torch.zeros_like(one) if one.grad is None else one.grad for one in image.trainable()
        ]
        total_P += torch.cat([part.reshape(-1).double() for part in parts])
    return total_P


@settings(max_examples=settings().max_examples // 4)
@given(
    work=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 9)), min_size=1, max_size=4),
    moved=st.booleans(),
)
def test_the_sum_over_devices_is_the_gradient_of_all_examples_and_moves_nothing_frozen(
    work: list[tuple[int, int]], moved: bool
) -> None:
    """However the examples are cut, and whether the device's own frozen part was another."""
    home, image = device(), server()
    before = bytes(image.frozen_U8.numpy())
    if moved:
        image.values_P.add_(0.01)
    home.loaded_model.frozen_source = None
    home.image.frozen_buffer()[:] = bytes(home.image.layout.num_frozen_bytes)
    home.loaded_model.share_frozen(image)
    home.loaded_model.load(next(RUN_IDS), 0, bytes(image.buffer()))
    total = CohortSum(image.layout)
    weight = sum(quota for quota, _ in work)
    total.open(num_clients=len(work), planned_weight=weight)
    examples: list[tuple[TensorDataset, int]] = []
    for part, (quota, size) in enumerate(work):
        plan = Plan(round=1, run_seed=0, model_version=0, quota=quota, micro_batch_size=size)
        identity = Identity(name=str(part), data=None, part=part, num_parts=4)
        positions = home.numbers(identity, plan, SamplerState(), plan.run_seed)
        data = home.examples(identity)
        assert isinstance(data, TensorDataset)
        examples += [(data, position) for position in positions]
        update, _ = home.train(identity, ThisMachine(), plan, SamplerState())
        assert len(update.values_P) == image.layout.num_parameters
        total.check(update.values_P, name=update.name)
        total.fold(update.values_P, update.report.weight)
    expected_P = gradient_of(image, examples)
    # float32 passes of up to nine examples against single ones, and one bfloat16 layer between
    bound = 1e-5 * max(float(expected_P.abs().max()), 1.0)
    assert float((total.close().double() * weight - expected_P).abs().max()) <= bound
    assert bytes(home.image.frozen_U8.numpy()) == bytes(image.frozen_U8.numpy()) == before
    home.image.check_frozen()
