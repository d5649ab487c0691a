"""What the owner of a SuperNode requires, whatever the settings of a run say.

A device of ``headwater-client`` has its owner's settings. On a SuperNode they come with the run:
Flower's signature covers the app, and not the values that whoever starts the run gives to its keys.
So each limit that protects the device is there the stricter of the run's and of the owner's word,
which is the node's configuration (``--node-config 'max-share=0.3 privacy-budget=8'``), or the
default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import (
    PartitionSettings,
    PrivacySettings,
    SecureSettings,
    Settings,
)

MODES = ("off", "semi-honest", "active")  # from the weakest to the strictest


def _stricter_mode(one: str, other: str) -> str:
    return max(one, other, key=MODES.index)


FLOORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "aggregation": _stricter_mode,
    "min_members": max,
    "min_quota": max,
    "max_plans": min,
    "min_survivors": max,
    "max_share": min,
    "member_bits": max,
    "corrupted": max,
    "dropout": max,
}
"""The settings of secure aggregation that protect a device, and which of two is the stricter."""
OWN = ("order_seed", "declared_examples", "identity", "allow_list")
"""Those that are the owner's alone: a run sets none of them."""
OF_BUDGET = ("privacy-budget", "privacy-unit", "privacy-delta", "new-privacy-budget")
"""The keys in a node's configuration of the owner's limit of privacy."""
OTHERS = ("ring_bits", "answer_factor", "phase_seconds")
"""Those that protect nobody: the server's choices, within what each device accepts."""


def key_of(field: str) -> str:
    """Return the key in a node's configuration of a setting of secure aggregation."""
    return "secure-aggregation" if field == "aggregation" else field.replace("_", "-")


def as_owner_requires(settings: Settings, node_config: Mapping[str, Any]) -> Settings:
    """Return a run's settings, as strict as the owner of the node requires.

    Raises:
        SettingsError: a value of the node's configuration is none of its setting, or a key nearly
            has the name of a limit.
    """
    _check_spelling(node_config)
    given = {name: node_config.get(key_of(name)) for name in (*FLOORS, *OWN[:2])}
    owners = _checked({name: one for name, one in given.items() if one is not None})
    run = settings.secure
    floors = {
        name: stricter(getattr(run, name), getattr(owners, name))
        for name, stricter in FLOORS.items()
    }
    secure = run.model_copy(update={**floors, **{name: getattr(owners, name) for name in OWN}})
    is_new = node_config.get("new-privacy-budget") is True
    privacy = settings.privacy.model_copy(update={"new_budget": is_new})
    if (budget := node_config.get("privacy-budget")) is not None:
        found = _checked_budget(budget, node_config)
        budgets = [one for one in (found.budget, privacy.budget) if one is not None]
        delta = min(found.delta, privacy.delta)
        privacy = privacy.model_copy(
            update={"budget": min(budgets), "unit": found.unit, "delta": delta}
        )
    is_limited = owners.aggregation != "off" or budget is not None
    if is_limited and settings.partition != PartitionSettings():
        raise SettingsError(
            f"the run divides each node's own data ({settings.partition.kind}), and this node's "
            "owner requires masks or a privacy budget: a rule of the run's could leave this node "
            "hardly an example, or all others",
            remedy="leave partition.* out of the run's configuration; divide the data on the nodes",
        )
    return settings.model_copy(update={"secure": secure, "privacy": privacy})


def _check_spelling(node_config: Mapping[str, Any]) -> None:
    """Check that no key is a limit's but for its spelling: the limit would not be there."""
    limits = [*map(key_of, (*FLOORS, *OWN[:2])), *OF_BUDGET]
    for key in node_config.keys() - set(limits):
        plain = key.lower().replace("_", "-").replace(".", "-")
        near = get_close_matches(plain.removeprefix("secure-"), limits, n=1, cutoff=0.85)
        near = near or get_close_matches(plain, limits, n=1, cutoff=0.85)
        if near:
            raise SettingsError(
                f"the node's configuration has {key}, which is no setting, and so no limit",
                remedy=f"write it as {near[0]} in the SuperNode's --node-config",
            )


def _checked(given: Mapping[str, Any]) -> SecureSettings:
    try:
        return SecureSettings.model_validate(given)
    except ValidationError as error:
        raise _fault(error, key_of) from None


def _checked_budget(budget: Any, node_config: Mapping[str, Any]) -> PrivacySettings:
    keys = {name: f"privacy-{name}" for name in ("unit", "delta")}
    given = {name: node_config[key] for name, key in keys.items() if key in node_config}
    try:
        return PrivacySettings.model_validate({"budget": budget, **given})
    except ValidationError as error:
        raise _fault(error, lambda name: f"privacy-{name}") from None


def _fault(error: ValidationError, key: Callable[[str], str]) -> SettingsError:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else "value"
    return SettingsError(
        f"the node's {key(name)} is {first['input']!r}: {first['msg'].lower()}",
        remedy="correct it in the SuperNode's --node-config",
    )
