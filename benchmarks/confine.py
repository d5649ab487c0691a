"""Processes that may use only so much memory and so much of a core: cgroups, or RLIMIT_DATA.

A cgroup of version 2 is taken where the kernel's controllers are mounted there, else one of each of
version 1's; both need root. RLIMIT_DATA needs nothing: it bounds private writable memory, and an
allocation beyond it fails, where beyond a cgroup's limit the kernel kills. (RLIMIT_AS would count
what torch only maps, RLIMIT_RSS does nothing on Linux.)
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 100_000  # the kernel counts in ticks of 4 ms: a shorter one runs unevenly


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """What one process may use; None is all there is."""

    memory_bytes: int | None = None
    by: Literal["cgroup", "rlimit"] = "cgroup"
    cores: float | None = None

    @property
    def needs_cgroup(self) -> bool:
        """Whether a cgroup must be made."""
        return self.cores is not None or (self.memory_bytes is not None and self.by == "cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cage:
    """A confinement in force: the folders of its cgroups, by controller."""

    chosen: Confinement
    folders: dict[str, Path]
    version: int

    def enter(self) -> None:
        """Confine the calling process; to be called between fork and exec."""
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        if self.chosen.memory_bytes is not None and self.chosen.by == "rlimit":
            limit = (self.chosen.memory_bytes, self.chosen.memory_bytes)
            resource.setrlimit(resource.RLIMIT_DATA, limit)

    def limit_memory(self, num_bytes: int, *, pid: int) -> None:
        """Set another limit on the memory of a process that is at work.

        Raises:
            OSError: the kernel cannot take back as much as the process has beyond it.
        """
        if self.chosen.by == "rlimit":
            resource.prlimit(pid, resource.RLIMIT_DATA, (num_bytes, num_bytes))
        else:
            name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            (self.folders["memory"] / name).write_text(str(num_bytes))

    def peak_bytes(self) -> int:
        """Return the most memory that was charged to the cgroup, caches of files included."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        return int((self.folders["memory"] / name).read_text())

    def num_kills(self) -> int:
        """Return how many processes the kernel has killed here for want of memory."""
        if "memory" not in self.folders:
            return 0
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        rows = (self.folders["memory"] / name).read_text().splitlines()
        return int(dict(row.split() for row in rows)["oom_kill"])


def can_make_cgroups() -> bool:
    """Tell whether this process may make cgroups with limits on memory and cores."""
    try:
        with caged(Confinement(memory_bytes=2**30, cores=1.0)):
            return True
    except OSError:
        return False


@contextmanager
def caged(chosen: Confinement) -> Iterator[Cage]:
    """Make the cgroups that a confinement needs, if any, and remove them at the end.

    Raises:
        OSError: they cannot be made: no root, or no such controller.
    """
    if not chosen.needs_cgroup:
        yield Cage(chosen=chosen, folders={}, version=0)
        return
    version = 2 if "memory" in _words(CGROUPS / "cgroup.controllers") else 1
    name = f"headwater-{os.getpid()}-{time.monotonic_ns()}"
    wanted = [
        controller
        for controller, is_needed in (
            ("memory", chosen.memory_bytes is not None and chosen.by == "cgroup"),
            ("cpu", chosen.cores is not None),
        )
        if is_needed
    ]
    if version == 2:
        (CGROUPS / "cgroup.subtree_control").write_text("+memory +cpu")
    folders = {c: CGROUPS / name if version == 2 else CGROUPS / c / name for c in wanted}
    try:
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        _write_limits(chosen, folders, version)
        yield Cage(chosen=chosen, folders=folders, version=version)
    finally:
        for folder in folders.values():
            _remove(folder)


def _write_limits(chosen: Confinement, folders: dict[str, Path], version: int) -> None:
    if "memory" in folders:
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        (folders["memory"] / name).write_text(str(chosen.memory_bytes))
    if "cpu" in folders and chosen.cores is not None:
        quota = round(chosen.cores * PERIOD_MICROSECONDS)
        if version == 2:
            (folders["cpu"] / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (folders["cpu"] / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (folders["cpu"] / "cpu.cfs_quota_us").write_text(str(quota))


def _remove(folder: Path) -> None:
    """Remove a cgroup, once the kernel has let go of the last process in it."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            try:
                folder.rmdir()
            except OSError:
                time.sleep(0.05)
                continue
        return


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
