"""What the process may use: cores, and bytes of memory.

Every memory limit is told as resident bytes of this process, so that the least of them counts and
none moves when the process itself grows: what it holds now and what is still free under the limit.
Limits of a cgroup are those of its memory controller (kernel's admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst); pages of files that nobody has used lately are given back before anybody is
killed and do not count as used, as in Kubernetes' working set. RLIMIT_DATA and RLIMIT_AS count
virtual memory (getrlimit(2)); what of it is not touched makes their limit look lower, never higher.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater.client.memory.peak_model import resident_bytes

# A lowered limit is seen as soon as this; where reading them takes long, at the cost of 2 %.
READ_EVERY_SECONDS, READING_SHARE = 0.05, 0.02

UNLIMITED_BYTES = 2**60  # version 1 writes "no limit" as a number just below 2^63

VIRTUAL = ("RLIMIT_DATA", "RLIMIT_AS")

ROOT = Path("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """The resident bytes that the process may reach, and what binds it to them."""

    num_bytes: int
    source: str

    @property
    def is_virtual(self) -> bool:
        """Whether it counts virtual memory, resident or not."""
        return self.source in VIRTUAL


class MemoryLimits:
    """All limits of this process's memory; what is no limit is not in the list."""

    def __init__(
        self,
        own_bytes: int | None = None,
        *,
        root: Path = ROOT,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the owner's own limit, and the folder in which /proc and /sys lie."""
        self._own_bytes = own_bytes
        self._root = root
        self._seconds = seconds
        self._least: MemoryLimit | None = None
        self._read_again_at = -math.inf

    def all(self) -> list[MemoryLimit]:
        """Read every limit now."""
        status = _sizes(self._root / "proc/self/status", "VmRSS", "VmData", "VmSize")
        resident = status.get("VmRSS") or resident_bytes()
        limits = [MemoryLimit(num_bytes=resident + _available_bytes(self._root), source="machine")]
        for folder in cgroup_folders(self._root, "memory"):
            limits += _cgroup_limits(folder, resident)
        limits += _resource_limits(self._root, status, resident)
        if self._own_bytes is not None:
            limits.append(MemoryLimit(num_bytes=self._own_bytes, source="memory limit as set"))
        return limits

    def lowest(self) -> MemoryLimit:
        """Return the least of them, as it was at most ``READ_EVERY_SECONDS`` ago."""
        now = self._seconds()
        if self._least is None or now >= self._read_again_at:
            self._least = min(self.all(), key=lambda limit: limit.num_bytes)
            taken = self._seconds() - now
            self._read_again_at = now + max(READ_EVERY_SECONDS, taken / READING_SHARE)
        return self._least

    def lowest_bytes(self) -> int:
        """Return the bytes of ``least``."""
        return self.lowest().num_bytes


def usable_cores(root: Path = ROOT) -> float:
    """Return the cores that the process may use; a cgroup may grant a fraction of one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min([float(usable or 1), *_cgroup_cores(root)])


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's cgroups and of all above them, for one controller.

    Version 2 stands at /sys/fs/cgroup, or beside version 1 at /sys/fs/cgroup/unified.
    """
    top = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = top / "unified" if (top / "unified").is_dir() else top
        elif controller in controllers.split(","):
            base = top / controllers
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            yield folder
            folder = folder.parent
        yield base


def _available_bytes(root: Path) -> int:
    """Return what the machine can give without swapping."""
    available = _sizes(root / "proc/meminfo", "MemAvailable").get("MemAvailable")
    if available is not None:
        return available
    import psutil  # where that is not Linux: 1 MB of an idle device

    return psutil.virtual_memory().available


def _cgroup_limits(folder: Path, resident: int) -> Iterator[MemoryLimit]:
    """Yield the limits of one cgroup.

    Above memory.high nobody is killed, but every allocation is held up until the group is below.
    """
    for limit_file, usage_file, idle_row in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.high", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or limit >= UNLIMITED_BYTES or usage is None:
            continue
        _, _, behind = f"\n{_text(folder / 'memory.stat')}".partition(f"\n{idle_row} ")
        idle = int(behind.split(maxsplit=1)[0]) if behind else 0
        held = max(usage - idle, 0)
        yield MemoryLimit(
            num_bytes=max(resident + limit - held, 0), source=f"cgroup's {limit_file}"
        )


def _resource_limits(root: Path, status: dict[str, int], resident: int) -> Iterator[MemoryLimit]:
    rows = _text(root / "proc/self/limits").splitlines()
    for name, title, counted in (
        ("RLIMIT_DATA", "Max data size", "VmData"),
        ("RLIMIT_AS", "Max address space", "VmSize"),
    ):
        for row in rows:
            soft = row.removeprefix(title).split()[0] if row.startswith(title) else "unlimited"
            if soft.isdigit() and counted in status:
                room = int(soft) - status[counted]
                yield MemoryLimit(num_bytes=max(resident + room, 0), source=name)


def _cgroup_cores(root: Path) -> Iterator[float]:
    """Yield the CPU quota of the process's cgroups, version 2 and version 1, where there is one."""
    for folder in cgroup_folders(root, "cpu"):
        v2 = _text(folder / "cpu.max").split()
        if len(v2) == 2 and v2[0] != "max":
            yield int(v2[0]) / int(v2[1])
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period:
            yield quota / period


def _sizes(file: Path, *names: str) -> dict[str, int]:
    """Read rows ``Name: 123 kB`` of a file of /proc, in bytes; those that are not there are not."""
    text, sizes = _text(file), {}
    for name in names:
        _, found, behind = text.partition(f"{name}:")
        if found:
            sizes[name] = int(behind.split(maxsplit=1)[0]) * 1024
    return sizes


def _number(file: Path) -> int | None:
    """Read a whole number of 0 or more; None where there is none, as with ``max`` or -1."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read()
    except OSError:
        return ""
