"""Finds the features that the settings name, and makes their terms known (docs/extend.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from headwater.common.errors import SettingsError
from headwater.common.settings.training import FeatureSettings
from headwater.common.terms import KINDS, Terms, register
from headwater.common.user_code.named_objects import find_named

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFeature:
    """A feature of the user's."""

    name: str
    """Of its terms in a plan, of its entry in a checkpoint, and of its sums."""
    terms: type[Terms]
    server: Any
    """Its class ``Server``; None if it has none."""
    device: Any
    """Its class ``Device``; None if it has none."""


def own_features(chosen: FeatureSettings) -> list[OwnFeature]:
    """Return the features that are named, in the order in which they act.

    Raises:
        SettingsError: there is no such class, or it is no feature; or two have one name.
    """
    found: dict[str, OwnFeature] = {}
    for place in chosen.names:
        one = _feature_at(place)
        if one.name in found:
            raise SettingsError(
                f"two features have the name {one.name}",
                remedy="name each once, or set another NAME in one of the classes",
            )
        found[one.name] = one
    return list(found.values())


def _feature_at(place: str) -> OwnFeature:
    kind = find_named(place, what="feature")
    if not isinstance(kind, type):
        raise SettingsError(
            f"the feature {place} is a {type(kind).__name__} and no class",
            remedy="name the class itself, without constructing it",
        )
    name = getattr(kind, "NAME", None) or getattr(kind, "__name__", "").lower()
    server, device = getattr(kind, "Server", None), getattr(kind, "Device", None)
    if server is None and device is None:
        raise SettingsError(
            f"the feature {place} has neither a class Server nor a class Device",
            remedy="give it one of the two, or both (docs/extend.md)",
        )
    if not NAME.fullmatch(name) or name in KINDS:
        raise SettingsError(
            f"the feature {place} has the name {name!r}, which is taken or no name (taken: "
            f"{', '.join(KINDS)})",
            remedy="set NAME in the class: letters, digits and underscores",
        )
    terms = getattr(kind, "Terms", None) or Terms
    if not (isinstance(terms, type) and issubclass(terms, Terms)):
        raise SettingsError(
            f"the feature {place} has Terms that are no headwater.Terms",
            remedy="begin them with class Terms(headwater.Terms)",
        )
    if terms.__dict__.get("NAME") != name:
        # One class for both sides of a process, which read and write each other's terms.
        terms = type("Terms", (terms,), {"NAME": name, "__module__": __name__})
        setattr(kind, "Terms", terms)  # noqa: B010 - as a type checker knows no such attribute
    register(terms)
    return OwnFeature(name=name, terms=terms, server=server, device=device)


def keeps_state(device: type | None) -> bool:
    """Whether a method of a device's class, or of a base of the user's, names ``state``."""
    kinds = () if device is None else device.__mro__
    own = [kind for kind in kinds if kind.__name__ != "DeviceFeature"]
    methods = [method for kind in own for method in vars(kind).values()]
    code = [method.__code__ for method in methods if hasattr(method, "__code__")]
    return any("state" in one.co_names for one in code)
