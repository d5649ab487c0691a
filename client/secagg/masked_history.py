"""What a device has masked in all of its runs: each example, once at each model.

If a server starts again with the same seed, its first model is the same,
and a device that masked the same examples again would let two sums differ by the devices that are
in only one of them (tests/attacks/test_masked_runs.py). So a device keeps a file beside its state:

* a secret, drawn once, from which its order of examples in masked rounds follows;
* for each masked update the model and the update, as keyed digests, and the examples' numbers;
* whether a window had to be taken apart and was late for it, which the server saw: once in the
  device's life, as it asks for the time of such a window from then on;
* where the data have changed, a keyed digest of the examples' names, or of their number. At the
  models before such a line the device masks nothing more: another file has each number now.

Lines are appended and forced to disk before an update is masked; the file grows by a line for
each, and is never rewritten. Several processes may play the device (two runs, under the default
names): each looks, under a lock, at what the others have masked before it masks.

A model that differs in one bit is another model: what two sums at almost the same model show is out
of scope (docs/secure-aggregation.md).
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from headwater.client.training.sampler import seed_of
from headwater.common.errors import StateError, UpdateAlreadyMasked
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import OWNER_ONLY, make_private_folder
from headwater.common.system.file_lock import try_lock
from headwater.common.task import Examples
from headwater.common.wording import counted

log = logging.getLogger(__name__)

NAMES = "example_names"  # of a data set, where it has some: docs/data.md
SECRET_BYTES, MODEL_BYTES = 32, 16
LOCK_SECONDS = 10.0  # a line is written and forced to disk in far less
MAX_UPDATES = 1024  # whose names are kept in memory
MAX_EXAMPLES = 1 << 24  # of one device: a range in a file could else take all memory
NONE_MASKED: frozenset[int] = frozenset()


class MaskedHistory(Protocol):
    """The masked updates of one device, in all of its runs."""

    def order_seed(self, run_seed: int, run_id: int) -> int:
        """Return the seed of the device's order of examples in a run's masked rounds."""

    def masked_at(self, model_digest: bytes) -> frozenset[int]:
        """Return the examples that were masked at a model."""

    def num_planned_at(self, model_digest: bytes) -> int:
        """Return how many examples the plans asked for whose updates were masked at a model."""

    def check_data(self, examples: Examples, model_digest: bytes) -> None:
        """Check that what was masked at a model was masked of these data, and note the data.

        Raises:
            StateError: they could not be noted.
            UpdateAlreadyMasked: others were there then.
        """

    def add(
        self,
        model_digest: bytes,
        examples: Sequence[int],
        *,
        num_planned: int | None = None,
        update_id: str | None = None,
    ) -> None:
        """Note an update before it is masked; its plan asked for ``num_planned`` examples.

        Raises:
            StateError: it could not be stored.
        """

    def was_masked(self, update_id: str, model_digest: bytes, *, num_planned_before: int) -> bool:
        """Return whether one of the last updates was masked, in whichever session.

        ``num_planned_before`` is ``num_planned_at`` before it: a line that an earlier version wrote
        names no update, and counts as this one's.
        """

    @property
    def was_taken_apart(self) -> bool:
        """Whether a window was late because it had to be taken apart."""

    def note_taken_apart(self) -> None:
        """Note that a window was.

        Raises:
            StateError: it could not be stored.
        """


class NoHistory:
    """The history of a simulated device: one party plays all devices, and nothing is hidden."""

    def order_seed(self, run_seed: int, run_id: int) -> int:
        """Return the run's own seed: masked and plain runs use the same examples."""
        return run_seed

    def masked_at(self, model_digest: bytes) -> frozenset[int]:
        """Return no examples."""
        return NONE_MASKED

    def num_planned_at(self, model_digest: bytes) -> int:
        """Return 0."""
        return 0

    def check_data(self, examples: Examples, model_digest: bytes) -> None:
        """Note nothing."""

    def add(
        self,
        model_digest: bytes,
        examples: Sequence[int],
        *,
        num_planned: int | None = None,
        update_id: str | None = None,
    ) -> None:
        """Note nothing."""

    def was_masked(self, update_id: str, model_digest: bytes, *, num_planned_before: int) -> bool:
        """Return False: what a simulated device masked last is in its record."""
        return False

    @property
    def was_taken_apart(self) -> bool:
        """Return False: the time of a simulated device is the simulator's."""
        return False

    def note_taken_apart(self) -> None:
        """Note nothing."""


