"""The store of a run's shared state, as the servers see it: a few operations on named files.

A folder that both servers reach is one (``shared_folder``); a class of the user's own, as over an
object store, is another. All that fencing needs of it is ``write_if_unchanged``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol, runtime_checkable

from headwater.common.errors import SettingsError
from headwater.common.user_code.named_objects import constructed
from headwater.server.standby.shared_folder import SharedFolder

# FILE.py:Name or package.module:Name; a folder's name has no such ending.
OWN_CLASS = re.compile(r".+:[A-Za-z_]\w*")


@runtime_checkable
class StateStore(Protocol):
    """Named files that several machines share. Any method may raise an OSError and is tried again.

    What a method has written, every later read on any machine returns. Names are of letters,
    digits, dots, dashes and underscores.
    """

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return a small file's content and its version; None if there is none."""
        ...

    def write_if_unchanged(self, name: str, content: bytes, version: str | None) -> str | None:
        """Replace a small file if it still has this version, and return the new version.

        ``version`` None: only if there is no such file. Returns None, and changes nothing, if the
        file has another version. No version ever comes back.
        """
        ...

    def upload(self, name: str, file: Path) -> None:
        """Store a file of any size under a name that was never used; it is never changed."""
        ...

    def download(self, name: str, file: Path) -> None:
        """Write a stored file's content to a path; FileNotFoundError if there is none."""
        ...

    def stored(self) -> list[str]:
        """Return the names of the files that ``upload`` has stored."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file that ``upload`` has stored; nothing if there is none."""
        ...


def open_store(spec: str) -> StateStore:
    """Return the store that ``--shared-state`` names.

    Raises:
        SettingsError: the class cannot be constructed, or lacks a method of ``StateStore``.
    """
    if not OWN_CLASS.fullmatch(spec):
        return SharedFolder(Path(spec))
    store = constructed(spec, {}, what="store of the shared state")
    if not isinstance(store, StateStore):
        missing = [name for name in dir(StateStore) if name[0] != "_" and not hasattr(store, name)]
        raise SettingsError(
            f"the store of the shared state {spec} has no {', '.join(missing)}",
            remedy="write the methods of headwater.server.standby.state_store.StateStore",
        )
    return store
