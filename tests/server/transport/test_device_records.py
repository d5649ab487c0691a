"""Records of devices by name, and their bound against strangers."""

from __future__ import annotations

import pytest

from headwater.common.errors import ConnectionLost, IdentityRefused, LateUpdate, OutsideActiveHours
from headwater.common.messages import Plan, Vitals
from headwater.server.transport import device_records
from headwater.server.transport.device_records import (
    MAX_REASON_CHARACTERS,
    MAX_REFUSED,
    DeviceRecord,
    DeviceRecords,
)

REFUSED = IdentityRefused("not that of its certificate")


def names(records: DeviceRecords) -> list[str]:
    return [device.name for device in records.devices()]


def test_a_record_survives_a_reconnection() -> None:
    records = DeviceRecords()
    device = records.note_connected("pi")
    device.bytes_up += 5
    assert device.is_connected
    first = device.first_seen
    records.note_disconnected(device)
    assert not device.is_connected
    assert records.note_connected("pi") is device
    assert (device.first_seen, device.bytes_up) == (first, 5)


def test_plan_and_vitals_are_recorded() -> None:
    device = DeviceRecord(name="pi")
    device.note_plan(Plan(round=3, run_seed=0, model_version=2, quota=20, micro_batch_size=8))
    device.note_vitals(Vitals(memory_limit_bytes=9, temperature_celsius=50.0, battery=0.5))
    assert (device.last_round, device.accumulation_steps, device.quota) == (3, 3, 20)
    assert (device.memory_limit_bytes, device.temperature_celsius, device.battery) == (9, 50.0, 0.5)


def test_the_last_refusal_is_recorded_and_cut_to_size() -> None:
    records = DeviceRecords()
    records.note_connected("pi")
    records.note_refusal("pi", REFUSED)
    records.note_refusal("pi", LateUpdate("x" * 10_000))
    (device,) = records.devices()
    assert device.refusal_code == "LateUpdate"
    assert device.refusal_text == "x" * MAX_REASON_CHARACTERS
    assert device.refused_at is not None


def test_refused_strangers_displace_only_each_other() -> None:
    records = DeviceRecords()
    records.note_connected("pi")
    for number in range(MAX_REFUSED + 7):
        records.note_refusal(f"stranger-{number}", REFUSED)
    assert len(names(records)) == 1 + MAX_REFUSED
    assert names(records)[0] == "pi"
    assert "stranger-6" not in names(records)
    assert "stranger-7" in names(records)


def test_a_refused_device_that_is_admitted_later_has_one_record() -> None:
    records = DeviceRecords()
    records.note_refusal("pi", REFUSED)
    assert records.note_connected("pi").refusal_code == "IdentityRefused"
    assert names(records) == ["pi"]


def test_a_lost_connection_does_not_replace_the_reason_for_leaving() -> None:
    records = DeviceRecords()
    device = records.note_connected("pi")
    records.note_refusal("pi", OutsideActiveHours("until the evening"))
    records.note_refusal("pi", ConnectionLost("the device is gone"))  # it had just been planned
    records.note_disconnected(device)
    records.note_refusal("pi", ConnectionLost("the device is gone"))
    assert device.refusal_code == "OutsideActiveHours"
    records.note_connected("pi")
    records.note_refusal("pi", ConnectionLost("pi has been gone for 60 s"))
    assert device.refusal_code == "ConnectionLost"


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "\x1b[2J", "../etc"])
def test_an_invalid_name_is_not_recorded(name: str) -> None:
    records = DeviceRecords()
    records.note_refusal(name, REFUSED)
    assert names(records) == []


def test_a_device_beyond_the_limit_is_served_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_records, "MAX_DEVICES", 2)
    records = DeviceRecords()
    for name in ("a", "b", "c"):
        assert records.note_connected(name).is_connected
    assert names(records) == ["a", "b"]
    assert records.num_unrecorded == 1


def test_records_of_an_earlier_server_are_merged() -> None:
    records = DeviceRecords()
    connected = records.note_connected("pi")
    connected.bytes_up = 1
    gone = DeviceRecord(name="gone", is_connected=True)
    records.restore([DeviceRecord(name="pi", first_seen=1.0, bytes_up=10, bytes_down=20), gone])
    assert (connected.first_seen, connected.bytes_up, connected.bytes_down) == (1.0, 11, 20)
    assert connected.is_connected
    assert not gone.is_connected
