"""A bound on allocations: one that would pass the memory limit fails, where the kernel would kill.

A pass that runs for the first time cannot be predicted for every model. So the process bounds its
private memory meanwhile (RLIMIT_DATA, getrlimit(2)): an allocation beyond what is left raises
MemoryError, which can be caught. The bound holds for such passes only: memory that is mapped and
never written counts too, and would use it up in the long run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.client.memory.peak_model import NOISE_BYTES, resident_bytes, status_bytes
from headwater.common.system.portability import optional_module

resource = optional_module("resource")

# torch starts another thread for each so many elements (at::internal::GRAIN_SIZE).
GRAIN = 32_768

_is_taken = threading.Lock()
_in_force: int | None = None


def bound_in_force() -> int | None:
    """Return the bound on private memory that ``bounded`` has set; None if it has set none."""
    return _in_force


@contextmanager
def bounded(limit_bytes: float | None) -> Iterator[None]:
    """Make allocations fail that would raise the process above so many resident bytes.

    What the kernel may count besides (``NOISE_BYTES``) is left.
    Memory that was mapped before, and not written yet, is not bounded. Without a limit, where the
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
    bound = int(status_bytes("VmData") + max(limit_bytes - NOISE_BYTES - resident_bytes(), 0))
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


def _counts_private_memory() -> bool:
    try:
        return status_bytes("VmData") > 0
    except OSError:
        return False
