"""A run that two servers share: one serves, the other follows and takes over.

``open_run`` returns when this server may serve: at once, or on a standby when the other one
has ended or has not renewed its term. By then the run's folder has what was committed last.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from headwater.common.errors import CheckpointCorrupt, HeadwaterError, SettingsError, StateError
from headwater.common.settings.changes import TRUSTED, changes, changes_text, values_of
from headwater.common.settings.schema import Settings
from headwater.common.system.command_line import check_addresses
from headwater.common.system.console import print_text
from headwater.common.system.printable import printable
from headwater.common.task import load_task
from headwater.common.transport.trusted_file import UntrustedFile, check_folder
from headwater.common.wording import counted
from headwater.server.rounds import checkpoint
from headwater.server.standby.lease import Lease
from headwater.server.standby.shared_files import SharedFiles, claim
from headwater.server.standby.state_store import OWN_CLASS, StateStore, open_store
from headwater.server.standby.term_record import NAME, Stands, TermRecord, may_take_over

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25

Look = tuple[TermRecord, str | None]


class ReadSettings(Protocol):
    """Reads a command's settings, with ``resume`` over those of the run in --out."""

    def __call__(self, *, resume: bool) -> Settings: ...


class SharedRun:
    """A run whose current term is this server's."""

    def __init__(self, lease: Lease, store: StateStore, folder: Path) -> None:
        self._lease = lease
        self._folder = folder
        self._files = SharedFiles(store, folder)
        self.holds_run = lease.record.holds_run
        """Whether there was a run, which this server continues."""
        self.is_drained = False
        """Set by the server if its operator ended it before the last round."""

    @property
    def term(self) -> int:
        """The term of this server; the first one is 1."""
        return self._lease.record.term

    def begin(self) -> None:
        """Renew the term from now on, and make the folder's state that of the run.

        Raises:
            TermEnded: another server has taken over meanwhile.
            StateError: the state cannot be read.
        """
        self._lease.start()
        try:
            if self.holds_run:
                self._files.download(self._lease.record)
            self._files.forget_strangers(self._lease.record)
        except OSError as error:
            raise _unreachable(error) from error
        self._lease.check()

    def check(self) -> None:
        """Raise TermEnded if this server may no longer serve, as far as it knows."""
        self._lease.check()

    def publish(self) -> None:
        """Commit what the folder holds; from then on it is the run's state, for every server.

        While the store cannot be reached it tries again, for twice ``term_seconds`` at most.

        Raises:
            TermEnded: another server has a later term, or may have one by now; the run's state is
                unchanged.
            StateError: the store does not take the files, though the term is renewed.
        """
        begun = time.monotonic()
        while True:
            self._lease.check()
            try:
                self._publish()
                return
            except OSError as error:
                if time.monotonic() - begun > 2 * self._lease.record.term_seconds:
                    self._lease.check()
                    raise _unreachable(error) from error
                time.sleep(POLL_SECONDS)

    def _publish(self) -> None:
        before = self._lease.record
        stored = self._files.upload(before)
        done = checkpoint.saved_round(self._folder) or 0
        self._lease.commit(
            lambda record: replace(
                record,
                files=stored.files,
                log_pieces=stored.log_pieces,
                round=done,
            )
        )
        try:
            self._files.forget(before, stored)
        except OSError as error:  # the next term removes them
            log.warning("old files stay in the shared state: %s", error)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Release the term in the end, and record whether another server should continue.

        | the run ends by | another server |
        | --- | --- |
        | its last round | has nothing left to do |
        | an order to drain | waits: the operator will resume it |
        | an error that would meet it as well, such as a diverged model | waits |
        | a stop signal, or an error of this machine (settings, disk) or of our code | continues |
        """
        stands: Stands = "free"
        reason = ""
        try:
            yield
            stands = "drained" if self.is_drained else "finished"
        except HeadwaterError as error:
            if not isinstance(error, SettingsError | StateError):
                stands, reason = "failed", printable(f"{error.code}: {error}", max_characters=1000)
            raise
        finally:
            self._lease.release(lambda record: replace(record, stands=stands, reason=reason))


def open_run(
    settings: Settings, read_settings: ReadSettings, *, is_standby: bool, resume: bool
) -> SharedRun | None:
    """Return the run when this server may serve it; None if a standby has nothing left to do.

    ``read_settings`` reads this server's settings again, over those that the run has left in --out.
    A standby tries them once it has the run's files, so that what would keep it from taking over is
    an error before it has to. When it takes over, masks, noise and trust are still those.

    Raises:
        SettingsError: --shared-state or --out is missing; --out has files that are not this run's;
            another server serves the run and this one is no standby; the shared state holds a run
            that should not be continued; or its masks, noise or trust have changed.
        CheckpointCorrupt: the shared state's record cannot be read.
        StateError: the shared state cannot be reached.
    """
    spec, folder = settings.standby.shared_state, settings.out
    if spec is None or folder is None:
        missing = "--shared-state" if spec is None else "an --out of this server's own"
        raise SettingsError(
            f"a run with a standby needs {missing}",
            remedy="give both servers the same --shared-state, and each its own --out",
        )
    _check_apart(spec, folder)
    _warn_of_writers(spec)
    store = open_store(spec)

    tried: list[Settings] = []

    def try_out() -> None:
        chosen = read_settings(resume=True)
        tried.append(chosen)
        check_addresses(chosen, chosen.server.listen, metrics=chosen.server.metrics)
        if chosen.task is not None:
            load_task(chosen.task)

    try:
        if is_standby:
            shared = _await_turn(settings, store, folder, try_out)
        else:
            shared = _begin(settings, store, folder, resume=resume)
    except OSError as error:
        raise _unreachable(error) from error
    if shared is not None:
        shared.begin()
        for before in tried:
            _check_protection(before, read_settings(resume=True), shared)
    return shared


def _check_protection(before: Settings, now: Settings, shared: SharedRun) -> None:
    """Check that masks, noise and trust are those of a standby's first look; else end its term.

    Raises:
        SettingsError: they are not.
    """
    found = changes(values_of(before), values_of(now))
    changed = {
        key: values
        for key, values in found.items()
        if key.startswith(("secure.", "privacy.")) or key in TRUSTED
    }
    if not changed:
        return
    with shared.serving():
        raise SettingsError(
            "what protects the shared run has changed since this standby began to follow it: "
            + changes_text(changed),
            remedy="if its operator changed them, start this server again with --standby; if not, "
            "somebody else writes in the shared folder",
        )


def _begin(settings: Settings, store: StateStore, folder: Path, *, resume: bool) -> SharedRun:
    """Take the term of a run that nobody serves; wait until that is certain."""
    record, version = _read(store)
    if record.holds_run and not resume:
        raise SettingsError(
            f"{settings.standby.shared_state} already holds a run of "
            f"{counted(record.round, 'round')}",
            remedy="continue it with --resume, follow it with --standby, or choose another "
            "--shared-state",
        )
    claim(folder, str(settings.standby.shared_state), is_new=not record.holds_run)
    if record.stands == "serving":
        log.warning(
            "%s served the run last and did not end it: waiting %g s to see whether it does",
            record.holder,
            record.term_seconds,
        )
        end = time.monotonic() + record.term_seconds
        while time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            if _read(store)[1] != version:
                raise SettingsError(
                    f"{record.holder} serves the run in {settings.standby.shared_state}",
                    remedy="follow it with --standby, or end that server first",
                )
    lease = Lease.take(store, record, version, term_seconds=settings.standby.term_seconds)
    if lease is None:
        raise SettingsError(
            f"another server has begun to serve the run in {settings.standby.shared_state}",
            remedy="follow it with --standby",
        )
    return SharedRun(lease, store, folder)


def _await_turn(
    settings: Settings, store: StateStore, folder: Path, try_out: Callable[[], None]
) -> SharedRun | None:
    """Follow the record until its holder has ended, or has let its term lapse."""
    claim(folder, str(settings.standby.shared_state), is_new=False)
    seen: Look | None = None
    last = TermRecord()
    since, is_tried, said = time.monotonic(), False, ""
    while True:
        looked, now = _look(store, has_failed=seen is None), time.monotonic()
        if looked != seen:
            since = now
        if looked is not None:
            last = _later(looked[0], last)
        seen = looked
        if seen is None:  # how the record stands is not known, so nothing follows from it
            time.sleep(POLL_SECONDS)
            continue
        record, version = seen
        if (text := _described(record)) != said:
            print_text(f"standby of {settings.standby.shared_state}: {text}")
            said = text
        if record.stands == "finished":
            SharedFiles(store, folder).download(record)
            return None
        if record.holds_run and not is_tried:
            is_tried = _follow(store, folder, record, try_out)
        if record.holds_run and may_take_over(record, unchanged_seconds=now - since):
            lease, term_seconds = None, settings.standby.term_seconds
            with contextlib.suppress(OSError):
                lease = Lease.take(store, record, version, term_seconds=term_seconds)
            if lease is not None:
                why = (
                    "it has ended" if record.stands == "free" else f"silent for {now - since:.0f} s"
                )
                print_text(
                    f"takes over from {record.holder} ({why}) with term {lease.record.term}, "
                    f"after round {record.round}"
                )
                return SharedRun(lease, store, folder)
        time.sleep(POLL_SECONDS)


def _follow(
    store: StateStore, folder: Path, record: TermRecord, try_out: Callable[[], None]
) -> bool:
    """Take the run's files and try them out; False if they were replaced meanwhile."""
    try:
        SharedFiles(store, folder).download(record)
    except FileNotFoundError:
        return False
    try_out()
    return True


