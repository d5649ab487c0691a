"""What a resumed run's settings change: the values before and after, and their words.

Each checkpoint stores the settings of its rounds. A resumed run is compared with them, and not with
settings.toml, which it overwrites: so a change is not lost if the run ends before its next round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.common.settings.introspection import all_settings
from headwater.common.settings.schema import OptimizerSettings, ScheduleSettings, Settings

Values = dict[str, Any]
"""Settings by their dotted keys, as JSON has them."""
Changes = dict[str, tuple[Any, Any]]
"""The values before and after, by the setting's dotted key."""

# Where a run is, and not what it does: the same run may go on in another place.
PLACES = ("out", "track", "insecure", "check_task", "server.", "client.", "tls.")


def values_of(settings: Settings) -> Values:
    """Return the settings that say what a run does, with the optimizer that the algorithm chose."""
    tree = settings.model_dump(mode="json")
    tree["optimizer"] = settings.server_optimizer.model_dump(mode="json")
    values: Values = {}
    for key in all_settings():
        branch, _, leaf = key.rpartition(".")
        if not key.startswith(PLACES):
            values[key] = (tree[branch] if branch else tree)[leaf]
    return values


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Changes:
    """Return the settings that differ; one that only one side knows is no change."""
    return {
        key: (before[key], value)
        for key, value in after.items()
        if key in before and before[key] != value
    }


def of_training(found: Changes) -> Changes:
    """Return the changes that matter to a round: all but the number of rounds."""
    return {key: values for key, values in found.items() if key != "rounds"}


def optimizer_of(values: Mapping[str, Any]) -> tuple[OptimizerSettings, ScheduleSettings]:
    """Return the optimizer and the schedule of the settings."""

    def branch(name: str) -> Values:
        start = f"{name}."
        return {key.removeprefix(start): v for key, v in values.items() if key.startswith(start)}

    return (
        OptimizerSettings.model_validate(branch("optimizer")),
        ScheduleSettings.model_validate(branch("schedule")),
    )


def changes_text(found: Changes, *, arrow: str = "→") -> str:
    """Return the changes in words, as ``learning rate 0.01 → 0.003, rounds 10 → 20``."""
    return ", ".join(
        f"{_words(key)} {_shown(before)} {arrow} {_shown(after)}"
        for key, (before, after) in found.items()
    )


def _words(key: str) -> str:
    """Return a setting's flag in words; the key of a setting without one."""
    setting = all_settings()[key]
    if not setting.commands:
        return key
    return setting.flag.partition("/")[0].removeprefix("--").replace("-", " ")


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
