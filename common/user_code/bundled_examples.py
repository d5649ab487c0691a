"""Finds files by the paths that users name: of the bundled examples, and below a home folder."""

from __future__ import annotations

from pathlib import Path

from headwater.common.errors import SettingsError

EXAMPLES = "examples"
# The checkout, a Flower bundle, or the installed package: each has a folder of this name.
HOME = Path(__file__).resolve().parents[2]


def existing_or_bundled(path: Path) -> Path:
    """Return the path; in place of ``examples/...`` that does not exist, the bundled example."""
    if path.is_absolute() or path.exists() or path.parts[:1] != (EXAMPLES,):
        return path
    bundled = HOME / path
    return bundled if bundled.exists() else path


def is_bundled(path: Path) -> bool:
    """Whether a file belongs to the bundled examples."""
    return path.resolve().is_relative_to(HOME / EXAMPLES)


def expanded(path: str | Path) -> Path:
    """Return a path with ``~`` replaced by the home folder.

    Raises:
        SettingsError: there is no home folder: no HOME, and the user id has no entry in passwd.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SettingsError(
            f"{path} is in a home folder, and there is none: HOME is not set, or the user unknown",
            remedy="set HOME, or name a path without ~; a device's state goes where --state says",
        ) from error
