"""Which files of a run's folder are its state, and how they come into the store and out of it.

All are, but for what a server makes for its own operator. A file is stored again when it was
replaced; the log of rounds, which only grows, in pieces.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from headwater.common.errors import CheckpointCorrupt, SettingsError
from headwater.common.system.atomic_file import OWNER_ONLY, make_private_folder
from headwater.server.operations import orders, run_history, run_lock
from headwater.server.operations.round_log import CURVES, EVENTS, REPORT, ROUNDS
from headwater.server.operations.run_lock import RunLock
from headwater.server.privacy.banded_noise import NOISE_FOLDER
from headwater.server.standby.shared_status import OWNER
from headwater.server.standby.state_store import StateStore
from headwater.server.standby.term_record import STORED, TermRecord, is_code

# What belongs to one server: its lock, its operator's order, its history, and drawings that can be
# made again. Some names go on, as in history.sqlite-wal of an earlier version.
"""The file that names the shared state of which a folder is a copy."""
OWN = (
    *(run_lock.FILE, orders.FILE, EVENTS, CURVES, REPORT, ROUNDS, OWNER),
    *(run_history.STATE, run_history.DEVICES, run_history.EVENTS, run_history.SQLITE),
)
PART = ".part"
MAX_PIECES = 64

_Stamp = tuple[int, int, int]


def claim(folder: Path, spec: str, *, is_new: bool) -> None:
    """Note in a server's folder which shared state it is a copy of.

    ``download`` removes every file there that is not the run's. So unless ``is_new``, the folder
    must be empty, or noted earlier. ``spec`` is the server's --shared-state.

    Raises:
        SettingsError: the folder has other files.
        OSError: it cannot be read or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / OWNER
    is_copy = note.exists() and note.read_text(encoding="utf-8") == spec
    others = sorted(path.name for path in folder.iterdir())
    if others and not (is_new or is_copy):
        raise SettingsError(
            f"{folder} would be replaced by the run in {spec}, and it holds {others[0]}",
            remedy="choose a new or empty folder as this server's --out",
        )
    note.write_text(spec, encoding="utf-8")


class SharedFiles:
    """The files of one server's folder, and which of them the store has."""

    def __init__(self, store: StateStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        # By name in the store: a file may be stored, and its record not be committed.
        self._stamps: dict[str, _Stamp] = {}
        self._log_ends: dict[str, tuple[int, int]] = {}  # inode, and bytes up to the piece's end
        self._num_stored = 0

    def upload(self, record: TermRecord) -> TermRecord:
        """Store what has changed in the folder; return the record that names it.

        Raises:
            OSError: the folder or the store cannot be read or written.
        """
        files = {}
        for path in self._paths():
            name, stamp = path.relative_to(self._folder).as_posix(), _stamp(path)
            stored = record.files.get(name, "")
            if self._stamps.get(stored) != stamp:
                stored = self._store_as(record.term, name, path)
                self._stamps[stored] = stamp
            files[name] = stored
        kept = {*files.values(), *record.files.values()}  # this record may not be committed
        self._stamps = {name: stamp for name, stamp in self._stamps.items() if name in kept}
        return self._upload_log(replace(record, files=files))

    def download(self, record: TermRecord) -> None:
        """Make the folder's state that of the record.

        Raises:
            SettingsError: another process runs in the folder.
            OSError: a file cannot be read or written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self._folder)
        try:
            self._download(record)
        finally:
            lock.release()

    def _download(self, record: TermRecord) -> None:
        for path in self._paths():
            if path.relative_to(self._folder).as_posix() not in record.files:
                path.unlink()
        for name, stored in record.files.items():
            path = self._folder / name
            if not self._is_shared(path):
                raise CheckpointCorrupt(f"the shared run names {name}, which is a server's own")
            if path.parent != self._folder:
                self._check_within(path.parent)
                make_private_folder(path.parent)
            self._take(stored, path)
            self._stamps[stored] = _stamp(path)
        if record.log_pieces:
            whole, piece = self._part(ROUNDS), self._part("piece")
            with whole.open("wb") as file:
                for stored in record.log_pieces:
                    self._store.download(stored, piece)
                    with piece.open("rb") as source:
                        shutil.copyfileobj(source, file)
            piece.unlink()
            whole.replace(self._folder / ROUNDS)

    def _check_within(self, folder: Path) -> None:
        """Check that no folder on the way from the run's own to this one is a link.

        Raises:
            CheckpointCorrupt: one is.
        """
        for one in (folder, *folder.parents):
            if one == self._folder:
                return
            if one.is_symlink():
                raise CheckpointCorrupt(f"{one} is a link, and the shared run writes into it")

    def forget(self, before: TermRecord, after: TermRecord) -> None:
        """Remove from the store what the record names no longer.

        Raises:
            OSError: the store cannot be reached.
        """
        kept = {*after.files.values(), *after.log_pieces}
        for stored in {*before.files.values(), *before.log_pieces} - kept:
            self._store.remove(stored)

    def forget_strangers(self, record: TermRecord) -> None:
        """Remove what servers of earlier terms have stored and never committed.

        Raises:
            OSError: the store cannot be reached.
        """
        kept = {*record.files.values(), *record.log_pieces}
        for stored in self._store.stored():
            is_ours = STORED.fullmatch(stored) is not None
            if is_ours and stored not in kept and int(stored.partition("-")[0]) < record.term:
                self._store.remove(stored)

    def _paths(self) -> list[Path]:
        return sorted(
            path for path in self._folder.rglob("*") if path.is_file() and self._is_shared(path)
        )

    def _is_shared(self, path: Path) -> bool:
        """Return whether a file of the folder is the run's, and not one server's own."""
        parts = path.relative_to(self._folder).parts
        return not (
            parts[0].startswith(OWN) or path.name.endswith(PART) or any(map(is_code, parts))
        )

    def _take(self, stored: str, path: Path) -> None:
        """Download a file; it has its name when it is whole."""
        part = self._part(path.name)
        part.unlink(missing_ok=True)
        self._store.download(stored, part)
        if path.parent.name == NOISE_FOLDER:
            part.chmod(OWNER_ONLY)
        part.replace(path)

    def _part(self, name: str) -> Path:
        return self._folder / f"{name}.shared{PART}"

    def _upload_log(self, record: TermRecord) -> TermRecord:
        """Store what was appended to the log, or all of it if it is another file than before."""
        path = self._folder / ROUNDS
        if not path.exists():
            return replace(record, log_pieces=())
        found, pieces = path.stat(), record.log_pieces
        inode, begin = self._log_ends.get(pieces[-1], (0, 0)) if pieces else (0, 0)
        if inode != found.st_ino or found.st_size < begin or len(pieces) >= MAX_PIECES:
            begin, pieces = 0, ()
        if begin < found.st_size:
            piece = self._part("piece")
            with path.open("rb") as file:
                file.seek(begin)
                piece.write_bytes(file.read(found.st_size - begin))
            stored = self._store_as(record.term, ROUNDS, piece)
            piece.unlink()
            pieces = (*pieces, stored)
            ends = {**self._log_ends, stored: (found.st_ino, found.st_size)}
            kept = {*pieces, *record.log_pieces}  # this record may not be committed
            self._log_ends = {name: end for name, end in ends.items() if name in kept}
        return replace(record, log_pieces=pieces)

    def _store_as(self, term: int, name: str, path: Path) -> str:
        """Store a file under a name that was never used, and return it."""
        self._num_stored += 1
        stored = f"{term}-{self._num_stored}-{name.replace('/', '-')}"
        self._store.upload(stored, path)
        return stored


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
