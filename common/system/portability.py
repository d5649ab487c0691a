"""What Linux, macOS and Windows do not have in common, for the places that need it.

Windows lacks the modules ``fcntl`` and ``resource`` and some functions of ``os`` and ``signal``;
/proc and cgroups are Linux's. Code asks for what it uses (``hasattr(os, "fork")``) and not for the
system's name, so that a test can take it away on any system.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol


class PipeEnd(Protocol):
    """One end of a pipe of ``multiprocessing``, which is of another class on Windows."""

    def send(self, message: Any, /) -> None:
        """Send a message."""
        ...

    def recv(self) -> Any:
        """Wait for a message; EOFError after the other end was closed."""
        ...

    def close(self) -> None:
        """Close this end."""
        ...

    def fileno(self) -> int:
        """Return its descriptor or handle."""
        ...


def optional_module(name: str) -> Any:
    """Return a module that may be missing, of the standard library or another; None if it is."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def num_usable_cores() -> int:
    """Return how many cores this process may use; without an affinity, all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
