"""What a resumed run's settings change, and which code the file in its folder may name.

Each checkpoint stores the settings of its rounds. A resumed run is compared with them, and not with
settings.toml, which it overwrites: so a change is not lost if the run ends before its next round.

A run's folder may come from anybody, and to load a task or an optimizer runs its code. So the file
in it, and a submitted one, name only installed modules and files below the working folder, as a
saved model does (``common.model.trained_model``). The user may name any code. Nor does a folder
switch protection off, or have links, through which a run would write files elsewhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from headwater.common.errors import SettingsError
from headwater.common.settings.introspection import all_settings
from headwater.common.settings.schema import OptimizerSettings, ScheduleSettings, Settings
from headwater.common.user_code.task_spec import is_below, source_file, split_place

UNPROTECTED = ("plain_text", "public_metrics")
"""The settings that let anybody on the way read."""
Values = dict[str, Any]
"""Settings by their dotted keys, as JSON has them."""
Changes = dict[str, tuple[Any, Any]]
"""The values before and after, by the setting's dotted key."""

# Where a run is, and not what it does: the same run may go on in another place.
PLACES = ("out", "track", "insecure", "check_task", "submitted_code", "server.", "client.", "tls.")
# But for whom it trusts.
TRUSTED = ("server.aggregators", "tls.ca")


def values_of(settings: Settings) -> Values:
    """Return the settings that say what a run does, with the optimizer that the algorithm chose."""
    tree = settings.model_dump(mode="json")
    tree["optimizer"] = settings.server_optimizer.model_dump(mode="json")
    values: Values = {}
    for key in all_settings():
        branch, _, leaf = key.rpartition(".")
        if not key.startswith(PLACES) or key in TRUSTED:
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


def named_code(settings: Settings) -> list[tuple[str, str]]:
    """Return each place of code that the settings name, after the key of its setting.

    A name of ``torch.optim``, or of a library, is like that of an installed module.
    """
    places = [
        ("task", settings.task),
        ("track", settings.track),
        ("optimizer.name", settings.optimizer.name),
        ("algorithm.name", settings.algorithm.name),
        *(("feature.name", name) for name in settings.feature.names),
        ("standby.shared_state", settings.standby.shared_state),
    ]
    return [(key, place) for key, place in places if place is not None and _is_code(place)]


def check_code(
    settings: Settings,
    file: Path,
    *,
    folder: Path | None = None,
    given: Collection[str] = (),
    came_with: Path | None = None,
) -> None:
    """Check that a file's settings name code below a folder, the working folder by default.

    ``given`` are the keys that the user has set, in place of the file.

    What lies in the folder that the file ``came_with`` is no more the user's than the file is.

    Raises:
        SettingsError: one names code elsewhere.
    """
    folder = folder or Path.cwd()
    for key, place in named_code(settings):
        if key in given:
            continue
        setting = all_settings()[key]
        source = source_file(place) if is_below(place, folder) else None
        if source is not None and came_with is not None and _is_in(source, came_with):
            raise SettingsError(
                f"{file}: {setting.name} is {place}, which lies in the run's own folder: a folder "
                "that was sent does not bring the code that is run",
                remedy=f"if it is your own, name it yourself: {setting.flag}; or keep it elsewhere",
            )
        if not is_below(place, folder):
            raise SettingsError(
                f"{file}: {setting.name} is {place}, which is outside of the working folder "
                f"{folder}: a file does not choose the code that is run",
                remedy=f"if it is your own: to resume, name it yourself with {setting.flag}; to "
                "submit it, copy it into the server's working folder",
            )


def check_places(settings: Settings, file: Path, *, folder: Path, given: Collection[str]) -> None:
    """Check that a run's file names no model to begin with elsewhere, nor a place to write to.

    Else whoever sends a folder would have a private model sent to their devices, or files written.
    Below the working folder, or in the run's folder, they may be; the user may name any. Nor does
    the folder bring certificates.

    Raises:
        SettingsError: it does.
    """
    shared = settings.standby.shared_state
    places = {
        "model.initial": settings.model.initial,
        "standby.shared_state": None if shared is None or _is_code(shared) else Path(shared),
    }
    for key, place in places.items():
        if place is None or key in given:
            continue
        if not any(_is_in(place, one) for one in (Path.cwd(), folder)):
            setting = all_settings()[key]
            raise SettingsError(
                f"{file}: {setting.name} is {place}, which is outside of the working folder and of "
                "the run's: a run's folder does not decide that",
                remedy=f"if it is your own, name it yourself: {setting.flag}",
            )
    for name, place in settings.tls:
        if isinstance(place, Path) and f"tls.{name}" not in given and _is_in(place, folder):
            setting = all_settings()[f"tls.{name}"]
            raise SettingsError(
                f"{file}: {setting.name} is {place}, which lies in the run's own folder: a folder "
                "that was sent does not say whom this server trusts",
                remedy=f"if it is your own, name it yourself: {setting.flag}; or keep it elsewhere",
            )


def _is_in(place: Path, folder: Path) -> bool:
    return place.resolve().is_relative_to(folder.resolve())


def check_protected(settings: Settings, file: Path, *, given: Collection[str]) -> None:
    """Check that a run's file does not say that anybody on the way may read; the user may.

    Raises:
        SettingsError: it does.
    """
    for key in UNPROTECTED:
        if getattr(settings, key) and key not in given:
            raise SettingsError(
                f"{file}: {key} switches protection off, and a run's folder does not decide that",
                remedy=f"if it is your own, say so yourself: --{key.replace('_', '-')}",
            )


def check_no_links(folder: Path) -> None:
    """Check that nothing in a run's folder, at any depth, is a link, or no file and no folder.

    The folder itself may be a link. A FIFO would be waited for.

    Raises:
        SettingsError: something is.
    """
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:  # it was a journal, and is gone since
                continue
            if stat.S_ISLNK(mode):
                raise SettingsError(
                    f"{path} is a link to {path.readlink()}: what a run writes would change files "
                    "outside of its folder",
                    remedy="put what it leads to in its place, or choose another --out",
                )
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise SettingsError(
                    f"{path} is no file and no folder", remedy="remove it, or choose another --out"
                )


def _is_code(place: str) -> bool:
    """Return whether a text may name code: shared state may be a plain folder."""
    file, name = split_place(place)
    return name is not None or Path(file).suffix == ".py"


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
