"""Which files of the user's code a queued run was submitted with, and whether they are the same.

A run may wait in its queue for days, and its files may change meanwhile: by a later edit, by
another user of the folder, by a link that is set anew. So ``submit`` notes the SHA-256 of each file
that it has loaded, as sha256sum prints it, and the server compares them before it runs any of their
code. Not seen: a file that is imported later than at the start, or that is new beside these.
"""

from __future__ import annotations

import hashlib
import importlib.util
import stat
from contextlib import suppress
from pathlib import Path

from headwater.common.errors import CodeChanged
from headwater.common.settings.changes import named_code
from headwater.common.settings.schema import Settings
from headwater.common.user_code.run_scope import forget_changed_modules, loaded_files
from headwater.common.user_code.task_spec import source_file
from headwater.common.wording import bytes_text

MAX_BYTES = 1 << 26  # of a file of code


def noted_code(settings: Settings) -> str:
    """Return the digests and files of a run's code, which this process has loaded."""
    named = [source_file(place) for _, place in named_code(settings)]
    files = {*loaded_files(), *(file.absolute() for file in named if file is not None)}
    return "\n".join(f"{_digest(file)}  {file}" for file in sorted(files))


def check_submitted(settings: Settings, *, remedy: str) -> None:
    """Check that the code of a run that was submitted is what it was; other runs pass.

    After this the files are read anew, and not from what was compiled or loaded before.

    Raises:
        CodeChanged: a file is gone, or is another.
    """
    if settings.submitted_code is None:
        return
    for line in settings.submitted_code.split("\n"):
        before, _, name = line.partition("  ")
        if (now := _digest(Path(name))) != before:
            raise CodeChanged(
                f"{name} has changed since the run was submitted: its SHA-256 was {before}, and is "
                f"{now}",
                remedy=remedy,
            )
        with suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(name)).unlink()
    forget_changed_modules()


def _digest(file: Path) -> str:
    try:
        found = file.stat()  # a device has no end, and a pipe waits for somebody who writes
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
            return f"not known (no file of up to {bytes_text(MAX_BYTES)})"
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        return f"not known ({error.strerror})"
