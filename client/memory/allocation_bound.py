"""A bound on allocations: one that would pass the memory limit fails, where the kernel would kill.

A pass that runs for the first time cannot be predicted for every model. So the process bounds its
private memory meanwhile (RLIMIT_DATA, getrlimit(2)): an allocation beyond what is left raises
MemoryError, which can be caught. The bound counts mapped memory, written or not. So what is mapped
now and will not be written is added to it: the stacks of threads, and the libraries' own data.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.client.memory.peak_model import NOISE_BYTES, resident_bytes, status_bytes
from headwater.common.system.portability import optional_module

resource = optional_module("resource")

# torch starts another thread for each so many elements (at::internal::GRAIN_SIZE).
GRAIN = 32_768

# glibc's stack of a thread where RLIMIT_STACK is unlimited.
UNLIMITED_STACK_BYTES = 2 << 20

_is_taken = threading.Lock()
_in_force: int | None = None


def bound_in_force() -> int | None:
    """Return the bound on private memory that ``bounded`` has set; None if it has set none."""
    return _in_force


@contextmanager
def bounded(limit_bytes: float | None) -> Iterator[None]:
    """Make allocations fail that would raise the process above so many resident bytes.

    What the kernel may count besides (``NOISE_BYTES``) is left free. Without a limit, where the
    system is not Linux, and while another thread has a bound, this changes nothing.
    """
    is_possible = limit_bytes is not None and resource is not None and _counts_private_memory()
    if not is_possible or not _is_taken.acquire(blocking=False):
        yield
        return
    try:
        assert limit_bytes is not None
        with _set(limit_bytes):
            yield
    finally:
        _is_taken.release()


@contextmanager
def _set(limit_bytes: float) -> Iterator[None]:
    global _in_force
    _start_threads()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    room = max(limit_bytes - NOISE_BYTES - resident_bytes(), 0)
    unwritten = _stack_bytes() + _library_bytes()
    bound = int(min(status_bytes("VmData"), status_bytes("RssAnon") + unwritten) + room)
    known = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    if known and min(known) <= bound:
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    _in_force = bound
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        _in_force = None


def _start_threads() -> None:
    """Start torch's threads: one whose stack cannot be allocated ends the process."""
    import torch  # here, as the limits are read before torch is imported

    torch.zeros(GRAIN * torch.get_num_threads(), dtype=torch.uint8).add_(1)


def _stack_bytes() -> int:
    """Return the mapped stacks of the process's threads, of which they use a small part."""
    size = resource.getrlimit(resource.RLIMIT_STACK)[0]
    each = UNLIMITED_STACK_BYTES if size == resource.RLIM_INFINITY else size
    return len(os.listdir("/proc/self/task")) * int(each)


@functools.cache
def _library_bytes() -> int:
    """Return the private data of files, such as libraries, that was never written."""
    num_bytes, is_counted = 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as rows:
        for row in rows:
            words = row.split()
            if not words[0].endswith(":"):  # the first row of a mapping
                is_counted = words[1] == "rw-p" and words[-1].startswith("/")
            elif is_counted and words[0] in ("Size:", "Anonymous:"):
                num_bytes += int(words[1]) * (1024 if words[0] == "Size:" else -1024)
    return num_bytes


def _counts_private_memory() -> bool:
    try:
        return status_bytes("VmData") > 0
    except OSError:
        return False
