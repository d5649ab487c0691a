"""One by one: a device whose examples cannot be opened drops out, and no other device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from headwater.common.errors import MissingData
from headwater.common.messages import Plan, Update
from headwater.common.settings.sources import load
from headwater.common.task import Examples
from headwater.server.fleet import Dropout
from headwater.simulation.compute.one_by_one import MAX_TOGETHER, OneByOne
from headwater.simulation.fleet.devices import ClientPlan, Devices
from headwater.simulation.fleet.fleet_spec import with_fleet
from tests.tasks import NAN_LOSS, TwoLayers, examples

NUM_DEVICES = MAX_TOGETHER + 3
NO_DATA = 2


class OneWithoutData(Devices):
    """Devices, one of which cannot open its examples."""

    def training_examples(self, part: int, plan: Plan) -> Examples:
        if part == NO_DATA:
            raise MissingData("the card was taken out")
        return super().training_examples(part, plan)


def devices_of(kind: type[Devices], task: type[TwoLayers] = TwoLayers) -> Devices:
    spec = f"{task.__module__.replace('.', '/')}.py:{task.__name__}"
    return kind(with_fleet(load(None, {"task": spec, "simulation.clients": NUM_DEVICES})))


def replies(devices: Devices) -> list[Update | Dropout]:
    plan = Plan(round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=2)
    clients = [ClientPlan(str(part), part, plan) for part in range(NUM_DEVICES)]
    copies: list[Update | Dropout] = []
    image = devices.trainer.image
    for reply in OneByOne(devices).train(clients, image, run_id=1, timeout_seconds=None):
        assert isinstance(reply, Update | Dropout)
        if isinstance(reply, Update):  # the next device gets the vector
            reply = Update(values_P=reply.values_P.clone(), report=reply.report)
        copies.append(reply)
    return copies


def test_a_device_without_data_drops_out_and_the_others_send_the_same_updates() -> None:
    expected, found = replies(devices_of(Devices)), replies(devices_of(OneWithoutData))
    assert [reply.name for reply in found] == [str(part) for part in range(NUM_DEVICES)]
    for part, (one, other) in enumerate(zip(found, expected, strict=True)):
        if part == NO_DATA:
            assert isinstance(one, Dropout)
            assert isinstance(one.error, MissingData)
            continue
        assert isinstance(one, Update)
        assert isinstance(other, Update)
        assert torch.equal(one.values_P, other.values_P)
        assert one.report == other.report


class SomeBad(TwoLayers):
    """The first two examples of every device have a NaN."""

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return examples(4, kinds=[NAN_LOSS, NAN_LOSS])


def test_one_line_says_why_examples_are_left_out_of_all_devices_and_rounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices = devices_of(Devices, SomeBad)
    one_by_one, image = OneByOne(devices), devices.trainer.image
    for number in (1, 2):
        plan = Plan(round=number, run_seed=0, model_version=0, quota=4, micro_batch_size=2)
        clients = [ClientPlan(str(part), part, plan) for part in range(NUM_DEVICES)]
        for _ in one_by_one.train(clients, image, run_id=1, timeout_seconds=None):
            pass
    lines = [line for line in caplog.messages if "were left out" in line]
    assert len(lines) == 1
    assert lines[0].startswith("0, round 1: 2 of 4 examples")
