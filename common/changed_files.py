"""Forgets the user's modules whose files have changed, so that the next run reads them again.

Python imports a file once in a process. In a notebook a run after an edit of the task, or of a file
beside it, would train the old one in silence.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_Stamp = tuple[int, int]

_loaded: dict[str, tuple[Path, _Stamp | None]] = {}
"""The file of each of the user's modules, by the module's name, and when it was last changed."""


def note_modules(names: Collection[str], folders: Collection[Path]) -> None:
    """Remember modules, if their files are in these folders or below and not remembered yet."""
    for name in names:
        found = getattr(sys.modules.get(name), "__file__", None)
        if found is None or name.partition(".")[0] in ("__main__", "headwater"):
            continue
        file = Path(found)
        if any(file.is_relative_to(folder) for folder in folders):
            known = _loaded.get(name)
            if known is None or known[0] != file:  # another file may have had the name before
                _loaded[name] = file, _stamp(file)


def forget_changed_modules() -> None:
    """Forget all of the user's modules if the file of one has changed, as they import each other.

    Objects that exist keep their classes. A run that is in progress in another thread goes on.
    """
    changed = [file for file, stamp in _loaded.values() if _stamp(file) != stamp]
    if not changed:
        return
    log.info("read again, as it has changed: %s", ", ".join(map(str, changed)))
    for file in changed:  # compiled code is told from a newer file by whole seconds only
        with suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(str(file))).unlink()
    for name in list(_loaded):
        sys.modules.pop(name, None)
        del _loaded[name]


def _stamp(file: Path) -> _Stamp | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
