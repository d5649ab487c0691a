"""Readings of the machine's sensors; missing and impossible ones are absent."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headwater.client.device.sensors import (
    LOOK_EVERY_SECONDS,
    RECENT_SECONDS,
    Sensors,
    has_aes,
    readings,
)
from headwater.common.messages import Vitals
from tests.machines import write

HWMON, THERMAL = "sys/class/hwmon/hwmon3", "sys/class/thermal"
SUPPLY = "sys/class/power_supply"
PI = "sys/devices/platform/soc/soc:firmware/get_throttled"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self) -> float:
        return self.now


def sensed(root: Path, files: dict[str, str]) -> Vitals:
    return Sensors(write(root, files)).vitals()


def test_a_machine_without_sensors_reports_nothing(tmp_path: Path) -> None:
    assert sensed(tmp_path, {}) == Vitals()
    assert list(readings(Vitals())) == []


def test_pressure_is_the_largest_of_the_machine_s_and_the_cgroups_(
    tmp_path: Path,
) -> None:
    rows = "some avg10={} avg60=99.00 avg300=99.00 total=1\nfull avg10=98.00 avg60=0 total=1\n"
    vitals = sensed(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a\n",
            "proc/pressure/memory": rows.format("12.50"),
            "sys/fs/cgroup/a/memory.pressure": rows.format("25.00"),
            "proc/pressure/cpu": rows.format("3.00"),
            "sys/fs/cgroup/cpu.pressure": rows.format("2.00"),
        },
    )
    assert (vitals.memory_pressure, vitals.cpu_pressure) == (0.25, 0.03)


def stat(*, user: int, idle: int, steal: int = 0) -> str:
    return f"cpu  {user} 1 2 {idle} 3 4 5 {steal} 6 7\ncpu0 0 0 0 0 0 0 0 0 0 0\n"


def own(ticks: int) -> str:
    return f"77 (a) b) R {' '.join('0' * 10)} {ticks} 5 0 0\n"


def test_busy_is_the_cores_share_of_other_processes_since_the_last_reading(tmp_path: Path) -> None:
    write(tmp_path, {"proc/stat": stat(user=100, idle=1000), "proc/self/stat": own(50)})
    clock = Clock()
    sensors = Sensors(tmp_path, seconds=clock.seconds)
    # In 400 ticks 250 were worked, 10 of them on another guest, and 60 of them by this process.
    later = {"proc/stat": stat(user=340, idle=1150, steal=10), "proc/self/stat": own(110)}
    write(tmp_path, later)
    assert sensors.vitals().busy == (250 - 60) / 400
    clock.now = LOOK_EVERY_SECONDS
    write(tmp_path, {"proc/stat": stat(user=440, idle=1150), "proc/self/stat": own(210)})
    assert sensors.vitals().busy == 0


@pytest.mark.parametrize(
    ("system", "process"),
    [
        (stat(user=100, idle=1000), own(50)),
        (stat(user=90, idle=1011), own(50)),
        ("cpu  1 2 3\n", own(50)),
        ("", own(50)),
        (stat(user=200, idle=1000), "77 (a) R 0\n"),
    ],
)
def test_readings_without_elapsed_time_give_no_load(
    tmp_path: Path, system: str, process: str
) -> None:
    write(tmp_path, {"proc/stat": stat(user=100, idle=1000), "proc/self/stat": own(50)})
    sensors = Sensors(tmp_path)
    write(tmp_path, {"proc/stat": system, "proc/self/stat": process})
    assert sensors.vitals().busy is None


@pytest.mark.parametrize(
    ("files", "celsius"),
    [
        ({f"{HWMON}/name": "coretemp\n", f"{HWMON}/temp2_input": "71500\n"}, 71.5),
        ({f"{HWMON}/name": "nvme\n", f"{HWMON}/temp1_input": "71500\n"}, None),
        ({f"{THERMAL}/thermal_zone0/type": "cpu-thermal\n"}, None),
        (
            {
                f"{THERMAL}/thermal_zone0/type": "cpu-thermal\n",
                f"{THERMAL}/thermal_zone0/temp": "45277\n",
                f"{THERMAL}/thermal_zone1/type": "acpitz\n",
                f"{THERMAL}/thermal_zone1/temp": "99000\n",
                f"{HWMON}/name": "k10temp\n",
                f"{HWMON}/temp1_input": "61000\n",
                f"{HWMON}/temp3_input": "59000\n",
            },
            61.0,
        ),
    ],
)
def test_the_temperature_is_that_of_the_hottest_part_of_the_cpu(
    tmp_path: Path, files: dict[str, str], celsius: float | None
) -> None:
    assert sensed(tmp_path, files).temperature_celsius == celsius


@pytest.mark.parametrize("text", ["1000000000000\n", "nan\n", "inf\n", "-300000\n", "hot\n", ""])
def test_an_impossible_temperature_is_absent_and_logged_once(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    zone = f"{THERMAL}/thermal_zone0"
    clock = Clock()
    sensors = Sensors(
        write(tmp_path, {f"{zone}/type": "soc-thermal\n", f"{zone}/temp": text}),
        seconds=clock.seconds,
    )
    with caplog.at_level(logging.WARNING):
        for clock.now in (0.0, LOOK_EVERY_SECONDS, 2 * LOOK_EVERY_SECONDS):
            assert sensors.vitals().temperature_celsius is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{zone}/temp is left out" in caplog.text


def test_a_sensor_that_cannot_be_read_is_absent_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder where a file should be fails for root too."""
    zone = f"{THERMAL}/thermal_zone0"
    write(tmp_path, {f"{zone}/type": "cpu\n", f"{zone}/temp/file": ""})
    clock = Clock()
    sensors = Sensors(tmp_path, seconds=clock.seconds)
    with caplog.at_level(logging.WARNING):
        for clock.now in (0.0, LOOK_EVERY_SECONDS):
            assert sensors.vitals().temperature_celsius is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("files", "is_throttled"),
    [
        ({PI: "0\n"}, False),
        ({PI: "50000\n"}, False),  # has been throttled since it was switched on
        ({PI: "1\n"}, False),  # the supply's voltage is low, and nothing slower yet
        ({PI: "50002\n"}, True),
        ({PI: "0x4\n"}, True),
        ({PI: "8\n"}, True),
        ({PI: "what\n"}, None),
        ({f"{THERMAL}/cooling_device0/type": "Fan\n"}, None),
        (
            {
                f"{THERMAL}/cooling_device0/type": "Processor\n",
                f"{THERMAL}/cooling_device0/cur_state": "0\n",
            },
            False,
        ),
        (
            {
                f"{THERMAL}/cooling_device0/type": "cpufreq-cpu0\n",
                f"{THERMAL}/cooling_device0/cur_state": "3\n",
            },
            True,
        ),
        (
            {
                f"{THERMAL}/cooling_device0/type": "Fan\n",
                f"{THERMAL}/cooling_device0/cur_state": "3\n",
            },
            None,
        ),
    ],
)
def test_throttling_is_read_from_firmware_and_cooling_devices(
    tmp_path: Path, files: dict[str, str], is_throttled: bool | None
) -> None:
    assert sensed(tmp_path, files).is_throttled is is_throttled


