"""Reads the settings from a TOML file, from command-line overrides and from Flower's run_config.

Each problem becomes a ``SettingsError`` with the source, the setting's key and flag, the expected
and the found value, and a remedy.
"""

from __future__ import annotations

import itertools
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headwater.common.errors import SettingsError
from headwater.common.parsed_text import toml_of
from headwater.common.settings.conflicts import check_effective
from headwater.common.settings.introspection import all_settings, branches, keyword_of
from headwater.common.settings.schema import SETTINGS_FILE, Settings, flattened
from headwater.common.user_code.task_spec import name_of

COMMAND_LINE = "the command line"
PYTHON = "headwater."
"""Begins the name of a source that is a function of the Python API."""
KEYWORDS_OF_OBJECTS = {
    "task": "task",
    "optimizer.name": "optimizer",
    "algorithm.name": "client_algorithm",
    "feature.name": "feature",
    "track": "observer",
}
"""The keywords of the Python API that take an object, by the settings that name one."""
MAX_SHOWN = 10
# What `headwater-simulate` runs without --task.
DEFAULT_TASK = "headwater.examples.digits:Digits"

# Settings of earlier versions: the value without effect, and what to use instead.
REMOVED: dict[str, tuple[Any, str]] = {
    "client.upload_window": (None, "use client.active_hours (--active-hours), with the same text"),
    "client.working_hours": (None, "use client.active_hours (--active-hours): the other hours"),
    "client.working_share": (0.0, "use client.inactive_share together with client.active_hours"),
    "insecure": (
        False,
        "it was two decisions: plain_text (--plain-text) for a run without TLS and certificates, "
        "public_metrics (--public-metrics) for --metrics beyond loopback",
    ),
    "model.replace_batch_norm": (
        False,
        "use model.batch_norm: group (--batch-norm group) puts GroupNorm in place of BatchNorm, as "
        "before; frozen (--batch-norm frozen) keeps pretrained statistics",
    ),
    "plan.local_steps": (
        1,
        "use local.steps: --local-steps of headwater-server and headwater-simulate, which the "
        "devices follow",
    ),
    "plan.local_learning_rate": (
        0.1,
        "use local.learning_rate: --local-learning-rate of headwater-server and "
        "headwater-simulate, which the devices follow",
    ),
    "simulation.compile": (False, "leave it out: it seldom made a run faster"),
    "simulation.wire": (False, "use simulation.engine = grpc (--engine grpc), over the real wire"),
}


def load(
    config: Path | None,
    overrides: Mapping[str, Any],
    *,
    source: str = COMMAND_LINE,
    below: Path | None = None,
) -> Settings:
    """Read the settings file, if any, and lay the given dotted overrides over it.

    An override of ``None`` means that the flag was not given. ``source`` is where the overrides
    come from, for errors. ``below`` is a run's own settings file, over which all this is laid.

    Raises:
        SettingsError: a file is missing or not TOML; a setting is unknown or its value wrong.
    """
    tree = {} if below is None else read_tree(below)
    own = {} if config is None else read_tree(config)
    given = {key: value for key, value in overrides.items() if value is not None}
    layers = [(source, [*given]), (str(config), [key for key, _ in flattened(own)])]
    if below is not None:
        _forget_derived(tree, [key for _, keys in layers for key in keys])
    _lay_over(tree, own)
    for key, value in given.items():
        _put(tree, key, value)
    return _validated(tree, file=str(config if below is None else below), layers=layers)


