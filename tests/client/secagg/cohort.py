"""Cohorts of devices for the tests of masked rounds, and the requests that they receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.client.flower.state_file import read_sampler
from headwater.client.training.sampler import SamplerPosition
from headwater.common.messages import DescribeRequest
from headwater.server.secagg.parameters import SessionSetup
from tests.masked import AppDevice, Device, DeviceReply, opening_of, plan, ready, trainer


def devices(count: int = 4, **chosen: Any) -> list[AppDevice]:
    return [AppDevice(part, **chosen) for part in range(count)]


def trained(count: int = 4, **chosen: Any) -> list[AppDevice]:
    """Return devices that hold an update of round 1."""
    found = devices(count, **chosen)
    for device in found:
        ready(device, plan())
    return found


def make_setup(cohort: list[AppDevice], **chosen: Any) -> SessionSetup:
    return opening_of(cohort, plan(), **chosen)


def place_of(device: Device) -> SamplerPosition:
    """Return where the device's next window begins, if its pending round does not count."""
    return read_sampler(device.kept()["walk"]).place


def describe(**changes: Any) -> str:
    layout = trainer().image.layout
    return DescribeRequest(
        run_seed=0,
        wants_speed=True,
        layout_digest=layout.digest,
        num_parameters=layout.num_parameters,
        **changes,
    ).model_dump_json()


class Between:
    """A device to which something happens once it has answered an action."""

    def __init__(self, device: Device, action: str, then: Callable[[DeviceReply], object]) -> None:
        self.name = device.name
        self.device = device
        self.kept = device.kept
        self._kind = f"query.{action}"
        self._then = then

    def send(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> DeviceReply:
        sent = self.device.send(kind, head, vector)
        if kind == self._kind:
            self._then(sent)
        return sent