def _check_apart(spec: str, folder: Path) -> None:
    """Check that a shared folder is not in the run's folder, which is stored there, or around it.

    Raises:
        SettingsError: it is.
    """
    if OWN_CLASS.fullmatch(spec):
        return
    shared, own = Path(spec).resolve(), folder.resolve()
    if shared.is_relative_to(own) or own.is_relative_to(shared):
        raise SettingsError(
            f"--shared-state {spec} and --out {folder} are one in the other",
            remedy="name two folders beside each other",
        )


def _warn_of_writers(spec: str) -> None:
    """Say it if other users of this machine may write in the shared folder."""
    if OWN_CLASS.fullmatch(spec):
        return
    try:
        check_folder(Path(spec))
    except UntrustedFile as error:
        log.warning(
            "%s: %s: whoever writes there decides how the run goes on (docs/security.md)",
            *(spec, error.strerror),
        )


def _later(now: TermRecord, last: TermRecord) -> TermRecord:
    """Return the record as it is now; it only ever goes on.

    Raises:
        CheckpointCorrupt: it went back, as where an old copy of the folder was put in its place:
            what was opened since would be opened again, and no noise would have been spent on it.
    """
    if (now.term, now.beat) < (last.term, last.beat):
        raise CheckpointCorrupt(
            f"the shared state went back: it was at term {last.term}, round {last.round}, and is "
            f"at term {now.term}, round {now.round}",
            remedy="put back what was there; if it is lost, begin a new run: another "
            "--shared-state",
        )
    return now


def _look(store: StateStore, *, has_failed: bool) -> Look | None:
    """Return the record and its version; None, and a word of it once, if they cannot be read."""
    try:
        return _read(store)
    except (OSError, CheckpointCorrupt) as error:
        if not has_failed:
            log.warning("the shared state cannot be read: %s", error)
        return None


def _read(store: StateStore) -> Look:
    found = store.read(NAME)
    return (TermRecord(), None) if found is None else (TermRecord.of(found[0]), found[1])


def _described(record: TermRecord) -> str:
    """Return who serves the run, as text that changes only with that."""
    if not record.term:
        return "waits for a run"
    where = {
        "serving": f"{record.holder} serves it with term {record.term}",
        "free": f"{record.holder} has ended",
        "drained": f"{record.holder} was drained; waits until it is resumed",
        "failed": f"{record.holder} has failed ({record.reason}); waits until it is resumed",
        "finished": "the run is finished",
    }
    return where[record.stands]


def _unreachable(error: OSError) -> StateError:
    return StateError(
        f"the shared state cannot be reached: {error}",
        remedy="check --shared-state, and that this server may read and write it",
    )
