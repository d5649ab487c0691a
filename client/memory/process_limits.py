"""The limits of the process: cores, and bytes of memory.

Every memory limit is given as resident bytes of this process: what it holds now plus what is still
free under the limit. The smallest one therefore applies, and none changes when the process itself
grows. Limits of a cgroup are those of its memory controller (the kernel's admin-guide/cgroup-v2.rst
and cgroup-v1/memory.rst). Pages of files are reclaimed before a process is killed and do not count
as used, but for this process's code (``peak_model.CODE_BYTES``). RLIMIT_DATA and RLIMIT_AS count
virtual memory (getrlimit(2)); the untouched part of it makes their limit look lower, never higher.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater.client.memory.allocation_bound import bound_in_force
from headwater.client.memory.peak_model import CODE_BYTES, resident_bytes
from headwater.common.errors import OutOfMemory
from headwater.common.system.portability import num_usable_cores
from headwater.common.wording import bytes_text

# A lowered limit is noticed after so long; if reading takes long, it may cost 2 % of the time.
READ_EVERY_SECONDS, READING_SHARE = 0.05, 0.02

UNLIMITED_BYTES = 2**60  # version 1 writes "no limit" as a number just below 2^63

VIRTUAL = ("RLIMIT_DATA", "RLIMIT_AS")

ROOT = Path("/")

# What torch, Flower and gRPC add to a process that the kernel cannot take back. (Their code, 85 MB
# more, is mapped from files.) Measured with torch 2.13 on x86-64.
IMPORT_BYTES = 160_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """The resident bytes that the process may reach, and the source of the limit."""

    num_bytes: int
    source: str
    set_bytes: int | None = None
    """The limit as it was set; others may use a part of it."""

    @property
    def origin(self) -> str:
        """The source with the limit as it was set, such as ``cgroup's memory.max of 537 MB``."""
        if self.set_bytes is None:
            return self.source
        return f"{self.source} of {bytes_text(self.set_bytes)}, less what others in it hold"

    @property
    def is_virtual(self) -> bool:
        """Whether it counts virtual memory, resident or not."""
        return self.source in VIRTUAL


class MemoryLimits:
    """All memory limits of this process."""

    def __init__(
        self,
        own_bytes: int | None = None,
        *,
        root: Path = ROOT,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the owner's own limit, and the folder that holds /proc and /sys."""
        self._own_bytes = own_bytes
        self._root = root
        self._seconds = seconds
        self._lowest: MemoryLimit | None = None
        self._read_again_at = -math.inf

    def all(self) -> list[MemoryLimit]:
        """Read every limit now."""
        names = ("VmRSS", "VmData", "VmSize", "RssFile")
        status = _sizes(self._root / "proc/self/status", *names)
        code = min(status.get("RssFile", 0), CODE_BYTES)
        droppable = status.get("RssFile", 0) - code
        resident = status["VmRSS"] - droppable if "VmRSS" in status else resident_bytes()
        limits = [MemoryLimit(num_bytes=resident + _available_bytes(self._root), source="machine")]
        for folder in cgroup_folders(self._root, "memory"):
            limits += _cgroup_limits(folder, resident - code)
        limits += _resource_limits(self._root, status, resident)
        if self._own_bytes is not None:
            limits.append(MemoryLimit(num_bytes=self._own_bytes, source="memory limit as set"))
        return limits

    def lowest(self) -> MemoryLimit:
        """Return the lowest limit, read at most ``READ_EVERY_SECONDS`` ago."""
        now = self._seconds()
        if self._lowest is None or now >= self._read_again_at:
            self._lowest = min(self.all(), key=lambda limit: limit.num_bytes)
            spent = self._seconds() - now
            self._read_again_at = now + max(READ_EVERY_SECONDS, spent / READING_SHARE)
        return self._lowest

    def lowest_bytes(self) -> int:
        """Return the bytes of ``lowest``."""
        return self.lowest().num_bytes


def check_import_room(resident: int, limit: MemoryLimit) -> None:
    """Check, before torch is imported, that the limit has room for it.

    Raises:
        OutOfMemory: it has not; names the bytes and the limit.
    """
    if resident + IMPORT_BYTES > limit.num_bytes:
        raise OutOfMemory(
            f"importing torch takes {bytes_text(IMPORT_BYTES)} beside "
            f"{bytes_text(resident)} that the process holds, and the limit is "
            f"{bytes_text(limit.num_bytes)} ({limit.origin})",
            remedy="give the device more memory",
        )


def usable_cores(root: Path = ROOT) -> float:
    """Return how many cores the process may use; a cgroup may grant a fraction of one."""
    return min([float(num_usable_cores()), *_cgroup_cores(root)])


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of one controller: the process's cgroup and all of its parents.

    Version 2 is mounted at /sys/fs/cgroup, or with version 1 at /sys/fs/cgroup/unified.
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
    """Return what the machine can provide without swapping."""
    available = _sizes(root / "proc/meminfo", "MemAvailable").get("MemAvailable")
    if available is not None:
        return available
    import psutil  # only outside Linux: it costs an idle device 1 MB

    return psutil.virtual_memory().available


def _cgroup_limits(folder: Path, not_files: int) -> Iterator[MemoryLimit]:
    """Yield the limits of one cgroup; ``not_files`` is what the process holds beside file pages.

    Above memory.high nothing is killed, but every allocation waits until the group is below. In
    version 1 a limit of a parent that a container cannot see is in memory.stat.
    """
    rows = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines())
    for limit_file, usage_file, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.high", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None:
            continue
        if prefix:
            limit = min(limit, int(rows.get("hierarchical_memory_limit", limit)))
        if limit >= UNLIMITED_BYTES:
            continue
        files = sum(int(rows.get(f"{prefix}{row}", 0)) for row in ("active_file", "inactive_file"))
        room = limit - max(usage - files, 0)
        source = f"cgroup's {limit_file}"
        yield MemoryLimit(num_bytes=max(not_files + room, 0), source=source, set_bytes=limit)


def _resource_limits(root: Path, status: dict[str, int], resident: int) -> Iterator[MemoryLimit]:
    rows = _text(root / "proc/self/limits").splitlines()
    for name, title, counted in (
        ("RLIMIT_DATA", "Max data size", "VmData"),
        ("RLIMIT_AS", "Max address space", "VmSize"),
    ):
        for row in rows:
            soft = row.removeprefix(title).split()[0] if row.startswith(title) else "unlimited"
            is_own = name == "RLIMIT_DATA" and soft == str(bound_in_force())
            if soft.isdigit() and counted in status and not is_own:
                room = int(soft) - status[counted]
                num_bytes = max(resident + room, 0)
                yield MemoryLimit(num_bytes=num_bytes, source=name, set_bytes=int(soft))


def _cgroup_cores(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of the process's cgroups, version 2 and version 1."""
    for folder in cgroup_folders(root, "cpu"):
        v2 = _text(folder / "cpu.max").split()
        if len(v2) == 2 and v2[0] != "max":
            yield int(v2[0]) / int(v2[1])
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period:
            yield quota / period


def _sizes(file: Path, *names: str) -> dict[str, int]:
    """Read rows ``Name: 123 kB`` of a file of /proc, in bytes; missing rows are left out."""
    text, sizes = _text(file), {}
    for name in names:
        _, found, rest = text.partition(f"{name}:")
        if found:
            sizes[name] = int(rest.split(maxsplit=1)[0]) * 1024
    return sizes


def _number(file: Path) -> int | None:
    """Read a whole number of 0 or more; None for anything else, such as ``max`` or -1."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read()
    except OSError:
        return ""
