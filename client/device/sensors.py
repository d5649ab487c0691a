"""Reads the machine's sensors: pressure, load, temperature, throttling, battery and mains.

All readings come from files of the kernel. A missing file gives an absent reading, never zero, and
so does an impossible value. Sources, in the kernel's documentation:

| sensor | files |
| --- | --- |
| pressure | /proc/pressure/{cpu,memory} and the process's cgroups (accounting/psi.rst) |
| busy | /proc/stat, /proc/self/stat (proc(5)) |
| temperature | /sys/class/hwmon, /sys/class/thermal (ABI/testing/sysfs-class-thermal) |
| throttling | a Raspberry Pi's firmware; counters of x86; cooling devices of the CPU |
| battery, mains | /sys/class/power_supply (ABI/testing/sysfs-class-power) |
| AES instructions | /proc/cpuinfo |

Outside Linux psutil reads the battery, and nothing else is read. (All Macs that torch runs on have
AES instructions.)
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headwater.client.memory.process_limits import ROOT, cgroup_folders
from headwater.common.messages import Vitals

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 1.0

# Throttle counters that rose since an older reading say nothing about now.
RECENT_SECONDS = 60.0

# A chip or zone with one of these names, or with "cpu" or "soc" in its name, measures the CPU. The
# mainboard's (acpitz) does not: many report a constant.
CPU_SENSORS = {"coretemp", "k8temp", "k10temp", "zenpower", "x86_pkg_temp"}
PLAUSIBLE_CELSIUS = (-40.0, 150.0)

# Of get_throttled (raspberrypi.com, "vcgencmd"): bit 1 the clock is capped, bit 2 throttled, bit 3
# above the soft temperature limit. Bit 0 is the supply's voltage; bits from 16 on are history.
PI_THROTTLED = 0b1110


class Sensors:
    """Reads the machine's sensors at most once a second; keeps the readings in between."""

    def __init__(self, root: Path = ROOT, *, seconds: Callable[[], float] = time.monotonic) -> None:
        """Take the folder that holds /proc and /sys; the counters are first read now."""
        self._root = root
        self._seconds = seconds
        self._files = _Files()
        self._load = _load(root, self._files)
        self._counts = _throttle_counts(root, self._files)
        self._read_at = seconds()
        self._vitals: Vitals | None = None

    def vitals(self) -> Vitals:
        """Return the readings; the same object until the sensors are read again."""
        now = self._seconds()
        if self._vitals is None or now - self._read_at >= LOOK_EVERY_SECONDS:
            self._vitals = self._read(now - self._read_at)
            self._read_at = now
        return self._vitals

    def _read(self, seconds: float) -> Vitals:
        charge, is_on_battery = _battery(self._root, self._files)
        return Vitals(
            memory_pressure=_pressure(self._root, "memory", self._files),
            cpu_pressure=_pressure(self._root, "cpu", self._files),
            busy=self._busy(),
            temperature_celsius=_hottest(self._root, self._files),
            is_throttled=self._is_throttled(seconds),
            battery=charge,
            is_on_battery=is_on_battery,
        )

    def _busy(self) -> float | None:
        """Return the share of all cores' time that other processes took since the last reading."""
        before, self._load = self._load, _load(self._root, self._files)
        if before is None or self._load is None:
            return None
        total, busy, own = (b - a for a, b in zip(before, self._load, strict=True))
        if total <= 0 or busy < 0 or own < 0:
            return None  # read too soon, or a core was added or removed
        return min(max(busy - own, 0) / total, 1.0)

    def _is_throttled(self, seconds: float) -> bool | None:
        """Return whether any source says that the CPU's clock is reduced; None without a source."""
        before, self._counts = self._counts, _throttle_counts(self._root, self._files)
        claims = list(_throttle_claims(self._root, self._files))
        if self._counts is not None and before is not None and seconds <= RECENT_SECONDS:
            claims.append(self._counts > before)
        return any(claims) if claims else None


