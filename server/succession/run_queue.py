"""The queue of runs that follow one another on one server, as files in the run's folder.

``headwater-server submit`` writes a run's settings to ``queue/N.toml``. When the current run ends,
its server takes the first of them: it writes ``successor.json``, which names the new run's folder,
and moves the rest of the queue there. That file is the moment of the change: a server that is
killed before it still has the whole queue; one that is killed later goes on with the new run. A run
that has a successor is closed: no later start trains it. The new folder names the one before it as
well: a folder that somebody sent leads to no run that did not follow it here.

No port is needed: every user who may write to the run's folder may submit.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.common.errors import SettingsError, StateError
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import make_private_folder, write_atomically
from headwater.common.wording import counted, in_shell
from headwater.server.features import POINTER, QUEUE

if TYPE_CHECKING:
    from headwater.common.settings.schema import Settings

SETTINGS = "settings.toml"
"""As in ``server.rounds`` and ``common.settings``, which take long to import: for ``status``."""
BEFORE = "predecessor.json"
NAME = re.compile(r"(\d{6})(-next)?\.toml")
MAX_QUEUED = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedRun:
    """A run that waits for its turn."""

    file: Path
    is_next: bool
    """Whether it begins after the current round, and not after the last one."""
    settings: Settings


def queued_runs(folder: Path) -> list[QueuedRun]:
    """Return the runs that wait in a run's folder, the first one first.

    Raises:
        StateError: one of them cannot be read.
    """
    from headwater.common.settings.sources import load

    found = []
    for file in _files(folder):
        try:
            settings = load(file, {})
        except SettingsError as error:
            raise StateError(
                f"the queued run {file} cannot be read: {error}", remedy="correct or delete it"
            ) from error
        found.append(QueuedRun(file=file, is_next=_is_next(file), settings=settings))
    return found


def is_next_due(folder: Path) -> bool:
    """Return whether the first run of the queue is to begin after the current round."""
    return any(map(_is_next, _files(folder)[:1]))


def has_queue(folder: Path) -> bool:
    """Return whether a run waits."""
    return bool(_files(folder))


def refuse_queue(folder: Path) -> None:
    """Refuse to serve a run in whose queue others wait, for a server that would not take them.

    Raises:
        SettingsError: runs wait.
    """
    if waiting := _files(folder):
        raise SettingsError(
            f"{counted(len(waiting), 'run')} in {folder / QUEUE}, which this server would not "
            "take: a run with a standby, of the Python API or of the simulator has no queue",
            remedy="delete what waits there, or start headwater-server --resume --out "
            + in_shell(folder),
        )


def submit(folder: Path, settings: Settings, *, is_next: bool) -> Path:
    """Append a run to the queue of a run, or of the last one that has followed it.

    With ``is_next`` it is put before all others. Returns the folder of the run that it follows.

    Raises:
        SettingsError: the queue is full.
        StateError: the folder cannot be written.
    """
    folder = last_run(folder)
    numbers = [int(file.name[:6]) for file in _files(folder)]
    if len(numbers) >= MAX_QUEUED:
        raise SettingsError(
            f"{len(numbers)} runs wait in {folder / QUEUE}", remedy="delete files there first"
        )
    number = min(numbers, default=500_000) - 1 if is_next else max(numbers, default=499_999) + 1
    file = folder / QUEUE / f"{number:06}{'-next' if is_next else ''}.toml"
    try:
        make_private_folder(file.parent)
        write_atomically(file, settings.to_toml().encode())
        if (later := last_run(folder)) != folder:  # the server has taken one meanwhile
            _move_queue(folder, later)
    except OSError as error:
        raise _not_written(folder, error) from error
    return later


def take_next(folder: Path, *, default_out: Path) -> Path | None:
    """Take the first run of the queue, and close the run in ``folder``; None if none waits.

    Returns the new run's folder, which has its settings: the one that they name, or
    ``default_out``. If that holds another run, a number is added to its name.

    Raises:
        StateError: the queue cannot be read or written.
        CodeChanged: a file of its code is not the one that it was submitted with; it waits on.
    """
    from headwater.server.succession.submitted_code import check_submitted  # not for ``status``

    waiting = queued_runs(folder)
    if not waiting:
        return None
    first = waiting[0]
    check_submitted(
        first.settings,
        remedy=f"put the file back; or delete {first.file} and submit the run again. Then go on "
        f"with: headwater-server --resume --out {in_shell(folder)}",
    )
    out = _free_folder((first.settings.out or default_out).absolute(), other_than=folder)
    settings = first.settings.model_copy(update={"out": out})
    pointer = {"out": str(out), "file": first.file.name}
    before = {"folder": str(folder.absolute())}
    try:
        make_private_folder(out)
        write_atomically(out / SETTINGS, settings.to_toml().encode())
        write_atomically(out / BEFORE, json.dumps(before).encode())
        write_atomically(folder / POINTER, json.dumps(pointer).encode())
    except OSError as error:
        raise _not_written(folder, error) from error
    return successor(folder)


def successor(folder: Path) -> Path | None:
    """Return the folder of the run that has followed the one in ``folder``; None if none has.

    It gets what is left of the queue: the server may have been killed before that.

    Raises:
        StateError: the pointer cannot be read, or the queue cannot be moved.
    """
    pointer = _pointer(folder)
    if pointer is None:
        return None
    out, taken = pointer
    try:
        (folder / QUEUE / taken).unlink(missing_ok=True)
        _move_queue(folder, out)
    except OSError as error:
        raise _not_written(folder, error) from error
    return out


def last_run(folder: Path) -> Path:
    """Return the folder of the last run that has followed the one in ``folder``.

    Raises:
        StateError: a pointer cannot be read.
    """
    seen = {folder.absolute()}
    while (pointer := _pointer(folder)) is not None:
        folder = pointer[0]
        if folder in seen:
            raise StateError(
                f"{folder / POINTER} leads back to a run before it", remedy="delete it"
            )
        seen.add(folder)
    return folder


def _pointer(folder: Path) -> tuple[Path, str] | None:
    """Return the next run's folder, and the file of the queue that it was taken from."""
    path = folder / POINTER
    try:
        pointer = json_of(path.read_text(encoding="utf-8"))
        out, taken = Path(pointer["out"]), str(pointer["file"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path} does not name the run that follows: {error}",
            remedy="delete it, and the server goes on with this run",
        ) from error
    if not NAME.fullmatch(taken):
        raise StateError(f"{path} names no file of the queue: {taken!r:.100}", remedy="delete it")
    if _before(out) != folder.absolute():
        raise StateError(
            f"{path} leads to {out}, and no run there followed the one in {folder}",
            remedy="delete it; or, if that run is yours, go on with --resume --out "
            + in_shell(out),
        )
    return out, taken


