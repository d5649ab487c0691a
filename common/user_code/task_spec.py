"""Finds the task that ``--task`` names, and says which code it is.

``FILE.py:Class`` names a class of a file, ``package.module:Class`` one of a module, in the working
folder or installed; an object that the file makes may stand in the class's place, as in ``task =
headwater.Task(...)``. Without a name it is the only task in there, of the classes first.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path, PureWindowsPath
from types import ModuleType
from typing import Any

from headwater.common.errors import UnknownTask
from headwater.common.user_code.bundled_examples import existing_or_bundled, expanded
from headwater.common.user_code.failures import is_users
from headwater.common.user_code.run_scope import PREFIX
from headwater.common.user_code.task_import import (
    explained,
    import_task_module,
    module_of_file,
    module_of_name,
)

METHODS = ("new_model", "train_examples", "loss_sum")
FORMS = "path/to/my_task.py:MyTask or package.module:MyTask"
MAX_NAMES = 8
MAX_NAME = 100
BUNDLE = ".bundle"
"""The signed bundle itself, in the folder that its files were unpacked to."""
MAX_DEPTH = 8


def find_task(spec: str) -> Any:
    """Import what a spec names and return its class, or the object that is the task.

    Raises:
        UnknownTask: no such file, module or task; the import fails; or the spec names no task, and
            there is none or more than one.
    """
    place, name = split_spec(spec)
    return _task_in(import_place(place), place, name)


def find_task_class(spec: str) -> type[Any]:
    """Return the class of the task that a spec names, see ``find_task``.

    Raises:
        UnknownTask: see ``find_task``.
    """
    found = find_task(spec)
    return found if isinstance(found, type) else type(found)


def import_place(place: str) -> ModuleType:
    """Import a user's Python file or module.

    Raises:
        UnknownTask: there is none, or its import fails.
    """
    if _is_path(place):
        return import_task_module(module_of_file(_existing_file(place)))
    return _import_named(place)


def split_spec(spec: str) -> tuple[str, str | None]:
    """Return the file or module of a spec, and its class if it names one.

    Raises:
        UnknownTask: one of them is empty.
    """
    place, class_name = split_place(spec)
    if not place or class_name == "":
        raise UnknownTask(f"expected FILE.py:Class or package.module:Class, found {spec!r}")
    return place, class_name


def split_place(text: str) -> tuple[str, str | None]:
    r"""Split PLACE:NAME at its last colon; None if there is no name, as in ``C:\tasks\my.py``."""
    place, colon, name = text.rpartition(":")
    is_drive = "/" in name or "\\" in name
    return (place, name) if colon and not is_drive else (text, None)


def name_of(spec: str) -> str:
    """Return a short name for a spec: its class, or else its file or module."""
    place, class_name = split_spec(spec)
    return class_name or (Path(place).stem if _is_path(place) else place.rpartition(".")[2])


def source_file(spec: str) -> Path | None:
    """Return the file that a spec names, without importing it; None if there is none."""
    place, _ = split_spec(spec)
    if _is_path(place):
        file = existing_or_bundled(expanded(place))
        return file if file.is_file() else None
    module = module_of_name(place)
    return None if module is None or not module.file.is_file() else module.file


def bundle_folder(spec: str) -> Path | None:
    """Return the folder of the bundle that a task's file is of; None if it is in none."""
    file = source_file(spec)
    if file is None:
        return None
    return next((one for one in [*file.parents][:MAX_DEPTH] if (one / BUNDLE).is_file()), None)


def is_below(spec: str, folder: Path) -> bool:
    """Return whether a spec names a module, or a file below a folder (links are followed)."""
    place, _ = split_spec(spec)
    path, root = Path(place), folder.resolve()
    # A task's "~" is expanded also in "./~", and to look at a network path connects to its host.
    is_home = str(path).startswith("~")
    if is_home or PureWindowsPath(place).drive or place.startswith(("\\\\", "//")):
        return False
    return (root / path).resolve().is_relative_to(root)


@cache
def code_of(kind: type[Any]) -> str:
    """Return the name of a task's class and the SHA-256 of its code, in hexadecimal digits.

    It is the same wherever the same file is installed, with any line ends. The code is the file of
    the class and those of its bases, but not what these import. A base that is installed, and a
    class of a notebook or of the script that Python runs, count by name alone.
    """
    digest = hashlib.sha256(kind.__qualname__.encode())
    module = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
    if "<locals>" in kind.__qualname__:  # of a function that makes classes: by the names they have
        names = sorted(name for name, value in module.items() if value is kind)
        digest.update(" ".join(names).encode())
    for file in dict.fromkeys(_file_of(one, kind) for one in kind.__mro__):
        if file is not None:
            text = file.read_bytes().replace(b"\r\n", b"\n")
            digest.update(hashlib.sha256(text).digest())
    return f"{kind.__name__[:MAX_NAME]} {digest.hexdigest()}"


def code_at(spec: str) -> str:
    """Return the code of the task that a spec names.

    It is that of its class, or of the file of an object; or of all files of its bundle.

    Raises:
        UnknownTask: see ``find_task``.
    """
    found = find_task(spec)
    if (bundle := bundle_folder(spec)) is not None:
        title = name_of(spec)
        signed = hashlib.sha256(title.encode() + (bundle / BUNDLE).read_bytes())
        return f"{title[:MAX_NAME]} {signed.hexdigest()}"
    if isinstance(found, type):
        return code_of(found)
    place, name = split_spec(spec)
    module = import_place(place)
    name = name or next(name for name, one in vars(module).items() if one is found)
    digest = hashlib.sha256(f"{name} {code_of(found.__class__)}".encode())
    if module.__file__ is not None:
        text = Path(module.__file__).read_bytes().replace(b"\r\n", b"\n")
        digest.update(hashlib.sha256(text).digest())
    return f"{name[:MAX_NAME]} {digest.hexdigest()}"


