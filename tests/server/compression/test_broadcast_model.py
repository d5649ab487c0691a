"""The broadcast model: it follows the server's, and serves whichever version a device holds."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from headwater.common.compression.model_difference import (
    METHODS,
    DifferenceMethod,
    DifferenceReader,
)
from headwater.common.model.parameters import ModelImage
from headwater.server.compression.broadcast_model import BroadcastModel

AMPLE = 1 << 20


def broadcast_of(
    image: ModelImage, method: DifferenceMethod = "int8", *, history_bytes: int = AMPLE
) -> BroadcastModel:
    return BroadcastModel(image, method, history_bytes=history_bytes)


def moved(image: ModelImage, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    image.values_P += 0.01 * torch.randn(len(image.values_P), generator=random)


class Device:
    """A device's model, zero until it was sent a difference."""

    def __init__(self, num_values: int) -> None:
        self.held_id, self.values = "", np.zeros(num_values, dtype=np.float32)

    def receive(self, broadcast: BroadcastModel) -> int:
        """Take the difference to the server's model, and return its bytes."""
        difference = broadcast.difference_from(self.held_id)
        assert difference is not None
        if not difference.base_id:
            self.values[:] = 0.0
        method = METHODS[difference.method]
        DifferenceReader(self.values.data.cast("B"), method).add(difference.data)
        self.held_id = difference.image_id
        assert bytes(self.values.data.cast("B")) == bytes(broadcast.buffer())
        return len(difference.data)


def test_a_device_reaches_the_servers_bits_whichever_versions_it_missed() -> None:
    image = ModelImage(nn.Linear(30, 40))
    broadcast = broadcast_of(image)
    often, seldom = Device(len(image.values_P)), Device(len(image.values_P))
    for version in range(9):
        broadcast.follow(version)
        one_round = often.receive(broadcast)
        if version % 4 == 0:
            several = seldom.receive(broadcast)
        moved(image, version)
    assert several < 1.5 * one_round
    assert several < 0.3 * image.layout.num_bytes


def test_a_device_that_holds_too_old_a_version_is_sent_the_difference_to_zero() -> None:
    image = ModelImage(nn.Linear(30, 40))
    limit, whole = 4 * len(image.values_P), 2 * len(image.values_P)
    broadcast = broadcast_of(image, history_bytes=limit)
    device = Device(len(image.values_P))
    for version in range(20):
        broadcast.follow(version)
        if version in (0, 19):
            device.receive(broadcast)
        moved(image, version)
        assert broadcast._history._num_bytes() <= limit + whole


def test_what_is_stored_for_many_held_versions_stays_within_the_limit() -> None:
    image = ModelImage(nn.Linear(30, 40))
    limit = 8 * len(image.values_P)
    broadcast = broadcast_of(image, history_bytes=limit)
    devices = [Device(len(image.values_P)) for _ in range(6)]
    for version, device in enumerate(devices):
        broadcast.follow(version)
        device.receive(broadcast)
        moved(image, version)
    broadcast.follow(len(devices))
    for device in devices:
        device.receive(broadcast)
        assert broadcast._history._num_bytes() <= limit


def test_the_broadcast_model_follows_each_version_once() -> None:
    image = ModelImage(nn.Linear(30, 40))
    broadcast = broadcast_of(image)
    for version in (0, 1):
        moved(image, version)
        broadcast.follow(version)
        held = bytes(broadcast.buffer())
        broadcast.follow(version)
        assert bytes(broadcast.buffer()) == held


def test_in_bfloat16_the_first_model_is_the_servers_and_only_the_version_before_is_served() -> None:
    image = ModelImage(nn.Linear(30, 40))
    broadcast = broadcast_of(image, "bfloat16")
    broadcast.follow(0)
    assert broadcast.digest == image.digest
    assert broadcast.difference_from("") is None
    moved(image, 0)
    broadcast.follow(1)
    latest = broadcast._latest
    assert latest is not None
    assert broadcast.difference_from(latest.base_id) is latest
    moved(image, 1)
    broadcast.follow(2)
    assert broadcast.difference_from(latest.base_id) is None


def test_a_restored_broadcast_model_sends_the_difference_to_what_devices_hold() -> None:
    image = ModelImage(nn.Linear(30, 40))
    before, after = broadcast_of(image), broadcast_of(image)
    device = Device(len(image.values_P))
    before.follow(0)
    moved(image, 0)
    before.follow(1)
    device.receive(before)
    after.restore(before.bytes_U8, 1)
    moved(image, 1)
    before.follow(2)
    after.follow(2)
    assert bytes(after.buffer()) == bytes(before.buffer())
    assert after.difference_from(device.held_id) == before.difference_from(device.held_id)
    device.receive(after)


def test_a_model_too_small_for_a_shorter_difference_is_sent_whole() -> None:
    image = ModelImage(nn.Linear(1, 1, bias=False))
    broadcast = broadcast_of(image)
    broadcast.follow(0)
    assert broadcast.difference_from("") is None
