"""Memory limits as resident bytes of this process, and usable cores."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from headwater.client.memory.peak_model import CODE_BYTES
from headwater.client.memory.process_limits import (
    IMPORT_BYTES,
    READ_EVERY_SECONDS,
    MemoryLimit,
    MemoryLimits,
    check_import_room,
    usable_cores,
)
from headwater.common.errors import OutOfMemory
from tests.machines import write

MIB = 2**20
RESIDENT, DATA, VIRTUAL, AVAILABLE = 300 * MIB, 500 * MIB, 2000 * MIB, 4000 * MIB


def machine(root: Path, files: dict[str, str] | None = None) -> Path:
    """Lay out a machine without limits, and then these files."""
    write(
        root,
        {
            "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {AVAILABLE // 1024} kB\n",
            "proc/self/status": f"VmSize:\t{VIRTUAL // 1024} kB\nVmRSS:\t{RESIDENT // 1024} kB\n"
            f"VmData:\t  {DATA // 1024} kB\n",
            "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\n"
            "Max data size             unlimited            unlimited            bytes\n"
            "Max address space         unlimited            unlimited            bytes\n",
            "proc/self/cgroup": "0::/a/b\n",
        },
    )
    write(root, files or {})
    return root


def sources(root: Path, own_bytes: int | None = None) -> dict[str, int]:
    return {limit.source: limit.num_bytes for limit in MemoryLimits(own_bytes, root=root).all()}


def test_without_limits_the_machine_s_available_memory_is_the_limit(
    tmp_path: Path,
) -> None:
    assert sources(machine(tmp_path)) == {"machine": AVAILABLE + RESIDENT}


@pytest.mark.parametrize("folder", ["a/b", "a", "."])
@pytest.mark.parametrize("file", ["memory.max", "memory.high"])
def test_the_limit_of_a_cgroup_or_its_parents_leaves_its_free_bytes(
    tmp_path: Path, folder: str, file: str
) -> None:
    group = f"sys/fs/cgroup/{folder}"
    machine(
        tmp_path,
        {
            f"{group}/{file}": f"{1000 * MIB}\n",
            f"{group}/memory.current": f"{700 * MIB}\n",
            f"{group}/memory.stat": f"inactive_file {100 * MIB}\nactive_file {50 * MIB}\n",
        },
    )
    held = 700 * MIB - 150 * MIB
    assert sources(tmp_path)[f"cgroup's {file}"] == RESIDENT + 1000 * MIB - held


def test_a_limit_of_cgroup_version_1_is_read_from_its_controller(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/a"
    machine(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
            f"{group}/memory.limit_in_bytes": f"{400 * MIB}\n",
            f"{group}/memory.usage_in_bytes": f"{350 * MIB}\n",
            f"{group}/memory.stat": f"inactive_file 0\ntotal_active_file {20 * MIB}\n"
            f"total_inactive_file {30 * MIB}\nhierarchical_memory_limit 9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert sources(tmp_path) == {
        "machine": AVAILABLE + RESIDENT,
        "cgroup's memory.limit_in_bytes": RESIDENT + (400 - 300) * MIB,
    }


def test_the_limit_of_a_parent_that_a_container_cannot_see_counts_in_version_1(
    tmp_path: Path,
) -> None:
    group = "sys/fs/cgroup/memory"
    machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/a\n",
            f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}/memory.usage_in_bytes": f"{350 * MIB}\n",
            f"{group}/memory.stat": f"hierarchical_memory_limit {400 * MIB}\n",
        },
    )
    lowest = MemoryLimits(root=tmp_path).lowest()
    assert lowest.num_bytes == RESIDENT + (400 - 350) * MIB
    assert "memory.limit_in_bytes of 419 MB" in lowest.origin


def test_a_mapped_data_set_changes_no_limit(tmp_path: Path) -> None:
    """Its pages are in the process and in its cgroup, and the kernel drops them when it must."""
    group = "sys/fs/cgroup/a/b"

    def laid_out(data: int) -> dict[str, int]:
        status = {"VmRSS": RESIDENT + data, "RssFile": CODE_BYTES + data}
        rows = "".join(f"{name}: {size // 1024} kB\n" for name, size in status.items())
        machine(
            tmp_path,
            {
                "proc/self/status": rows,
                f"{group}/memory.max": f"{1000 * MIB}\n",
                f"{group}/memory.current": f"{RESIDENT + data}\n",
                f"{group}/memory.stat": f"active_file {CODE_BYTES + data}\n",
            },
        )
        return sources(tmp_path)

    assert laid_out(900 * MIB) == laid_out(0)
    assert laid_out(0)["cgroup's memory.max"] == 1000 * MIB


def test_a_cgroup_above_its_limit_leaves_less_than_is_resident_but_not_below_zero(
    tmp_path: Path,
) -> None:
    group = "sys/fs/cgroup/a/b"
    machine(
        tmp_path, {f"{group}/memory.max": "1\n", f"{group}/memory.current": f"{9 * RESIDENT}\n"}
    )
    assert sources(tmp_path)["cgroup's memory.max"] == 0


@pytest.mark.parametrize(
    ("row", "name", "counted"),
    [("Max data size", "RLIMIT_DATA", DATA), ("Max address space", "RLIMIT_AS", VIRTUAL)],
)
def test_a_resource_limit_leaves_its_unmapped_bytes(
    tmp_path: Path, row: str, name: str, counted: int
) -> None:
    soft = 2500 * MIB
    machine(tmp_path, {"proc/self/limits": f"{row}      {soft}      unlimited      bytes\n"})
    assert sources(tmp_path)[name] == RESIDENT + soft - counted


def test_a_limit_is_constant_while_the_process_grows(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a/b"
    grown = 50 * MIB

    def laid_out(more: int) -> dict[str, int]:
        machine(
            tmp_path,
            {
                f"{group}/memory.max": f"{1000 * MIB}\n",
                f"{group}/memory.current": f"{700 * MIB + more}\n",
                "proc/meminfo": f"MemAvailable: {(AVAILABLE - more) // 1024} kB\n",
                "proc/self/status": f"VmRSS: {(RESIDENT + more) // 1024} kB\n"
                f"VmData: {(DATA + more) // 1024} kB\nVmSize: {(VIRTUAL + more) // 1024} kB\n",
                "proc/self/limits": f"Max data size  {2500 * MIB} unlimited bytes\n",
            },
        )
        return sources(tmp_path)

    before = laid_out(0)
    assert laid_out(grown) == before
    assert len(before) == 3


@pytest.mark.parametrize(("own_bytes", "least"), [(MIB, MIB), (2**60, AVAILABLE + RESIDENT)])
def test_the_owner_s_limit_applies_if_it_is_the_lowest(
    tmp_path: Path, own_bytes: int, least: int
) -> None:
    assert MemoryLimits(own_bytes, root=machine(tmp_path)).lowest_bytes() == least


def test_a_lowered_limit_is_noticed_at_the_next_reading(tmp_path: Path) -> None:
    now = [0.0]
    root = machine(tmp_path)
    limits = MemoryLimits(root=root, seconds=lambda: now[0])
    assert limits.lowest() == MemoryLimit(num_bytes=AVAILABLE + RESIDENT, source="machine")
    machine(root, {"proc/meminfo": "MemAvailable: 1024 kB\n"})
    now[0] = 0.9 * READ_EVERY_SECONDS
    assert limits.lowest_bytes() == AVAILABLE + RESIDENT
    now[0] = READ_EVERY_SECONDS
    assert limits.lowest_bytes() == MIB + RESIDENT


def test_slow_readings_make_the_limits_be_read_less_often(tmp_path: Path) -> None:
    """A clock that advances a second at each reading: reading takes 1 s, 2 % of 50 s."""
    now = [0.0]

    def seconds() -> float:
        now[0] += 1
        return now[0]

    root = machine(tmp_path)
    limits = MemoryLimits(root=root, seconds=seconds)
    limits.lowest()
    machine(root, {"proc/meminfo": "MemAvailable: 1024 kB\n"})
    looks = 0
    while limits.lowest_bytes() != MIB + RESIDENT:
        looks += 1
    assert looks == pytest.approx(50, abs=2)


def test_this_machine_s_limit_is_within_its_memory() -> None:
    assert 0 < MemoryLimits().lowest_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "25000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            0.25,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_a_cgroup_may_grant_a_fraction_of_a_core(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    affinity = len(os.sched_getaffinity(0))
    assert usable_cores(machine(tmp_path, files)) == (affinity if cores is None else cores)


def test_torch_is_not_imported_where_the_limit_has_no_room_for_it() -> None:
    """Else the kernel kills the process, and nothing says why."""
    limit = MemoryLimit(num_bytes=IMPORT_BYTES + 20_000_000, source="cgroup's memory.max")
    check_import_room(20_000_000, limit)
    with pytest.raises(OutOfMemory, match=r"takes 160 MB beside 21 MB .* is 180 MB \(cgroup's"):
        check_import_room(21_000_000, limit)
