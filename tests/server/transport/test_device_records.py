"""What is known of devices by name, and how strangers cannot fill it."""

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


def names(known: DeviceRecords) -> list[str]:
    return [device.name for device in known.devices()]


def test_a_device_is_here_until_it_goes_and_keeps_what_was_counted() -> None:
    known = DeviceRecords()
    device = known.note_connected("pi")
    device.bytes_up += 5
    assert device.is_connected
    first = device.first_seen
    known.note_disconnected(device)
    assert not device.is_connected
    assert known.note_connected("pi") is device
    assert (device.first_seen, device.bytes_up) == (first, 5)


def test_plan_and_sensors_are_noted() -> None:
    device = DeviceRecord(name="pi")
    device.note_plan(Plan(round=3, run_seed=0, model_version=2, quota=20, micro_batch_size=8))
    device.note_vitals(Vitals(memory_limit_bytes=9, temperature_celsius=50.0, battery=0.5))
    assert (device.last_round, device.accumulation_steps, device.quota) == (3, 3, 20)
    assert (device.memory_limit_bytes, device.temperature_celsius, device.battery) == (9, 50.0, 0.5)


def test_the_last_refusal_is_kept_and_cut_to_size() -> None:
    known = DeviceRecords()
    known.note_connected("pi")
    known.note_refusal("pi", REFUSED)
    known.note_refusal("pi", LateUpdate("x" * 10_000))
    (device,) = known.devices()
    assert device.refusal_code == "LateUpdate"
    assert device.refusal_text == "x" * MAX_REASON_CHARACTERS
    assert device.refused_at is not None


def test_strangers_that_were_refused_make_room_for_each_other_and_for_nobody_else() -> None:
    known = DeviceRecords()
    known.note_connected("pi")
    for number in range(MAX_REFUSED + 7):
        known.note_refusal(f"stranger-{number}", REFUSED)
    assert len(names(known)) == 1 + MAX_REFUSED
    assert names(known)[0] == "pi"
    assert "stranger-6" not in names(known)
    assert "stranger-7" in names(known)


def test_a_stranger_that_is_let_in_later_is_one_device() -> None:
    known = DeviceRecords()
    known.note_refusal("pi", REFUSED)
    assert known.note_connected("pi").refusal_code == "IdentityRefused"
    assert names(known) == ["pi"]


def test_that_a_device_is_gone_does_not_hide_why_it_left_until_it_is_back() -> None:
    known = DeviceRecords()
    device = known.note_connected("pi")
    known.note_refusal("pi", OutsideActiveHours("until the evening"))
    known.note_refusal("pi", ConnectionLost("the device is gone"))  # a round had just planned for it
    known.note_disconnected(device)
    known.note_refusal("pi", ConnectionLost("the device is gone"))
    assert device.refusal_code == "OutsideActiveHours"
    known.note_connected("pi")
    known.note_refusal("pi", ConnectionLost("pi has been gone for 60 s"))
    assert device.refusal_code == "ConnectionLost"


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "\x1b[2J", "../etc"])
def test_what_is_no_name_is_not_noted(name: str) -> None:
    known = DeviceRecords()
    known.note_refusal(name, REFUSED)
    assert names(known) == []


def test_beyond_the_bound_a_device_is_served_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_records, "MAX_DEVICES", 2)
    known = DeviceRecords()
    for name in ("a", "b", "c"):
        assert known.note_connected(name).is_connected
    assert names(known) == ["a", "b"]
    assert known.num_unrecorded == 1


def test_what_an_earlier_server_knew_is_added_to() -> None:
    known = DeviceRecords()
    here = known.note_connected("pi")
    here.bytes_up = 1
    gone = DeviceRecord(name="gone", is_connected=True)
    known.restore([DeviceRecord(name="pi", first_seen=1.0, bytes_up=10, bytes_down=20), gone])
    assert (here.first_seen, here.bytes_up, here.bytes_down) == (1.0, 11, 20)
    assert here.is_connected
    assert not gone.is_connected
