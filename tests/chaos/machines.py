"""What is done to the machine under a process: its clock, its disk, its network, its version.

Everything that is made here is removed when its ``with`` is left, whatever happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import http_proxy
from tests.chaos.scenario import Need
from tests.faults import Release
from tests.processes import ROOT, until

CLONE_NEWNET = 0x40000000
BURST_BYTES = 4096
QUEUE_SECONDS = "400ms"
# Of the present protocol, and hundreds of commits before 0.2.0; and the last commit of protocol 3.
REVISIONS: dict[Release, str] = {"earlier": "a1a4c6cf", "other protocol": "8825780a^"}
UNKNOWN_FLAGS = ("--once",)
"""Flags that they do not have: their devices end with their run."""
PARTS = ("headwater", "common", "client", "server", "simulation", "examples", "pyproject.toml")

# The wall clock alone; whatever is timed by the monotonic clock goes on as it was.
CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long ahead(void) { const char *text = getenv("CHAOS_AHEAD"); return text ? atol(text) : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  long failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += ahead();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  long failed = syscall(SYS_gettimeofday, now, zone);
  if (!failed) now->tv_sec += ahead();
  return failed;
}

time_t time(time_t *where) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (where) *where = now.tv_sec;
  return now.tv_sec;
}
"""


# A clock that is off.


def clock_library(folder: Path) -> Path:
    """Compile a library that, preloaded, sets a process's wall clock ahead."""
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(CLOCK)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return library


def set_clock(library: Path, seconds: float) -> None:
    """Become the same command anew, with another clock."""
    os.environ |= {"LD_PRELOAD": str(library), "CHAOS_AHEAD": str(int(seconds))}
    start_anew(ROOT)


# Another version.


def copy_version(folder: Path, version: str, *, has_server: bool = False) -> Path:
    """Copy what a device runs, or a server too, as another version, and return where it lies."""
    for package in ("headwater", "common", "client", *(("server",) if has_server else ())):
        shutil.copytree(ROOT / package, folder / package, symlinks=True)
    told = folder / f"headwater-{version}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: headwater\nVersion: {version}\n")
    return folder


def tree_of(release: Release, folder: Path) -> Path:
    """Return a folder with the files of a release; the present one is this checkout."""
    if release == "present":
        return ROOT
    found = folder / f"release {release}"
    if not found.exists():
        command = ["git", "archive", REVISIONS[release], "--", *PARTS]
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(found, filter="fully_trusted")  # our own; it has symbolic links
    return found


def start_anew(checkout: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Become the command that this process was to be, out of a checkout, without some flags."""
    module = sys.argv[0].removeprefix("headwater-")
    flags = [flag for flag in sys.argv[1:] if flag not in leave_out]
    os.chdir(checkout)
    os.execv(sys.executable, [sys.executable, "-m", f"headwater.{module}", *flags])


# A disk that is full.


@contextlib.contextmanager
def small_disk(at: Path, num_bytes: int) -> Iterator[None]:
    """Put a disk of so many bytes at a folder."""
    at.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "tmpfs", str(at)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(folder: Path) -> Path:
    """Fill a folder's disk to the last byte, and return the file that does."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        while file.write(b"\0"):
            pass
    return filler


# A network of its own.


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """A network namespace that reaches this machine over one pair of devices."""

    name: str
    outer: str
    outer_address: str

    def enter(self) -> None:
        """Put the calling process into it."""
        descriptor = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)

    def num_bytes_up(self) -> int:
        """Return how many bytes have come out of it."""
        return int(Path(f"/sys/class/net/{self.outer}/statistics/rx_bytes").read_text())

    def set_up(self, is_up: bool) -> None:
        """Take the link down, or up again."""
        _ip("link", "set", self.outer, "up" if is_up else "down")


@contextlib.contextmanager
def namespace(
    bits_per_second: int, *, down_bits_per_second: int | None = None, at: int = 0
) -> Iterator[Namespace]:
    """Make a namespace behind a link that lets so much through each way (tc-tbf(8)).

    ``down_bits_per_second`` is the rate of the way into it, if that is another, and ``at`` tells
    those of one process apart.
    """
    number = (os.getpid() + at) % 60_000
    name, outer, inner = f"chaos-{number}", f"cho{number}", f"chi{number}"
    net = f"10.{200 + number % 50}.{number // 256}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", name)
        _ip("address", "add", f"{net}.1/24", "dev", outer)
        _ip("-n", name, "address", "add", f"{net}.2/24", "dev", inner)
        _ip("link", "set", outer, "up")
        _ip("-n", name, "link", "set", inner, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        shape = ["burst", str(BURST_BYTES), "latency", QUEUE_SECONDS]
        down = ["root", "tbf", "rate", f"{down_bits_per_second or bits_per_second}bit", *shape]
        up = ["root", "tbf", "rate", f"{bits_per_second}bit", *shape]
        _run("tc", "qdisc", "add", "dev", outer, *down)
        _run("tc", "-n", name, "qdisc", "add", "dev", inner, *up)
        yield Namespace(name=name, outer=outer, outer_address=f"{net}.1")
    finally:
        subprocess.run(["ip", "link", "delete", outer], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        until(lambda: not Path(f"/run/netns/{name}").exists(), what=lambda: f"the end of {name}")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


# What this machine lets us do.


@lru_cache
def can(need: Need) -> bool:
    """Tell whether this machine lets us mount, make networks, compile, and so on."""
    if need == "cc":
        return shutil.which("cc") is not None
    if need == "history":
        return has_history()
    if need == "tinyproxy":
        return http_proxy.program() is not None and http_proxy.own_address() is not None
    with (
        contextlib.suppress(OSError, subprocess.SubprocessError),
        TemporaryDirectory() as folder,
        small_disk(Path(folder) / "disk", 1 << 16),
    ):
        if need == "mount":
            return True
        with namespace(1_000_000):
            return True
    return False


def has_history() -> bool:
    """Tell whether the history has the earlier releases."""
    return all(
        subprocess.run(
            ["git", "cat-file", "-e", f"{revision}^{{commit}}"],
            cwd=ROOT,
            capture_output=True,
            check=False,
        ).returncode
        == 0
        for revision in REVISIONS.values()
    )