def short_code(code: str) -> str:
    """Return a task's name and the beginning of its code's digest, for people."""
    return code[: 12 - 64]


def _file_of(one: type[Any], kind: type[Any]) -> Path | None:
    """Return the file of a task's class, or of a base of it that is the user's own."""
    found = getattr(sys.modules.get(one.__module__), "__file__", None)
    if found is None or one.__module__ in ("__main__", "__mp_main__"):
        return None
    is_own = is_users(found) and not one.__module__.startswith("headwater.")
    return Path(found) if (is_own or one is kind) and Path(found).is_file() else None


def _is_path(place: str) -> bool:
    names = place.split(".")
    return not all(map(str.isidentifier, names)) or names[1:] == ["py"]


def _existing_file(place: str) -> Path:
    path = existing_or_bundled(expanded(place))
    if path.is_file():
        if path.suffix != ".py":
            raise UnknownTask(f"{place} is not a Python file")
        return path.resolve()
    if path.is_dir():
        raise _is_folder(place, path)
    folder = path.parent
    files = _python_files(folder)
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    if not folder.is_dir():
        where += f": there is no folder {path.parent}"
    near = get_close_matches(path.name, files, n=1, cutoff=0.7)
    found = f"; did you mean {path.parent / near[0]}?" if near else _listed("there is", files)
    raise UnknownTask(
        f"there is no file {place}{where}{found}",
        remedy="correct the path; a relative one starts in the working folder",
    )


def _is_folder(place: str, folder: Path) -> UnknownTask:
    return UnknownTask(f"{place} is a folder, not a task{_listed('it has', _python_files(folder))}")


def _python_files(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.glob("*.py")) if folder.is_dir() else []


def _import_named(name: str) -> ModuleType:
    """Import a module by its dotted name.

    Raises:
        UnknownTask: there is no such module, or its import fails.
    """
    module = module_of_name(name)
    try:
        if module is not None:
            if module.file.name == "__init__.py" and not module.file.exists():
                raise _is_folder(name, module.file.parent)
            return import_task_module(module)
        with explained(Path(name)):
            return importlib.import_module(name)
    except UnknownTask as error:
        missing = getattr(error.__cause__, "name", None)
        is_itself = isinstance(error.__cause__, ModuleNotFoundError) and (
            missing == name or name.startswith(f"{missing}.")
        )
        if not is_itself:
            raise
        raise _no_module(name) from error


def _no_module(name: str) -> UnknownTask:
    if name == PREFIX.removesuffix(":"):
        return UnknownTask(
            "the run's task was an object of a Python program, and this call gives none",
            remedy="give the same again: task=..., or model=, examples= and loss=",
        )
    parent, _, last = name.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", ()) if parent else [str(Path.cwd())]
    names = [one.name for one in pkgutil.iter_modules(folders)]
    near = get_close_matches(last, names, n=1)
    full = ".".join(filter(None, (parent, near[0]))) if near else ""
    return UnknownTask(
        f"there is no module {name} in {Path.cwd()}, and none is installed"
        + (f"; did you mean {full}?" if near else ""),
        remedy=f"start in the folder that has it, or install its package; --task takes {FORMS}",
    )


def _task_in(module: ModuleType, place: str, name: str | None) -> Any:
    tasks = _tasks_in(module)
    if name is None:
        names = [*tasks]
        if len(names) == 1:
            return tasks[names[0]]
        if not names:
            raise UnknownTask(
                f"{place} has no task: no class in it has the methods {', '.join(METHODS)}",
                remedy="see docs/task.md for a whole task",
            )
        raise UnknownTask(
            f"{place} has {len(names)} tasks: {', '.join(names[:MAX_NAMES])}",
            remedy=f"choose one of them, as in --task {place}:{names[0]}",
        )
    found = getattr(module, name, None)
    if isinstance(found, type) or _is_task(found):
        return found
    if found is not None:
        raise UnknownTask(f"{place} has no class {name}: it is a {type(found).__name__}")
    classes = [name for name, one in vars(module).items() if isinstance(one, type)]
    near = get_close_matches(name, classes, n=1)
    candidates = _listed("its tasks:", [*tasks])
    did_you_mean = f"; did you mean {near[0]}?" if near else candidates
    raise UnknownTask(f"{place} has no class {name}{did_you_mean}")


def _tasks_in(module: ModuleType) -> dict[str, Any]:
    """Return the tasks that a module itself defines: classes, or else objects, by their names."""
    public = {name: one for name, one in vars(module).items() if not name.startswith("_")}
    classes = {
        one.__name__: one
        for one in public.values()
        if isinstance(one, type)
        and one.__module__ == module.__name__
        and not one.__name__.startswith("_")
        and not inspect.isabstract(one)
        and _is_task(one)
    }
    objects = {
        name: one for name, one in public.items() if not isinstance(one, type) and _is_task(one)
    }
    return classes or objects


def _is_task(found: Any) -> bool:
    return all(hasattr(found, method) for method in METHODS)


def _listed(title: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = ", ..." if len(names) > MAX_NAMES else ""
    return f"; {title} {', '.join(names[:MAX_NAMES])}{more}"
