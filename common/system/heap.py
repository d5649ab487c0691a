"""The heap: what the C library keeps of freed memory, and what Python's collector looks through.

What is said to the C library does something where that is glibc, and nothing elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable

# Of mallopt(3); the bytes are those that glibc starts with.
M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES = -3, 128 * 1024
M_TRIM_THRESHOLD, KEPT_BYTES = -1, 256 << 20
MOST_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc takes no more
M_ARENA_MAX = -8


@functools.cache
def use_one_heap() -> None:
    """Let all threads that start from now on share one heap.

    glibc gives each thread an arena of its own, made of pieces of 64 MiB, in which activations of
    ever other sizes leave gaps: a CNN in micro-batches of up to 70 examples held 474 MB there, and
    315 after all that was free was given back, where the first thread's heap held 343 and 281. A
    server to which a hundred devices upload takes a tenth less.
    """
    mallopt = _malloc("mallopt")
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


@functools.cache
def keep_mmap_threshold() -> None:
    """Let glibc give large blocks back as soon as they are freed.

    glibc serves blocks above a threshold by mmap, and raises the threshold to the largest that was
    freed, up to 32 MiB. From then on activations come from its heap, where those that are held keep
    apart those that were dropped: activation checkpointing then took a transformer's 1,054 MB down
    to 697, and to 414 with the threshold kept where it starts. The kernel clears each block anew,
    which takes 1.4 to 2.4 times the time: right only where memory is what is lacking.
    """
    mallopt = _malloc("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


@functools.cache
def keep_freed() -> None:
    """Let glibc keep freed memory, up to KEPT_BYTES at the heap's top, for who allocates next.

    Else each backward pass gives its activations back and the next one has the kernel clear them
    anew: a 5M-parameter transformer in micro-batches of two took 1.5 times the time, a third of it
    in 1.1 million page faults. For a process that computes without end; not for a device that
    others need the memory of.
    """
    mallopt = _malloc("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MOST_MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def collect_only_what_is_new() -> None:
    """Let Python's garbage collector leave alone, for good, what is loaded by now.

    torch and flwr bring 220,000 objects, which a full collection looks through for 130 ms, holding
    up all threads; of a server with 500 devices that fell into the sending of plans.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Give memory that was freed back to the machine."""
    trim = _malloc("malloc_trim")
    if trim is not None:
        trim(0)


@functools.cache
def _malloc(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
        return function
    except (AttributeError, OSError, TypeError):
        return None