def load_run(
    config: Path | None,
    overrides: Mapping[str, Any],
    *,
    resume: bool,
    source: str = COMMAND_LINE,
    is_own: bool = False,
) -> Settings:
    """Read the settings of a run; those of a resumed run are laid over its own settings file.

    What ``overrides`` say must change something (``check_effective``), as somebody typed it.

    ``is_own`` says that this server wrote that file, which may then say anything.

    Raises:
        SettingsError: as ``load``, or a resumed run without a folder, or with nothing in it and no
            task to begin with; or its file names code elsewhere (``check_code``), or places
            (``check_places``), or switches protection off; or a file in its folder is a link.
    """
    typed = {key for key, value in overrides.items() if value is not None}
    if not resume:
        return _typed(load(config, overrides, source=source), typed)
    own = {} if config is None else read_tree(config)
    out = overrides.get("out") or own.get("out")
    if out is None:
        raise SettingsError("--resume needs --out", remedy="name the folder of the run: --out DIR")
    left = Path(out) / SETTINGS_FILE
    if not left.exists() and not (overrides.get("task") or own.get("task")):
        raise SettingsError(
            f"there is no run to resume in {out}: it holds no {SETTINGS_FILE}",
            remedy="correct --out; or name the --task, and a run begins there",
        )
    from headwater.common.settings.changes import (
        check_code,
        check_no_links,
        check_places,
        check_protected,
    )

    check_no_links(Path(out))
    if not left.exists():
        return _typed(load(config, overrides, source=source), typed)

    settings = _typed(load(config, overrides, source=source, below=left), typed)
    given = typed | {key for key, _ in flattened(own)}
    check_code(settings, left, given=given, came_with=Path(out))
    if not is_own:
        check_places(settings, left, folder=Path(out), given=given)
        check_protected(settings, left, given=given)
    return settings


def _typed(settings: Settings, keys: set[str]) -> Settings:
    check_effective([settings], keys)
    return settings


def read_tree(file: Path) -> dict[str, Any]:
    """Return the tree of a settings file, not checked.

    Raises:
        SettingsError: the file is missing or not TOML.
    """
    try:
        return toml_of(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} is not a TOML file: {error}") from error


def _lay_over(tree: dict[str, Any], upper: Mapping[str, Any]) -> None:
    """Replace the values that the upper tree has; a table of arguments is one value."""
    for key, value in upper.items():
        below = tree.get(key)
        if key in branches() and isinstance(below, dict) and isinstance(value, dict):
            below |= value
        else:
            tree[key] = value


def _forget_derived(tree: dict[str, Any], given: Iterable[str]) -> None:
    """Forget a run's number of devices if the data or the fleet that it came from is given again.

    Otherwise a new number would seem to contradict a --clients that nobody gave.
    """
    simulation = tree.get("simulation")
    if isinstance(simulation, dict) and {"simulation.data", "simulation.fleet"} & set(given):
        simulation.pop("clients", None)


def with_default_task(settings: Settings) -> Settings:
    """Return a simulation's settings, with the bundled example as the task if none is set.

    Raises:
        SettingsError: the devices have data of their own, which the example would not open.
    """
    if settings.task is not None:
        return settings
    if settings.simulation.data is not None:
        raise SettingsError(
            "--data is set and no task, which would open it",
            remedy="name the task with --task FILE.py:Class",
        )
    return settings.model_copy(update={"task": DEFAULT_TASK})


def default_out(settings: Settings) -> Path:
    """Return ``runs/TASK-TIME``, a new folder for a run without --out.

    A number follows if another run has begun in the same second.
    """
    task = "run" if settings.task is None else name_of(settings.task).lower()
    folder = Path("runs") / f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(one for one in numbered(folder) if not one.exists())


def numbered(folder: Path) -> Iterator[Path]:
    """Yield a folder's path, and then with 2, 3 and so on behind its name."""
    yield folder
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}-{number}")


def from_run_config(flat: Mapping[str, Any]) -> Settings:
    """Rebuild the tree from Flower's flat run_config; the inverse of ``to_run_config``.

    A string that is empty means "not set", as Flower's pyproject needs every key to exist.
    """
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if value != "":
            _put(tree, key, value)
    return _validated(_with_lists(tree), file="run_config")


def replacement_of(flag: str) -> str:
    """Return what replaces the flag of a removed setting, for an error message; "" if nothing."""
    removed = {f"--{key.rpartition('.')[2].replace('_', '-')}": key for key in REMOVED}
    return f" It was removed: {REMOVED[removed[flag]][1]}." if flag in removed else ""


def _validated(
    tree: dict[str, Any],
    *,
    file: str,
    layers: Iterable[tuple[str, Iterable[str]]] = (),
) -> Settings:
    """Check a tree; ``layers`` are the sources above the file and their keys, the highest first."""
    for key, (inert, _) in REMOVED.items():
        section, _, leaf = key.rpartition(".")
        values = tree.get(section) if section else tree
        if isinstance(values, dict) and leaf in values and values[leaf] == inert:
            del values[leaf]  # as a run of an earlier version left it
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        problems: dict[str, tuple[str, str]] = {}
        for details in error.errors():
            key = _key_of(details)
            sources = (
                source
                for source, keys in layers
                if any(_is_within(key, other) or _is_within(other, key) for other in keys)
            )
            # A union has an error for each of its types: the first says what is expected.
            problems.setdefault(key, _problem(key, details, next(sources, file)))
        raise _settings_error([*problems.values()]) from None  # pydantic's text says the same


