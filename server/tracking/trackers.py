"""Finds the observer that ``--track`` names: a shipped one, or a class of the user's.

A file ``NAME_tracker.py`` in this folder with a class ``NameTracker`` is all that another
``--track NAME`` needs.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

from headwater.common.errors import SettingsError
from headwater.common.user_code.named_objects import constructed
from headwater.server.rounds.observer import Observer
from headwater.server.tracking.user_observer import UserObserver

SUFFIX = "_tracker"


def tracker(name: str) -> Observer:
    """Return the observer of ``--track NAME``.

    Raises:
        SettingsError: there is no such observer, or its package is not installed.
    """
    shipped = sorted(
        module.name.removesuffix(SUFFIX)
        for module in pkgutil.iter_modules([str(Path(__file__).parent)])
        if module.name.endswith(SUFFIX)
    )
    if name in shipped:
        module = import_module(f"{__package__}.{name}{SUFFIX}")
        return UserObserver(getattr(module, f"{name.capitalize()}Tracker")())
    if ":" not in name:
        raise SettingsError(
            f"--track knows no {name!r}",
            remedy=f"choose {', '.join(shipped)}, or name a class of your own as in "
            "my_observers.py:MyObserver",
        )
    return UserObserver(constructed(name, {}, what="observer"))
