"""The features of a device beside its rounds: the one list of them, by name.

A feature is imported when something asks for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

TIME_SHARE = "headwater.client.energy.throttle:time_share"


def time_share_rule() -> Any:
    """Return the function that gives the share of its time that a device trains."""
    return _loaded(TIME_SHARE)


def _loaded(name: str) -> Any:
    module, _, found = name.partition(":")
    return getattr(import_module(module), found)
