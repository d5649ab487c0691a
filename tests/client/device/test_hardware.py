"""The device's report of itself: limits, memory line, sensors, time share."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from headwater.client.device.hardware import ThisMachine
from headwater.client.device.interfaces import TimeShare
from headwater.client.trainer.probe import ExampleProbe
from headwater.common.messages import Vitals
from headwater.common.settings.schema import ClientSettings
from tests.client.memory.test_process_limits import AVAILABLE, RESIDENT, machine
from tests.client.trainer.test_probe import training_context
from tests.tasks import examples

MIB = 2**20

ON_BATTERY = {
    "sys/class/power_supply/BAT0/type": "Battery\n",
    "sys/class/power_supply/BAT0/status": "Discharging\n",
    "sys/class/power_supply/BAT0/capacity": "40\n",
}


def test_vitals_leave_out_what_is_unknown(tmp_path: Path) -> None:
    vitals = ThisMachine(root=machine(tmp_path)).vitals()
    assert vitals == Vitals(memory_limit_bytes=AVAILABLE + RESIDENT)


def test_a_measured_device_reports_its_line_and_predicts_by_it() -> None:
    device = ThisMachine(ClientSettings(memory_limit_bytes=2**40))
    assert device.memory.fitting(1) is None
    speed = device.speed(ExampleProbe(training_context(examples(8))))
    assert speed.seconds_per_example > 0
    vitals, line = device.vitals(), device.memory.line
    assert line is not None
    assert (vitals.base_bytes, vitals.bytes_per_example) == (int(line.base), line.each)
    assert device.memory.fitting(1) is not None


def test_the_lowest_limit_applies(tmp_path: Path) -> None:
    device = ThisMachine(ClientSettings(memory_limit_bytes=MIB), root=machine(tmp_path))
    assert device.vitals().memory_limit_bytes == device.memory.limit_bytes() == MIB


def test_a_device_on_battery_gives_and_reports_its_battery_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = ThisMachine(ClientSettings(battery_share=0.25), root=machine(tmp_path, ON_BATTERY))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert device.time_share() == TimeShare(share=0.25, reason="on battery")
    vitals = device.vitals()
    assert (vitals.share, vitals.battery, vitals.is_on_battery) == (0.25, 0.4, True)
    assert caplog.messages == ["this device gives 25 % of its time, on battery"]


def test_cores_are_those_the_process_may_use(tmp_path: Path) -> None:
    assert 0 < ThisMachine().cores() <= (os.cpu_count() or 1)
    files = {"sys/fs/cgroup/a/cpu.max": "50000 100000\n"}
    assert ThisMachine(root=machine(tmp_path, files)).cores() == 0.5