class HistoryFile:
    """A device's history in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file, or make it with a new secret.

        Raises:
            StateError: it cannot be read or written.
        """
        self._path = path
        self._masked: defaultdict[str, set[int]] = defaultdict(set)
        self._num_planned: defaultdict[str, int] = defaultdict(int)
        self._num_unnamed: defaultdict[str, int] = defaultdict(int)
        """How many of these are of lines that name no update."""
        self._updates: deque[str] = deque(maxlen=MAX_UPDATES)
        self._examples: Examples | None = None
        """The data of the last check, and the digest of those in the file's last such line."""
        self._data: str | None = None
        self.was_taken_apart = False
        """See ``MaskedHistory``."""
        self._of_others: set[str] = set()
        """The models at which other data were masked."""
        self._last: tuple[object, ...] = ()
        """What this process added last: it is added again if what follows could not be stored."""
        self._num_read = 0
        """The bytes of the file whose lines are known."""
        try:
            make_private_folder(path.parent)
            with self._locked():
                if not path.exists():
                    self._append({"secret": os.urandom(SECRET_BYTES).hex()})
                self._secret = self._read()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"the file {path} cannot be read: {type(error).__name__}: {error}",
                remedy="it says what this device has masked; without it two runs of one seed "
                "could show its update: mend it, or move it away and take part in no such run",
            ) from error

    def _read(self) -> bytes:
        data = self._path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):  # a line that was cut off belongs to an update that was not masked
            log.warning("%s: the last line is incomplete, and is removed", self._path)
            os.truncate(self._path, end)
        first, *lines = (json_of(line) for line in data[:end].splitlines())
        self._note_lines(lines)
        self._num_read = end
        secret = bytes.fromhex(first["secret"])
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret of {len(secret)} bytes")
        return secret

    def order_seed(self, run_seed: int, run_id: int) -> int:
        """Return a seed that nobody knows without the file, another in each run."""
        return seed_of("masked order", run_seed, run_id, self._secret.hex())

    def masked_at(self, model_digest: bytes) -> frozenset[int]:
        """Return the examples that were masked at a model, in any run."""
        return frozenset(self._masked.get(self._name_of(model_digest), ()))

    def add(
        self,
        model_digest: bytes,
        examples: Sequence[int],
        *,
        num_planned: int | None = None,
        update_id: str | None = None,
    ) -> None:
        """Note an update before it is masked; its plan asked for ``num_planned`` examples.

        Raises:
            StateError: it could not be stored.
            UpdateAlreadyMasked: another process has masked one of them at this model.
        """
        name = self._name_of(model_digest)
        line: dict[str, object] = {"model": name, "examples": to_ranges(examples)}
        line |= {} if num_planned is None else {"planned": num_planned}
        update = None if update_id is None else self._name_of(update_id.encode())
        line |= {} if update is None else {"update": update}
        try:
            with self._locked():
                self._read_more()
                both = self._masked[name] & set(examples)
                if both and (name, *examples) != self._last:
                    raise UpdateAlreadyMasked(
                        "another process of this device has masked "
                        f"{counted(len(both), 'example')} of this update at the same model",
                        remedy="give each client of a machine a --name and a --state of its own",
                    )
                self._append(line)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise StateError(f"the device cannot write what it masks: {why}") from error
        self._note(name, set(examples), num_planned, update)
        self._last = (name, *examples)

    def check_data(self, examples: Examples, model_digest: bytes) -> None:
        """Check that what was masked at a model was masked of these data, and note the data.

        The history has numbers, and another file in a folder is another example of each number.

        Raises:
            StateError: they could not be noted.
            UpdateAlreadyMasked: others were there then.
        """
        if examples is not self._examples:
            data = self._name_of(_names_of(examples))
            try:
                with self._locked():
                    self._read_more()
                    if data != self._data:
                        # An earlier version reads this as an update of nothing.
                        self._append({"model": "", "examples": [], "planned": 0, "data": data})
                        self._note_data(data)
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise StateError(f"the device cannot write what it masks: {why}") from error
            self._examples = examples
        if self._name_of(model_digest) in self._of_others:
            raise UpdateAlreadyMasked(
                "this device's data have changed since it masked some of them at the same model, "
                "and one example could be in two sums",
                remedy="continue that run with --resume, or begin with another model: another "
                "--seed on the server",
            )

    def note_taken_apart(self) -> None:
        """Note that a window was late because it had to be taken apart.

        Raises:
            StateError: it could not be stored.
        """
        if not self.was_taken_apart:
            try:
                with self._locked():
                    self._read_more()
                    self._append({"model": "", "examples": [], "planned": 0, "apart": True})
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                raise StateError(f"the device cannot write what it masks: {why}") from error
            self.was_taken_apart = True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes of the device from adding: each looks at what the others did.

        Raises:
            OSError: one of them holds the file for long.
        """
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, OWNER_ONLY)
        try:
            end = time.monotonic() + LOCK_SECONDS
            while not try_lock(lock):
                if time.monotonic() >= end:
                    raise OSError(errno.EAGAIN, "another process of this device holds the file")
                time.sleep(0.01)
            yield
        finally:
            os.close(lock)

    def _read_more(self) -> None:
        """Note the updates that other processes of the device have masked since."""
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._note_lines(json_of(line) for line in data[:end].splitlines())
        self._num_read += end

    def _note_lines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            if "data" in line:
                self._note_data(str(line["data"]))
                continue
            self.was_taken_apart |= bool(line.get("apart"))
            examples, update = from_ranges(line["examples"]), line.get("update")
            self._note(str(line["model"]), examples, line.get("planned"), update)

    def _note_data(self, data: str) -> None:
        if self._data not in (None, data):
            self._of_others |= {name for name, masked in self._masked.items() if masked}
        self._data = data

    def _note(
        self, name: str, examples: set[int], num_planned: int | None, update: str | None
    ) -> None:
        self._masked[name] |= examples
        # A line of an earlier version does not have the plan's number.
        number = len(examples) if num_planned is None else num_planned
        self._num_planned[name] += number
        if update is None:
            self._num_unnamed[name] += number
        elif update not in self._updates:
            self._updates.append(update)

    def was_masked(self, update_id: str, model_digest: bytes, *, num_planned_before: int) -> bool:
        """Return whether one of the last updates was masked; see ``MaskedHistory``."""
        is_named = self._name_of(update_id.encode()) in self._updates
        return (
            is_named or self._num_unnamed.get(self._name_of(model_digest), 0) > num_planned_before
        )

    def num_planned_at(self, model_digest: bytes) -> int:
        """Return how many examples the plans asked for whose updates were masked at a model."""
        return self._num_planned.get(self._name_of(model_digest), 0)

    def _name_of(self, model_digest: bytes) -> str:
        keyed = hashlib.blake2b(model_digest, key=self._secret, digest_size=MODEL_BYTES)
        return keyed.hexdigest()

    def _append(self, line: dict[str, object]) -> None:
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, OWNER_ONLY)
        try:
            start = os.lseek(file, 0, os.SEEK_END)
            try:
                if (num_written := os.write(file, text)) != len(text):  # as where a disk is full
                    raise OSError(errno.ENOSPC, f"{num_written} of {len(text)} bytes were written")
                os.fsync(file)
            except OSError:
                os.truncate(self._path, start)  # no later line may join a part of this one
                raise
            self._num_read = start + len(text)
        finally:
            os.close(file)


def _names_of(examples: Examples) -> bytes:
    """Return what tells data from others: the examples' names, or their number alone."""
    names = getattr(examples, NAMES, None)
    parts = [str(len(examples))] if names is None else [str(name) for name in names]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).digest()


@functools.lru_cache(maxsize=64)
def history_in(path: Path) -> HistoryFile:
    """Return the history in a file, read once in a process.

    Raises:
        StateError: it cannot be read or written.
    """
    return HistoryFile(path)


def to_ranges(numbers: Sequence[int]) -> list[int]:
    """Return rising numbers as pairs of first and last, one after another."""
    ends: list[int] = []
    for number in sorted(set(numbers)):
        if ends and ends[-1] == number - 1:
            ends[-1] = number
        else:
            ends += [number, number]
    return ends


def from_ranges(ends: Sequence[int]) -> set[int]:
    """Return the numbers of pairs of first and last.

    Raises:
        ValueError: they are more than a device can have.
    """
    pairs = list(zip(ends[::2], ends[1::2], strict=True))
    if sum(last - first + 1 for first, last in pairs) > MAX_EXAMPLES or min(ends, default=0) < 0:
        raise ValueError(f"ranges of more than {MAX_EXAMPLES:,} examples, or below zero")
    return {number for first, last in pairs for number in range(first, last + 1)}
