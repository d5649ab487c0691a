"""What the owner of a SuperNode requires, whatever the settings of a run say.

A device of ``headwater-client`` has its owner's settings. On a SuperNode they come with the run:
Flower's signature covers the app, and not the values that whoever starts the run gives to its keys.
So each limit that protects the device is there the stricter of the run's and of the owner's word,
which is the node's configuration (``--node-config 'max-share=0.3 privacy-budget=8'``), or the
default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import (
    ClientSettings,
    PartitionSettings,
    PrivacySettings,
    SecureSettings,
    Settings,
)
from headwater.common.user_code.task_spec import is_below

log = logging.getLogger(__name__)

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
PLACES = ("identity", "allow-list", "state", "runtime", "memory-limit")
"""Other keys of a node's configuration, which may be misspelt as well."""
WORDS = (
    *("secagg", "secure", "mask", "aggregation", "member", "survivor"),
    *("privacy", "epsilon", "budget", "allow"),
)
"""Words of limits: a key with one of them means a limit."""
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
    settings = settings.model_copy(update={"secure": secure, "privacy": privacy})
    is_limited = owners.aggregation != "off" or budget is not None
    return _without_a_run_s_choices(settings, node_config) if is_limited else settings


def _without_a_run_s_choices(settings: Settings, node_config: Mapping[str, Any]) -> Settings:
    """Return a run's settings without what it could choose for one node and not for others.

    Each node asks the SuperLink for a run's values, and no node sees what the others get.
    Less memory, fewer threads or shorter hours would leave a member of a session with nothing to
    add; the owner's words are the same in all runs.

    Raises:
        SettingsError: the run divides the node's own data, or names code that is not the app's.
    """
    if settings.partition != PartitionSettings():
        raise SettingsError(
            f"the run divides each node's own data ({settings.partition.kind}), and this node's "
            "owner requires masks or a privacy budget: a rule of the run's could leave this node "
            "hardly an example, or all others",
            remedy="leave partition.* out of the run's configuration; divide the data on the nodes",
        )
    named = (settings.task, settings.algorithm.name, *settings.feature.names)
    for place in filter(None, named):
        if not is_below(place, Path.cwd()):
            raise SettingsError(
                "the run names code by a path that leads out of its bundle, and this node's owner "
                "requires masks or a privacy budget: its signature covers no value of a run",
                remedy="put the file into the bundle, and name it by its path in there",
            )
    memory = node_config.get("memory-limit")
    try:
        client = ClientSettings.model_validate(
            {} if memory is None else {"memory_limit_bytes": memory}
        )
    except ValidationError as error:
        raise _fault(error, lambda _: "memory-limit") from None
    return settings.model_copy(update={"client": client, "threads": None})


def _check_spelling(node_config: Mapping[str, Any]) -> None:
    """Check that no key is nearly a limit's, or speaks of one: the limit would not be there."""
    limits = [*map(key_of, (*FLOORS, *OWN[:2])), *OF_BUDGET]
    known = [*limits, *PLACES]
    for key in node_config.keys() - set(known):
        plain = key.lower().replace("_", "-").replace(".", "-")
        near = get_close_matches(
            plain.removeprefix("secure-"), [*limits, *PLACES], n=1, cutoff=0.85
        )
        near = near or get_close_matches(plain, limits, n=1, cutoff=0.85)
        if near or any(word in plain for word in WORDS):
            meant = f"write it as {near[0]}" if near else f"it may be one of {', '.join(limits)}"
            raise SettingsError(
                f"the node's configuration has {key}, which is no setting, and so no limit",
                remedy=f"{meant} in the SuperNode's --node-config",
            )
    given = node_config.keys() & set(limits)
    if "privacy-budget" not in given and (idle := given & set(OF_BUDGET[1:3])):
        raise SettingsError(
            f"the node's configuration has {min(idle)} and no privacy-budget, and so no limit",
            remedy="give privacy-budget too in the SuperNode's --node-config",
        )
    if "secure-aggregation" not in given and (idle := given & set(map(key_of, FLOORS))):
        log.warning(
            "%s of the node's configuration holds where a run has masks; this node takes part in "
            "runs without masks too, as it has no secure-aggregation=active",
            ", ".join(sorted(idle)),
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