def _is_within(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.")


def _key_of(details: ErrorDetails) -> str:
    """Return the dotted key of an error, without the types of a union that pydantic adds."""
    steps = [str(step) for step in details["loc"]]
    for length in range(1, len(steps)):
        setting = all_settings().get(".".join(steps[:length]))
        if setting is not None:
            return ".".join(steps[: length + (setting.value.types == [dict])])
    return ".".join(steps)


def _problem(key: str, details: ErrorDetails, source: str) -> tuple[str, str]:
    """Return what is wrong with a setting, and the remedy."""
    if key in REMOVED:
        return f"{source}: {key} was removed", REMOVED[key][1]
    if details["type"] == "extra_forbidden":
        if source.startswith(PYTHON) and key in ("observer", *KEYWORDS_OF_OBJECTS.values()):
            return f"{source}: {key} is a keyword, not a setting", f"pass it as {key}=..."
        nearest = _nearest(key)
        question = f"; did you mean {nearest}?" if nearest else ""
        return (
            f"{source}: {key} is not a setting{question}",
            "correct the name or remove the setting; docs/settings.md lists all settings",
        )
    setting = all_settings().get(key) or all_settings().get(key.rpartition(".")[0])
    expected = "a table of settings" if setting is None else setting.value.expected
    wrong = f"expected {expected}"
    if details["type"] == "value_error":
        wrong = details["msg"].removeprefix("Value error, ")
    name = key if setting is None or setting.key != key else setting.name
    return (
        f"{source}: {name}: {wrong}, found {details['input']!r:.200}",
        _how_to_give(key, details["input"], source),
    )


def _how_to_give(key: str, value: object, source: str) -> str:
    """Return where a value goes; some keywords of the Python API take objects, a setting none."""
    if source == COMMAND_LINE:
        return "give it such a value: see --help-all"
    is_call = source.startswith(PYTHON)
    keyword = KEYWORDS_OF_OBJECTS.get(key)
    if is_call and keyword is not None and not isinstance(value, str | int | float):
        return f"an object is passed by the keyword {keyword}=..., not in settings={{...}}"
    setting = all_settings().get(key)
    if is_call and setting is not None and setting.flag is not None:
        return f"give it such a value: {keyword_of(setting.flag)}=... in {source}"
    return f"give it such a value: in {source}; see docs/settings.md"


def _nearest(key: str) -> str | None:
    """Return the setting or branch whose name is nearest to a key that is none."""
    keys = [*all_settings(), *(each for each in branches() if not _is_within(key, each))]
    leaf = key.rpartition(".")[2]
    same_leaf = [other for other in keys if other.rpartition(".")[2] == leaf]
    return next(iter(same_leaf or get_close_matches(key, keys, n=1)), None)


def _settings_error(problems: list[tuple[str, str]]) -> SettingsError:
    first, remedy = problems[0]
    if len(problems) == 1:
        return SettingsError(first, remedy=remedy)
    lines = "".join(f"\n  {message}" for message, _ in problems[:MAX_SHOWN])
    remedies = dict.fromkeys(remedy for _, remedy in problems[:MAX_SHOWN])
    return SettingsError(f"{len(problems)} settings are wrong:{lines}", remedy="; ".join(remedies))


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, leaf = dotted.split(".")
    for section in sections:
        child = tree.setdefault(section, {})
        if not isinstance(child, dict):
            raise SettingsError(
                f"{section}: expected a table, as {dotted} is set in it, found {child!r}"
            )
        tree = child
    tree[leaf] = value


def _with_lists(tree: dict[str, Any]) -> dict[str, Any]:
    """Turn the keys 0, 1, ... that a list was flattened to back into the list."""
    rebuilt: dict[str, Any] = {}
    for key, value in tree.items():
        rebuilt[key] = value
        if isinstance(value, dict):
            is_list = bool(value) and value.keys() == {str(at) for at in range(len(value))}
            rebuilt[key] = (
                [value[str(at)] for at in range(len(value))] if is_list else _with_lists(value)
            )
    return rebuilt