def readings(vitals: Vitals) -> Iterator[str]:
    """Yield each available reading in words."""
    for text, value in (
        ("{:.0%} of the time short of memory", vitals.memory_pressure),
        ("{:.0%} of the time short of cores", vitals.cpu_pressure),
        ("others take {:.0%} of the cores", vitals.busy),
        ("{:.0f} °C", vitals.temperature_celsius),
        ("battery at {:.0%}", vitals.battery),
    ):
        if value is not None:
            yield text.format(value)
    for is_so, true, false in (
        (vitals.is_throttled, "throttled", "not throttled"),
        (vitals.is_on_battery, "on battery", "on mains"),
    ):
        if is_so is not None:
            yield true if is_so else false


class _Files:
    """Reads the sensors' files; an invalid one is logged once."""

    def __init__(self) -> None:
        self._logged: set[Path] = set()

    def text(self, file: Path) -> str | None:
        try:
            return file.read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            self.leave_out(file, f"{type(error).__name__}: {error}")
            return None

    def number(self, file: Path, low: float, high: float) -> float | None:
        """Read a number; None unless there is one from ``low`` to ``high``, both included."""
        text = self.text(file)
        return None if text is None else self.checked(file, text, low, high)

    def checked(self, file: Path, text: str, low: float, high: float) -> float | None:
        """Parse a number from a file's text, see ``number``."""
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if low <= number <= high:
            return number
        self.leave_out(file, f"expected {low:g} to {high:g}, found {text[:40]!r}")
        return None

    def leave_out(self, file: Path, why: str) -> None:
        if file not in self._logged:
            self._logged.add(file)
            log.warning("the sensor %s is left out: %s", file, why)


def _pressure(root: Path, resource: str, files: _Files) -> float | None:
    """Return the share of the last 10 s in which a task waited for the resource.

    The largest value of the machine's and the process's cgroups.
    """
    sources = [
        root / "proc/pressure" / resource,
        *(folder / f"{resource}.pressure" for folder in cgroup_folders(root, resource)),
    ]
    shares = [share for file in sources if (share := _some_avg10(file, files)) is not None]
    return max(shares, default=None)


def _some_avg10(file: Path, files: _Files) -> float | None:
    for line in (files.text(file) or "").splitlines():
        kind, *fields = line.split()
        if kind == "some" and fields and fields[0].startswith("avg10="):
            percent = files.checked(file, fields[0].removeprefix("avg10="), 0, 100)
            return None if percent is None else percent / 100
    return None


def has_aes(root: Path = ROOT) -> bool:
    """Return whether every core has AES instructions; a Raspberry Pi 4 has none."""
    if sys.platform == "darwin":
        return True
    text = _Files().text(root / "proc/cpuinfo") or ""
    rows = [row.split() for row in text.splitlines() if row.startswith(("flags", "Features"))]
    return bool(rows) and all("aes" in row for row in rows)


def _load(root: Path, files: _Files) -> tuple[int, int, int] | None:
    """Return the ticks of all cores, the busy ones, and those of this process.

    Time that a hypervisor gave to other guests (steal) counts as busy; this machine's own guests
    are in its user time already.
    """
    system, own = files.text(root / "proc/stat"), files.text(root / "proc/self/stat")
    if system is None or own is None:
        return None
    try:
        user, nice, kernel, idle, wait, irq, softirq, steal = map(int, system.split()[1:9])
        # After the name in brackets, which may hold spaces: fields 3 and on; utime is the 14th.
        utime, stime = map(int, own.rpartition(")")[2].split()[11:13])
    except ValueError:
        files.leave_out(root / "proc/stat", "its format differs from proc(5)")
        return None
    busy = user + nice + kernel + irq + softirq + steal
    return busy + idle + wait, busy, utime + stime


