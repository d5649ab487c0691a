"""The scope of a run: its caches, and the Python objects that its settings name.

A process that a command started has one scope. ``headwater.simulate``, ``serve`` and ``take_part``
open one for each call, so that calls in one process, also in several threads, share no model and no
measurement, and leave nothing in memory. A scope follows the context (``contextvars``): it holds in
``asyncio`` tasks and in ``asyncio.to_thread``, and not in a plain thread.

A file of the user's that starts a run while it is imported would start itself again in each process
that imports it, without end. So no scope opens while such a file is imported.

Python imports a file once in a process: in a notebook a run after an edit of the task, or of a file
beside it, would train the old one in silence. So a new scope forgets modules that have changed.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from headwater.common.errors import UnknownTask

log = logging.getLogger(__name__)

PREFIX = "python:"
"""Of the name in the settings of an object that a Python caller gave."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Scope:
    objects: Mapping[str, object] = field(default_factory=dict)
    caches: dict[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)


_PROCESS = _Scope()
_current: ContextVar[_Scope] = ContextVar("headwater.run_scope")
_imported: ContextVar[Path] = ContextVar("headwater.imported_file")

_Stamp = tuple[int, int]
_loaded: dict[str, tuple[Path, _Stamp | None]] = {}
"""The file of each of the user's modules, by the module's name, and when it was last changed."""

MAIN_GUARD = 'if __name__ == "__main__":'


@contextmanager
def import_of(file: Path) -> Iterator[None]:
    """Mark that a file of the user's is imported meanwhile, so that it can start no run."""
    token = _imported.set(file)
    try:
        yield
    finally:
        _imported.reset(token)


@contextmanager
def run_scope(objects: Mapping[str, object]) -> Iterator[None]:
    """Open a scope in which settings may name these objects; it reads files anew that have changed.

    Raises:
        UnknownTask: a file of the user's is imported just now, and it is the one that starts a run.
    """
    if (file := _imported.get(None)) is not None:
        raise UnknownTask(
            f"{file.name} starts a run while it is imported as part of a run, so that every "
            "process that imports it would start it again",
            remedy=f"put what {file.name} runs as a script under `{MAIN_GUARD}`",
        )
    forget_changed_modules()
    token = _current.set(_Scope(dict(objects)))
    try:
        yield
    finally:
        _current.reset(token)


def object_named(name: str) -> object | None:
    """Return the Python object that the settings of this run name so; None if there is none."""
    return _current.get(_PROCESS).objects.get(name)


class CachedInScope(Generic[Arguments, Result]):
    """A function with a cache in each scope, of the last ``maxsize`` results (None: of all)."""

    def __init__(self, function: Callable[Arguments, Result], maxsize: int | None) -> None:
        self._function = function
        self._maxsize = maxsize
        functools.update_wrapper(self, function)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Return the cached result, or call the function."""
        caches = _current.get(_PROCESS).caches
        cached = caches.get(self._function)
        if cached is None:
            new = functools.lru_cache(maxsize=self._maxsize)(self._function)
            cached = caches.setdefault(self._function, new)
        result: Result = cached(*args, **kwargs)
        return result

    def cache_clear(self) -> None:
        """Forget the results of this scope."""
        _current.get(_PROCESS).caches.pop(self._function, None)


def cached_in_scope(
    maxsize: int | None = None,
) -> Callable[[Callable[Arguments, Result]], CachedInScope[Arguments, Result]]:
    """Return a decorator that caches a function's results in the scope of the run."""
    return lambda function: CachedInScope(function, maxsize)


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


def loaded_files() -> list[Path]:
    """Return the files of the user's modules that this process has imported."""
    return [file for file, _ in _loaded.values()]


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
