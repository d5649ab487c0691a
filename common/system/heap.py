"""Tunes the heap: how glibc keeps freed memory, and which objects Python's collector scans.

With another C library than glibc, the calls to it have no effect.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Parameters of mallopt(3); MMAP_THRESHOLD_BYTES is glibc's initial value.
M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES = -3, 128 * 1024
M_TRIM_THRESHOLD, MAX_KEPT_BYTES = -1, 256 << 20
MAX_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc accepts no more
M_ARENA_MAX = -8
# New objects between two collections of a process that simulates.
MAX_NEW_OBJECTS = 500_000

_FROZEN_HERE = threading.Event()


@functools.cache
def use_one_heap() -> None:
    """Make all threads that start from now on share one heap.

    glibc gives each thread its own arena of 64 MiB pieces, where activations of varying sizes leave
    gaps: a CNN with micro-batches of up to 70 examples held 474 MB there, and 315 MB after all free
    memory was released, where the first thread's heap held 343 and 281 MB. With one heap, a server
    to which a hundred devices upload takes a tenth less memory.
    """
    _mallopt(M_ARENA_MAX, 1)


def keep_mmap_threshold() -> None:
    """Make glibc release large blocks to the kernel as soon as they are freed.

    glibc serves blocks above a threshold by mmap, and raises the threshold to the largest freed
    block, up to 32 MiB. After that, activations come from its heap, where held ones fragment the
    space of freed ones: activation checkpointing then reduced a transformer's 1,054 MB to 697, and
    to 414 with the threshold kept at its initial value. The kernel clears each block again, which
    takes 1.4 to 2.4 times the time, so this is only for a lack of memory.
    """
    global _keeps_freed_blocks, _is_low
    _keeps_freed_blocks, _is_low = False, True
    _mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def raise_mmap_threshold() -> None:
    """Undo ``keep_mmap_threshold``: take glibc's highest thresholds, which it would reach itself.

    A pass of 24 decoder blocks of width 1,024 then grows the heap by 1,041 MB. Freed blocks stay in
    the heap for the next ones (``keeps_freed_blocks``).
    """
    global _keeps_freed_blocks, _is_low
    _keeps_freed_blocks, _is_low = True, False
    _mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_BYTES)
    _mallopt(M_TRIM_THRESHOLD, 2 * MAX_MMAP_THRESHOLD_BYTES)


def restore_mmap_threshold() -> None:
    """Raise the threshold if it was kept low last; glibc's own, which follows what is freed, stays.

    For the end of building a model, whose tensors are to be mapped one by one. A device that is
    short of memory keeps the threshold low again.
    """
    if _is_low:
        raise_mmap_threshold()


_keeps_freed_blocks = _is_low = False


def keeps_freed_blocks() -> bool:
    """Return whether freed large blocks shall stay in the heap: ``raise_mmap_threshold`` was last.

    Returning them between the blocks of a pass lowered the peak of 24 decoder blocks by 5 to 35 %,
    but not the size of the heap, and the kernel cleared 170,000 to 480,000 pages for each pass.
    """
    return _keeps_freed_blocks


@functools.cache
def keep_freed_memory() -> None:
    """Make glibc keep freed memory, up to MAX_KEPT_BYTES at the heap's top, for reuse.

    Otherwise each backward pass releases its activations, and the kernel clears the memory again
    for the next one: a 5M-parameter transformer with micro-batches of two took 1.5 times the time,
    a third of it in 1.1 million page faults. For a process that only computes; not for a device
    whose memory other programs need.
    """
    _mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_BYTES)
    _mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)


def freeze_loaded_objects() -> None:
    """Exclude all objects that exist now from Python's garbage collection.

    torch and flwr create 220,000 objects, which a full collection scans for 130 ms while all other
    threads wait; on a server with 500 devices that delayed the sending of plans.
    """
    if not gc.get_freeze_count():  # a walk over them all, if a caller has frozen some
        _FROZEN_HERE.set()
    gc.collect()
    gc.freeze()


def unfreeze_loaded_objects() -> None:
    """Let Python collect again what ``freeze_loaded_objects`` excluded, unless a caller had too."""
    if _FROZEN_HERE.is_set():
        _FROZEN_HERE.clear()
        gc.unfreeze()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Make Python's cycle collector run rarely: a simulated round creates objects for each device.

    With ten thousand devices every collection visited all of them, and took half of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(MAX_NEW_OBJECTS, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.collect()  # else the devices' data of a finished run stays in memory


ROOMS: list[Any] = []
"""Memory that stays for its next use, until ``release_freed_memory``."""


def release_freed_memory() -> None:
    """Release freed memory to the operating system."""
    ROOMS.clear()
    _libc("malloc_trim")(0)


def release_product_buffers() -> None:
    """Release what Intel's MKL keeps of each thread's matrix products until the thread ends.

    A thread that trained a decoder of width 1,024 kept 39 MB mapped, of which it had written 23.
    """
    _free_product_buffers()()


@functools.cache
def _free_product_buffers() -> Callable[[], object]:
    """Return the function of MKL in torch; one that does nothing if torch has no MKL."""
    import torch  # here, as heaps are tuned before torch is imported

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        free: Callable[[], object] = library.mkl_serv_free_buffers
    except (AttributeError, OSError):
        return lambda: None
    return free


def _mallopt(parameter: int, value: int) -> None:
    _libc("mallopt")(parameter, value)


@functools.cache
def _libc(name: str) -> Callable[..., object]:
    """Return a function of the C library; one that does nothing if the library lacks it."""
    try:
        function: Callable[..., object] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return lambda *_: None
    return function
