"""Imports the Python file or the module that a user's task is in.

The folder of a task comes first for the imports of its own code, also for those inside functions
that run later, and last for everybody else's. So a task may have a ``common.py``, a ``utils.py`` or
a package ``client/``: no module of that name elsewhere hides it, and it hides none. A file inside a
package (a folder with ``__init__.py``) is imported as a module of that package, so that its
relative imports work.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from headwater.common.errors import UnknownTask, system_remedy
from headwater.common.user_code.bundled_examples import is_bundled
from headwater.common.user_code.failures import is_installed, user_frames
from headwater.common.user_code.run_scope import MAIN_GUARD, import_of, note_modules

log = logging.getLogger(__name__)

# Packages of the bundled examples, which a copy of one needs too, and the extra that has each.
EXTRAS = {
    "PIL": "examples",
    "peft": "transformers",
    "sklearn": "examples",
    "transformers": "transformers",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskModule:
    """A task's module: its name for Python, its file, and the folders that it imports from."""

    name: str
    file: Path
    folders: tuple[Path, ...]
    """The file's own folder, and the folder of its outermost package if that is another."""


def module_of_file(file: Path) -> TaskModule:
    """Return the module of an absolute path; its dotted name, if the file is in a package."""
    root, names = file.parent, [] if file.stem == "__init__" else [file.stem]
    while (root / "__init__.py").is_file():
        root, names = root.parent, [root.name, *names]
    return TaskModule(
        name=".".join(names), file=file, folders=tuple(dict.fromkeys((file.parent, root)))
    )


def module_of_name(name: str) -> TaskModule | None:
    """Return the module of a dotted name in the working folder; None if there is none.

    An installed package wins over a folder without ``__init__.py``, as it does for Python.
    """
    root, (first, *rest) = Path.cwd(), name.split(".")
    spec = PathFinder.find_spec(first, [str(root), *sys.path])
    if spec is None or first in sys.builtin_module_names or first == "headwater":
        return None
    found = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    own = [place for place in found if not is_installed(place)]  # a .venv may be in the folder
    if not any(Path(place).resolve().is_relative_to(root.resolve()) for place in own):
        return None
    place = root.joinpath(first, *rest)
    file = place / "__init__.py" if place.is_dir() else place.with_name(f"{place.name}.py")
    return TaskModule(name=name, file=file, folders=tuple(dict.fromkeys((file.parent, root))))


def import_task_module(module: TaskModule) -> ModuleType:
    """Import a task's module, or return it if it is imported already.

    Raises:
        UnknownTask: the import fails; the message names the file and line of the user's code.
    """
    importlib.invalidate_caches()  # the file may be a moment old
    _forget_namesakes(module)
    for folder in map(str, module.folders):
        if folder not in sys.path:
            sys.path.append(folder)  # for folders without __init__.py, and for pickle
    before = set(sys.modules)
    with _FINDER.importing(module), explained(module.file):
        imported = _import_package_member(module) if "." in module.name else _import_file(module)
    note_modules({imported.__name__, *(set(sys.modules) - before)}, module.folders)
    return imported


def _import_package_member(module: TaskModule) -> ModuleType:
    imported = importlib.import_module(module.name)
    found = getattr(imported, "__file__", None)
    if found is None:
        raise UnknownTask(f"{module.name} is a folder without __init__.py, not a module")
    if not _is_same(Path(found), module.file):
        first = module.name.partition(".")[0]
        raise UnknownTask(
            f"{shown(module.file)} is in a package named {first}, and Python has another {first} "
            f"loaded, from {found}",
            remedy="rename the folder of the package",
        )
    return imported


def _import_file(module: TaskModule) -> ModuleType:
    names = (module.name, f"headwater_task_{module.name}")
    for name in names:
        found = getattr(sys.modules.get(name), "__file__", None)
        if found is not None and _is_same(Path(found), module.file):
            return sys.modules[name]
    # Its own name, by which pickle and its neighbours find it, unless something else has it.
    name = names[0] if _is_free(module) else names[1]
    spec = importlib.util.spec_from_file_location(name, module.file)
    if spec is None or spec.loader is None:
        raise UnknownTask(f"{shown(module.file)} is not a Python file")
    imported = importlib.util.module_from_spec(spec)
    sys.modules[name] = imported
    try:
        spec.loader.exec_module(imported)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return imported


def _is_free(module: TaskModule) -> bool:
    if module.name in sys.modules or module.name in sys.stdlib_module_names:
        return False
    spec = PathFinder.find_spec(module.name)
    return spec is None or spec.origin is None or _is_same(Path(spec.origin), module.file)


