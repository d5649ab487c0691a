"""Models as differences: both sides hold the same bits, and what is lost comes with the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwater.common.compression.model_difference import (
    DifferenceMethod,
    DifferenceReader,
    difference_bytes,
    move_towards,
)
from headwater.common.errors import CorruptUpdate
from headwater.common.model.parameters import ModelImage
from headwater.common.model.vectors import CHUNK
from headwater.server.aggregation.broadcast_model import BroadcastModel

LENGTH = CHUNK + 1030
METHODS: tuple[DifferenceMethod, ...] = ("bfloat16", "int8")
# The part of a difference that its rounding may lose, of the largest in its block.
LOST = {"bfloat16": 2.0**-8, "int8": 1 / 127}


def vector(seed: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", [1000, CHUNK, 10**7])
def test_a_device_holds_the_servers_bits_in_whatever_parts_a_difference_arrives(
    method: DifferenceMethod, part: int
) -> None:
    server_P, device_P = vector(0), vector(0)
    data = move_towards(server_P, vector(1), method)
    assert len(data) == difference_bytes(method, LENGTH)
    reader = DifferenceReader(device_P.numpy().data.cast("B"), method)
    for start in range(0, len(data), part):
        assert not reader.is_complete
        reader.add(data[start : start + part])
    assert reader.is_complete
    assert torch.equal(device_P, server_P)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_difference_loses_comes_with_the_next(method: DifferenceMethod) -> None:
    base_P, target_P = vector(0), vector(1)
    for _ in range(4):
        before = (target_P - base_P).abs().max()
        move_towards(base_P, target_P, method)
        # A part of what was missing, and the rounding of float32 in both subtractions.
        assert (target_P - base_P).abs().max() <= LOST[method] * before + 2.0**-20


def test_a_difference_that_is_too_long_is_refused() -> None:
    base_P = vector(0)[:10]
    data = move_towards(base_P.clone(), vector(1)[:10], "int8")
    reader = DifferenceReader(base_P.numpy().data.cast("B"), "int8")
    reader.add(data)
    with pytest.raises(CorruptUpdate, match="expected 0"):
        reader.add(b"\0")


def broadcast_of(image: ModelImage) -> BroadcastModel:
    return BroadcastModel(image, "int8")


def test_the_broadcast_model_starts_as_the_servers_and_follows_each_version_once() -> None:
    image = ModelImage(nn.Linear(30, 40))
    broadcast = broadcast_of(image)
    broadcast.follow(0)
    assert broadcast.difference is None
    assert broadcast.digest == image.digest
    image.values_P += vector(1)[: image.layout.num_parameters]
    broadcast.follow(1)
    first, held = broadcast.difference, bytes(broadcast.buffer())
    assert first is not None
    broadcast.follow(1)
    assert broadcast.difference is first
    assert bytes(broadcast.buffer()) == held
    broadcast.follow(2)
    assert broadcast.difference is not None
    assert broadcast.difference.base_id == first.image_id


def test_a_restored_broadcast_model_sends_the_difference_to_what_devices_hold() -> None:
    image = ModelImage(nn.Linear(30, 40))
    before, after = broadcast_of(image), broadcast_of(image)
    before.follow(0)
    image.values_P += 1.0
    before.follow(1)
    after.restore(before.bytes_U8, 1)
    image.values_P += vector(2)[: image.layout.num_parameters]
    before.follow(2)
    after.follow(2)
    assert after.difference == before.difference
    assert bytes(after.buffer()) == bytes(before.buffer())
