"""Finds what a setting names by its import path: an optimizer, a client algorithm, an observer.

``FILE.py:Name`` names something in a file, ``package.module:Name`` something in a module that
Python can import. If a Python caller gave an object under that name, it is found first
(``common.user_code.run_scope``).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from headwater.common.errors import FeatureMissing, SettingsError, UnknownObject, UnknownTask
from headwater.common.user_code.failures import described
from headwater.common.user_code.run_scope import object_named
from headwater.common.user_code.task_spec import import_place, split_place

FORMS = "name it as path/to/file.py:Name or package.module:Name"


def find_named(spec: str, *, what: str) -> Any:
    """Return the object that a spec names; ``what`` it should be, for errors.

    Raises:
        SettingsError: there is no such file, module or name, or the import fails.
    """
    given = object_named(spec)
    if given is not None:
        return given
    place, name = split_place(spec)
    if not place or not name:
        raise SettingsError(
            f"expected the {what} as FILE.py:Name or package.module:Name, found {spec!r}",
            remedy="give its file or module, and its name in there",
        )
    try:
        module = import_place(place)
    except UnknownTask as error:
        own = FORMS if error.remedy == UnknownTask.remedy else error.remedy
        raise UnknownObject(f"the {what} {spec}: {error}", remedy=own) from error
    if not hasattr(module, name):
        raise UnknownObject(
            f"the {what} {spec}: {place} has no {name}", remedy="correct the name after the colon"
        )
    return getattr(module, name)


def constructed(
    spec: str, arguments: Mapping[str, Any], *, what: str, method: str | None = None
) -> Any:
    """Return the object that a spec names; a class is constructed with these arguments.

    It has the ``method``, or is not constructed: a spec may come from who starts a run, and any
    class that is installed has a name.

    Raises:
        SettingsError: as ``find_named``; it lacks the method; the class lacks an argument or
            raises; or there are arguments for an object that is constructed already.
    """
    found = find_named(spec, what=what)
    if method is not None and not callable(getattr(found, method, None)):
        raise UnknownObject(
            f"the {what} {spec} has no method {method}",
            remedy=f"give it one, or name another {what}",
        )
    if not isinstance(found, type):
        if arguments:
            raise SettingsError(
                f"the {what} {spec} is no class, and takes no argument {', '.join(arguments)}",
                remedy="leave the arguments out, or name its class",
            )
        return found
    check_arguments(found, arguments, what=f"the {what} {spec}")
    try:
        return found(**arguments)
    except SettingsError:
        raise
    except Exception as error:
        raise UnknownObject(
            f"the {what} {spec} cannot be constructed: {described(error)}",
            remedy="correct the class or its arguments",
        ) from error


def check_arguments(
    function: Any, arguments: Mapping[str, Any], *, what: str, num_own: int = 0
) -> None:
    """Check that a class or function has these arguments, after the first ``num_own``.

    Raises:
        SettingsError: it lacks one.
    """
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    unknown = sorted(set(arguments) - set(list(parameters)[num_own:]))
    if unknown:
        raise SettingsError(
            f"{what} has no argument {', '.join(unknown)}",
            remedy=f"it has: {', '.join(list(parameters)[num_own:]) or 'none'}",
        )


def part_of(place: str) -> Any:
    """Return a part of a feature of ours: a module, or what it has, as module:Name.

    Raises:
        FeatureMissing: the feature's room is not installed.
    """
    module, _, name = place.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("headwater."):
            raise
        raise FeatureMissing(f"the run asks for {module}, and {error.name} is not here") from error
    return getattr(found, name) if name else found