def _forget_namesakes(module: TaskModule) -> None:
    """Forget loaded modules, of another task or script, that this one has under their name.

    Installed packages, the standard library and Headwater stay.
    """
    for name, loaded in list(sys.modules.items()):
        if "." in name or name in ("__main__", "headwater"):
            continue
        found = _location(loaded)
        if found is None or is_installed(found):  # asked first: it reads no folder
            continue
        own = _own_location(name, module)
        if own is None or _is_same(Path(found), own):
            continue
        for other in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            del sys.modules[other]


def _location(module: ModuleType) -> str | None:
    """Return a module's file, or the folder of a package."""
    if getattr(module, "__file__", None):
        folder, file = os.path.split(str(module.__file__))
        return folder if file == "__init__.py" else str(module.__file__)
    return next((str(folder) for folder in getattr(module, "__path__", ())), None)


def _own_location(name: str, module: TaskModule) -> Path | None:
    for folder in module.folders:
        package, file = folder / name, folder / f"{name}.py"
        is_plain = name == module.name.partition(".")[0] and package.is_dir()
        if is_plain or (package / "__init__.py").is_file():
            return package
        if file.is_file():
            return file
    return None


class _OwnFoldersFirst(MetaPathFinder):
    """Searches a task's folders first if the importing code is the task's own."""

    def __init__(self) -> None:
        self._folders: dict[Path, tuple[Path, ...]] = {}
        """By a folder, the folders that code below it imports from."""
        self._importing: tuple[Path, ...] = ()

    @contextmanager
    def importing(self, module: TaskModule) -> Iterator[None]:
        """Register a module's folders, and search them for the imports of this file meanwhile."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._folders |= dict.fromkeys(module.folders, module.folders)
        before, self._importing = self._importing, module.folders
        try:
            yield
        finally:
            self._importing = before

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find a module that the task's own code imports; None for all other imports."""
        if path is not None:  # within a package
            return None
        for folder in self._folders_of(_importing_file()):
            spec = PathFinder.find_spec(fullname, [str(folder)])
            if spec is not None and spec.loader is not None:  # a plain folder comes last
                return spec
        return None

    def _folders_of(self, importer: str) -> tuple[Path, ...]:
        if importer == _importing_file.__code__.co_filename:
            return self._importing
        file = Path(importer)
        for folder in file.parents:  # the nearest first
            if folder in self._folders:
                is_other = is_installed(str(file)) and not is_installed(str(folder))
                return () if is_other else self._folders[folder]
        return ()


_FINDER = _OwnFoldersFirst()


def _importing_file() -> str:
    """Return the file of the code that has caused the import in progress."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<frozen importlib") and file != importlib.__file__:
            break
        frame = frame.f_back
    return frame.f_code.co_filename


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


# Errors of the user's code.


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Turn an error of the code that is imported into an ``UnknownTask`` with file and line."""
    try:
        with import_of(file):
            yield
    except UnknownTask:
        raise
    except (Exception, SystemExit) as error:
        log.info("the traceback of %s:", file, exc_info=error)
        raise UnknownTask(
            f"{shown(file)} cannot be imported: {_in_own_code(error, file)}",
            remedy=_remedy(error, file),
        ) from error


def _in_own_code(error: BaseException, file: Path) -> str:
    """Return an error on one line, after the last line of the user's own code that led to it."""
    frames = user_frames(error)
    place = ""
    if frames:
        last = frames[-1]
        name = "" if _is_same(Path(last.filename), file) else f"{shown(Path(last.filename))}, "
        place = f"{name}line {last.lineno} ({last.line}): "
    return f"{place}{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return error.msg
    return next(iter(str(error).splitlines()), "")


def _remedy(error: BaseException, file: Path) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _remedy_of_missing(error.name.partition(".")[0], file)
    if isinstance(error, ImportError) and "relative import" in str(error):
        return f"put an empty __init__.py beside {file.name}, or import without the dot"
    if isinstance(error, SystemExit):
        return f"put what the file runs as a script under `{MAIN_GUARD}`"
    if isinstance(error, SyntaxError) and "null bytes" in error.msg:
        return "save the file as UTF-8: Python reads no other text with a byte of zero in it"
    return system_remedy(str(error)) or "correct the file; -v shows the whole traceback"


def _remedy_of_missing(name: str, file: Path) -> str:
    if is_bundled(file) or name in EXTRAS:
        extra = EXTRAS.get(name, "examples")
        return f"{file.name} needs {name}: pip install 'headwater[{extra}]'"
    above = next((folder for folder in file.parents if folder.name == name), None)
    if above is not None:
        module = ".".join(file.relative_to(above.parent).with_suffix("").parts)
        return f"start in {above.parent}, and name the task as a module: --task {module}:CLASS"
    return f"install it for {sys.executable}, or put your own {name}.py beside {file.name}"


def shown(path: Path) -> str:
    """Return a path for a message: relative to the working folder if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