@pytest.mark.parametrize(
    ("seconds", "more", "is_throttled"),
    [(1.0, 1, True), (1.0, 0, False), (RECENT_SECONDS + 1, 1, None)],
)
def test_a_throttle_count_that_rose_recently_is_throttling(
    tmp_path: Path, seconds: float, more: int, is_throttled: bool | None
) -> None:
    def counted(count: int) -> dict[str, str]:
        folder = "sys/devices/system/cpu/cpu{}/thermal_throttle/{}_throttle_count"
        return {folder.format(0, "core"): "7\n", folder.format(1, "package"): f"{count}\n"}

    clock = Clock()
    sensors = Sensors(write(tmp_path, counted(5)), seconds=clock.seconds)
    clock.now = seconds
    write(tmp_path, counted(5 + more))
    assert sensors.vitals().is_throttled is is_throttled


def battery(status: str, percent: str = "80", **more: str) -> dict[str, str]:
    rows = {"type": "Battery", "status": status, "capacity": percent, **more}
    return {f"{SUPPLY}/BAT0/{name}": f"{text}\n" for name, text in rows.items()}


def mains(online: str) -> dict[str, str]:
    return {f"{SUPPLY}/AC/type": "Mains\n", f"{SUPPLY}/AC/online": f"{online}\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (battery("Discharging") | mains("0"), (0.8, True)),
        (battery("Charging") | mains("1"), (0.8, False)),
        (battery("Discharging") | mains("1"), (0.8, False)),
        (battery("Not charging"), (0.8, False)),
        (battery("Unknown") | mains("0"), (0.8, True)),
        (battery("Unknown"), (0.8, None)),
        (battery("Discharging", "what"), (None, True)),
        (battery("Discharging", "101"), (None, True)),
        (battery("Discharging", scope="Device") | mains("1"), (None, None)),
        (battery("Unknown", present="0") | mains("1"), (None, None)),
        (mains("1"), (None, None)),
        (
            battery("Discharging", "90")
            | {f"{SUPPLY}/BAT1/type": "Battery\n", f"{SUPPLY}/BAT1/capacity": "30\n"},
            (0.6, True),
        ),
    ],
)
def test_a_device_is_on_battery_if_it_has_a_battery_and_no_mains(
    tmp_path: Path, files: dict[str, str], expected: tuple[float | None, bool | None]
) -> None:
    vitals = sensed(tmp_path, files)
    assert (vitals.battery, vitals.is_on_battery) == (
        expected[0] if expected[0] is None else pytest.approx(expected[0]),
        expected[1],
    )


def test_aes_is_available_if_every_core_has_it(tmp_path: Path) -> None:
    x86, arm = "processor : 0\nflags\t\t: fpu aes avx\n", "Features\t: fp asimd {}crc32\n"
    for text, expected in (
        (x86, True),
        (x86.replace(" aes", " paes"), False),
        (arm.format("aes "), True),
        (arm.format("") + arm.format("aes "), False),
        ("", False),
    ):
        assert has_aes(write(tmp_path, {"proc/cpuinfo": text})) == expected
    assert not has_aes(tmp_path / "none")


def test_the_sensors_are_read_once_a_second(tmp_path: Path) -> None:
    clock = Clock()
    sensors = Sensors(write(tmp_path, battery("Discharging")), seconds=clock.seconds)
    first = sensors.vitals()
    write(tmp_path, battery("Charging"))
    clock.now = 0.99 * LOOK_EVERY_SECONDS
    assert sensors.vitals() is first
    clock.now = LOOK_EVERY_SECONDS
    assert sensors.vitals().is_on_battery is False


def test_available_readings_are_described_in_words() -> None:
    vitals = Vitals(busy=0.25, temperature_celsius=61.4, is_throttled=False, is_on_battery=True)
    assert list(readings(vitals)) == [
        "others take 25% of the cores",
        "61 °C",
        "not throttled",
        "on battery",
    ]


def test_this_machine_s_sensors_make_a_valid_report() -> None:
    vitals = Sensors().vitals()
    assert Vitals.model_validate(vitals.model_dump()) == vitals