def _before(folder: Path) -> Path | None:
    """Return the folder of the run that the one in ``folder`` followed; None: it followed none."""
    try:
        return Path(json_of((folder / BEFORE).read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _files(folder: Path) -> list[Path]:
    """Return the files of the queue, in order; other files there are left alone."""
    below = folder / QUEUE
    found = (
        [path for path in below.iterdir() if NAME.fullmatch(path.name)] if below.is_dir() else []
    )
    return sorted(found, key=lambda path: path.name)


def _is_next(file: Path) -> bool:
    return file.stem.endswith("-next")


def _move_queue(folder: Path, later: Path) -> None:
    """Move what waits to the queue of a later run; a number that is taken there is raised."""
    for file in _files(folder):
        make_private_folder(later / QUEUE)
        taken = {int(path.name[:6]) for path in _files(later)}
        number = int(file.name[:6])
        while number in taken:
            number += 1
        file.replace(later / QUEUE / f"{number:06}{file.name[6:]}")


def _free_folder(out: Path, *, other_than: Path) -> Path:
    """Return a new or empty folder: ``out``, or with a number behind its name.

    The run in ``other_than`` may have no checkpoint yet.
    """
    from headwater.common.settings.sources import numbered

    return next(
        path
        for path in numbered(out)
        if path != other_than.absolute() and not (path.exists() and any(path.iterdir()))
    )


def _not_written(folder: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot write the queue of {folder}: {error.strerror}",
        remedy="run the command as the user that the server runs as",
    )
