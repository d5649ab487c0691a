"""The broadcast model: it follows the server's, and serves whichever version a device holds."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headwater.common.compression.model_difference import (
    METHODS,
    DifferenceReader,
    movement,
)
from headwater.common.compression.terms import DifferenceMethod, planned_difference_bytes
from headwater.common.model.parameters import ModelImage
from headwater.server.compression import difference_history
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


@pytest.mark.parametrize("method", ["bfloat16", "int4", "int2", "int1"])
def test_the_first_model_is_the_servers_and_goes_whole_to_a_device_that_holds_none(
    method: DifferenceMethod,
) -> None:
    image = ModelImage(nn.Linear(30, 40))
    broadcast = broadcast_of(image, method)
    broadcast.follow(0)
    assert broadcast.digest == image.digest
    assert broadcast.difference_from("") is None
    moved(image, 0)
    broadcast.follow(1)
    assert broadcast.difference_from("") is None


@pytest.mark.parametrize(("method", "most_missed"), [("bfloat16", 1), ("int4", 7), ("int2", 15)])
def test_a_device_is_sent_what_it_missed_while_that_is_shorter_than_the_model(
    method: DifferenceMethod, most_missed: int
) -> None:
    image = ModelImage(nn.Linear(30, 40))
    broadcast = broadcast_of(image, method)
    broadcast.follow(0)
    held_id = hashlib.sha256(broadcast.buffer()).hexdigest()
    first = bytes(broadcast.buffer())
    for version in range(1, most_missed + 2):
        moved(image, version)
        broadcast.follow(version)
        if version > most_missed:
            assert broadcast.difference_from(held_id) is None
            continue
        device = Device(len(image.values_P))
        device.held_id, device.values[:] = held_id, np.frombuffer(first, dtype=np.float32)
        assert device.receive(broadcast) == version * planned_difference_bytes(
            method, len(image.values_P)
        )


def test_the_latest_difference_stays_beyond_the_limit_where_none_leads_from_zero() -> None:
    image = ModelImage(nn.Linear(30, 40))
    broadcast = broadcast_of(image, "int4", history_bytes=1)
    for version in range(3):
        held_id = hashlib.sha256(broadcast.buffer()).hexdigest()
        broadcast.follow(version)
        moved(image, version)
    assert broadcast.difference_from(held_id) is not None


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


def test_a_round_does_not_wait_until_a_difference_is_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a large model and many missed rounds that takes minutes, and devices may ask for many."""
    image = ModelImage(nn.Linear(30, 40))
    broadcast, device = broadcast_of(image), Device(len(image.values_P))
    broadcast.follow(0)
    device.receive(broadcast)
    for version in (1, 2):
        moved(image, version)
        broadcast.follow(version)
    begun, has_followed = Event(), Event()

    def slow(*given: Any) -> Any:
        begun.set()
        assert has_followed.wait(30)
        return movement(*given)

    monkeypatch.setattr(difference_history, "movement", slow)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(device.receive, broadcast)
        assert begun.wait(30)
        moved(image, 3)
        broadcast.follow(3)
        has_followed.set()
        assert receiving.result(30) > 0  # of the model that is the latest by then


def test_a_model_too_small_for_a_shorter_difference_is_sent_whole() -> None:
    image = ModelImage(nn.Linear(1, 1, bias=False))
    broadcast = broadcast_of(image)
    broadcast.follow(0)
    assert broadcast.difference_from("") is None


@pytest.mark.parametrize(
    ("stored", "version", "why"),
    [
        (torch.zeros(1, dtype=torch.uint8), 1, "not one of this run"),
        (torch.zeros(4960, dtype=torch.float64), 1, "not one of this run"),
        (torch.full((4960,), 255, dtype=torch.uint8), 1, "not finite"),
        (torch.zeros(4960, dtype=torch.uint8), -1, "not one of this run"),
        (torch.zeros(4960, dtype=torch.uint8), "1", "not one of this run"),
    ],
)
def test_a_checkpoint_that_no_run_has_written_is_not_taken_over(
    stored: torch.Tensor, version: Any, why: str
) -> None:
    """One byte was copied to each place, and the run went on."""
    broadcast = broadcast_of(ModelImage(nn.Linear(30, 40)))
    broadcast.restore(torch.zeros(4960, dtype=torch.uint8), 2)
    with pytest.raises(ValueError, match=why):
        broadcast.restore(stored, version)
    assert broadcast.version == 2
