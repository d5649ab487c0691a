"""A bound on allocations: one that would pass the memory limit fails, where the kernel would kill.

A pass that runs for the first time cannot be predicted for every model. So the process bounds its
private memory meanwhile (RLIMIT_DATA, getrlimit(2)): an allocation beyond what is left raises
MemoryError, which can be caught. The bound counts mapped memory, written or not. So what is mapped
now and will not be written is added to it: the stacks of threads, and the libraries' own data.

All threads share the bound. gRPC's end the process where an allocation fails, so a little room is
left in any case. A forked child has no bound; a program that is started meanwhile inherits it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.client.memory.peak_model import NOISE_BYTES, resident_bytes, status_bytes
from headwater.common.system.heap import release_product_buffers
from headwater.common.system.portability import optional_module

resource = optional_module("resource")

# torch starts another thread for each so many elements (at::internal::GRAIN_SIZE).
GRAIN = 32_768

# Smaller matrices are multiplied without a buffer.
BLAS_SIZE = 128

# glibc's stack of a thread where RLIMIT_STACK is unlimited.
UNLIMITED_STACK_BYTES = 2 << 20
STACK_GUARD_BYTES = 64 << 10  # of a stack's mapping, which cannot be written

MOSTLY = 16  # a reserve is a mapping of which less than a sixteenth was written

# Other threads may always take so much, and two stacks; predictions leave more free.
LEAST_ROOM_BYTES = 16 << 20

SMAPS = "/proc/self/smaps"

_is_taken = threading.Lock()
_in_force: int | None = None
_before: tuple[int, int] | None = None
"""The limit to which the process returns; None if there is no bound."""


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
    global _in_force, _before
    unwritten = _prepared_bytes() + _stack_bytes()
    release_product_buffers()  # of other threads, such as the one that checked the task
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    room = max(limit_bytes - NOISE_BYTES - resident_bytes(), 0)
    mapped = status_bytes("VmData")
    bound = int(min(mapped, status_bytes("RssAnon") + unwritten) + room)
    bound = max(bound, mapped + max(LEAST_ROOM_BYTES, 2 * _stack_size()))
    known = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    if known and min(known) <= bound:
        yield
        return
    _in_force, _before = bound, (soft, hard)  # first: whoever reads the limits must know it
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        _in_force = _before = None


def _unbound_child() -> None:
    """Take the bound from a forked child, such as a worker that loads data and stays."""
    global _in_force, _before
    if _before is not None:
        resource.setrlimit(resource.RLIMIT_DATA, _before)
        _in_force = _before = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unbound_child)


@functools.cache
def _prepared_bytes() -> int:
    """Let libraries allocate what they end the process without; return what they never write.

    These are the stacks of torch's threads, and the buffers of OpenBLAS: of numpy's, and on some
    processors of torch's.
    """
    import numpy as np  # here, as the limits are read before anything large is imported
    import torch

    torch.zeros(GRAIN * torch.get_num_threads(), dtype=torch.uint8).add_(1)
    np.ones((BLAS_SIZE, BLAS_SIZE)) @ np.ones((BLAS_SIZE, BLAS_SIZE))
    torch.ones(BLAS_SIZE, BLAS_SIZE) @ torch.ones(BLAS_SIZE, BLAS_SIZE)
    return _unwritten_bytes()


def _unwritten_bytes() -> int:
    """Return the bytes of reserves: mappings of which next to nothing was written, and files.

    Neither the heap, nor the stacks of threads.
    """
    num_bytes = 0
    for name, size, written in _private_mappings():
        is_reserve = name.startswith("/") or written <= size // MOSTLY
        if name != "[heap]" and is_reserve and not 0 <= _stack_size() - size < STACK_GUARD_BYTES:
            num_bytes += size - written
    return num_bytes


def _private_mappings() -> Iterator[tuple[str, int, int]]:
    """Yield the file or kind of each private writable mapping, its bytes, and those written."""
    name, size = None, 0
    with open(SMAPS, encoding="utf-8", errors="replace") as rows:
        for row in rows:
            words = row.split()
            if not words[0].endswith(":"):  # the first row of a mapping
                name = (words[5] if words[5:] else "") if words[1] == "rw-p" else None
            elif words[0] == "Size:":
                size = int(words[1]) * 1024
            elif words[0] == "Anonymous:" and name is not None:
                yield name, size, int(words[1]) * 1024


def _stack_bytes() -> int:
    """Return the mapped stacks of the process's threads, of which they use a small part."""
    return len(os.listdir("/proc/self/task")) * _stack_size()


def _stack_size() -> int:
    size = int(resource.getrlimit(resource.RLIMIT_STACK)[0])
    return UNLIMITED_STACK_BYTES if size == resource.RLIM_INFINITY else size


def _counts_private_memory() -> bool:
    try:
        has_sizes = min(status_bytes("VmData"), status_bytes("RssAnon")) > 0
        return has_sizes and os.access(SMAPS, os.R_OK)
    except OSError:
        return False
