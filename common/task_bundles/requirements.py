"""Which packages that a bundle needs are not installed here; none is ever installed."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable

from packaging.requirements import Requirement

from headwater.common.errors import TaskBundleRefused


def check_requirements(requires: Iterable[str], *, title: str) -> None:
    """Check that all packages are installed, in the versions that the task needs.

    Raises:
        TaskBundleRefused: some are not; names them, and the command that installs them.
    """
    missing = [one for one in requires if not _is_there(Requirement(one))]
    if missing:
        named = " ".join(f"'{one}'" for one in missing)
        raise TaskBundleRefused(
            f"the task {title} needs packages that are not here: {', '.join(missing)}",
            remedy=f"install them: {sys.executable} -m pip install {named}",
        )


def _is_there(needed: Requirement) -> bool:
    if needed.marker is not None and not needed.marker.evaluate():
        return True
    try:
        found = importlib.metadata.version(needed.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return needed.specifier.contains(found, prereleases=True)