def _hottest(root: Path, files: _Files) -> float | None:
    """Return the temperature of the hottest part of the CPU, in degrees Celsius."""
    low, high = (1000 * celsius for celsius in PLAUSIBLE_CELSIUS)
    readings = [files.number(file, low, high) for file in _thermometers(root, files)]
    return max((milli / 1000 for milli in readings if milli is not None), default=None)


def _thermometers(root: Path, files: _Files) -> Iterator[Path]:
    for chip in (root / "sys/class/hwmon").glob("hwmon*"):
        if _is_of_cpu(files.text(chip / "name")):
            yield from chip.glob("temp*_input")
    for zone in (root / "sys/class/thermal").glob("thermal_zone*"):
        if _is_of_cpu(files.text(zone / "type")):
            yield zone / "temp"


def _is_of_cpu(name: str | None) -> bool:
    return name is not None and (name in CPU_SENSORS or "cpu" in name or "soc" in name)


def _throttle_claims(root: Path, files: _Files) -> Iterator[bool]:
    """Yield whether a Pi's firmware, and each cooling device of the CPU, reduces the clock.

    scaling_max_freq below cpuinfo_max_freq is no sign of it: an owner sets that too.
    """
    firmware = root / "sys/devices/platform/soc/soc:firmware/get_throttled"
    text = files.text(firmware)
    if text is not None:
        try:
            yield bool(int(text, 16) & PI_THROTTLED)
        except ValueError:
            files.leave_out(firmware, f"expected a hexadecimal number, found {text[:40]!r}")
    for device in (root / "sys/class/thermal").glob("cooling_device*"):
        kind = files.text(device / "type") or ""
        if kind == "Processor" or "cpufreq" in kind:
            state = files.number(device / "cur_state", 0, 2**31)
            if state is not None:
                yield state > 0


def _throttle_counts(root: Path, files: _Files) -> float | None:
    """Return how often an x86 CPU was throttled for heat, summed over cores and packages."""
    counts = [
        files.number(file, 0, 2**64)
        for file in (root / "sys/devices/system/cpu").glob(
            "cpu[0-9]*/thermal_throttle/*_throttle_count"
        )
    ]
    known = [count for count in counts if count is not None]
    return math.fsum(known) if known else None


def _battery(root: Path, files: _Files) -> tuple[float | None, bool | None]:
    """Return the mean charge of the batteries, and whether the machine runs on them.

    Batteries of mice and keyboards, with scope "Device", do not count.
    """
    supplies = root / "sys/class/power_supply"
    if root == ROOT and sys.platform != "linux":
        return _battery_by_psutil()
    charges: list[float] = []
    states: set[str] = set()
    is_plugged: list[bool] = []
    for supply in supplies.glob("*"):
        if files.text(supply / "scope") == "Device":
            continue
        kind = files.text(supply / "type") or ""
        if kind == "Battery" and files.text(supply / "present") != "0":
            states.add(files.text(supply / "status") or "Unknown")
            percent = files.number(supply / "capacity", 0, 100)
            charges += [] if percent is None else [percent / 100]
        elif kind == "Mains" or kind.startswith("USB"):
            online = files.number(supply / "online", 0, 2)
            is_plugged += [] if online is None else [online > 0]
    charge = math.fsum(charges) / len(charges) if charges else None
    return charge, _is_on_battery(states, is_plugged)


def _is_on_battery(states: set[str], is_plugged: list[bool]) -> bool | None:
    if not states:
        return None
    if any(is_plugged):
        return False
    if "Discharging" in states:
        return True
    if states & {"Charging", "Full", "Not charging"}:
        return False
    return True if is_plugged else None


def _battery_by_psutil() -> tuple[float | None, bool | None]:
    import psutil  # here, because it costs an idle device 1 MB

    battery = psutil.sensors_battery()
    if battery is None:
        return None, None
    is_plugged = battery.power_plugged
    charge = min(max(battery.percent / 100, 0.0), 1.0)
    return charge, None if is_plugged is None else not is_plugged
