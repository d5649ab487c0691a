"""The state file: what a client must remember for a run after a restart.

It holds the sampler state, the record of secure sessions and the measured training speed, and no
secret. In memory the same entries are in Flower's context. A real device writes them to a file
before the reply that they belong to leaves. After a restart it continues at the examples that the
server counted, and never masks an update again that it masked before.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from headwater.client.training.sampler import SamplerPosition, SamplerState
from headwater.common.errors import StateError
from headwater.common.estimates.linear_fit import Line
from headwater.common.model.local_state import LocalStore
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import OWNER_ONLY, make_private_folder, write_atomically

log = logging.getLogger(__name__)

SAMPLER, SECURE, SPEED = "walk", "secure", "pace"
REPEATS, TERM, EXAMPLES, SHARE = "repeats", "term", "examples", "share"
"""The entries' names in the context and in the file."""

OFFLINE = "offline"
NOT_ASKED = "only the device itself goes on without a link"
"""The query that the node sends its own app; no server may send it."""

STATE = "state"
"""The key of a node's configuration with the folder of its state files."""

Plain = Mapping[str, Any]


def read_sampler(plain: Plain | None) -> SamplerState:
    """Return the sampler's state; at the first example if there is no entry."""
    if plain is None:
        return SamplerState()
    return SamplerState(
        place=_read_place(plain["place"]),
        pending_round=plain["pending_round"],
        pending_place=_read_place(plain["pending_place"]),
        # A file of an earlier version has none of these.
        settled_round=plain.get("settled_round"),
        pending_order=plain.get("pending_order"),
        earlier_round=plain.get("earlier_round"),
        earlier_place=_read_place(plain.get("earlier_place", {"epoch": 0, "offset": 0})),
    )


def _read_place(plain: Plain) -> SamplerPosition:
    # A file of an earlier version has epoch and offset only.
    return SamplerPosition(**{**plain, "skipped": tuple(plain.get("skipped", ()))})


def read_speed(plain: Plain | None) -> Line | None:
    """Return the seconds of a micro-batch as a line in its size; None if it was never measured."""
    return None if plain is None else Line(base=float(plain["base"]), each=float(plain["each"]))


def read_share(plain: Plain | None) -> float | None:
    """Return the share of its time that the device told last; None if it told none."""
    return None if plain is None else float(plain["told"])


def read_term(plain: Plain) -> int:
    """Return the latest term of the run's servers that the device has met."""
    return int(plain["number"])


def _read_as(module: str, kind: str, method: str, plain: Plain) -> object:
    return getattr(getattr(import_module(module), kind), method)(plain)


KNOWN_EXAMPLES = "headwater.client.growing_data.known_examples"
# An entry of a feature is read by its own code.
READERS: Mapping[str, Callable[[Plain], object]] = {
    SAMPLER: read_sampler,
    SECURE: partial(_read_as, "headwater.client.secagg.types", "SessionRecord", "of"),
    SPEED: read_speed,
    REPEATS: partial(_read_as, "headwater.client.secagg.plan_policy", "PlanRepeats", "of"),
    TERM: read_term,
    SHARE: read_share,
    EXAMPLES: partial(_read_as, KNOWN_EXAMPLES, "KnownExamples", "from_json"),
}
_REMOVED = ("masked_pace",)  # in files of earlier versions


class StateFile:
    """One client's state file in one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, Any] = {}
        self._has_failed = False
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any]:
        """Return the entries but for the term; empty if there is no file.

        Raises:
            StateError: the file cannot be read, or an entry is not valid.
        """
        try:
            entries = json_of(self.path.read_text(encoding="utf-8"))
            for name in _REMOVED:
                entries.pop(name, None)
            for name, plain in entries.items():
                READERS[name](plain)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"the state file {self.path} cannot be read: {type(error).__name__}: {error}",
                remedy="delete the file: the device then starts at its first example, and no "
                "longer knows which of its updates were masked",
            ) from error
        self._written = entries
        return {name: plain for name, plain in entries.items() if name != TERM}

    @property
    def term(self) -> int:
        """The latest term of the run's servers in the file; 0 if none had one."""
        return read_term(self._written.get(TERM, {"number": 0}))

    def write(self, entries: Mapping[str, Any]) -> None:
        """Write the entries and force them to disk, unless the file has them already.

        Raises:
            StateError: they could not be written; the previous file is intact.
        """
        with self._lock:
            own = {TERM: self._written[TERM]} if TERM in self._written else {}
            self._replace({**entries, **own})

    def write_term(self, term: int) -> None:
        """Write a later term, and leave the other entries as they are in the file.

        The thread of an instruction may be about to write those.

        Raises:
            StateError: see ``write``.
        """
        with self._lock:
            self._replace({**self._written, TERM: {"number": term}})

    def _replace(self, entries: Mapping[str, Any]) -> None:
        if entries == self._written:
            return
        try:
            make_private_folder(self.path.parent)
            write_atomically(self.path, json.dumps(entries).encode(), mode=OWNER_ONLY)
        except OSError as error:
            if not self._has_failed:  # each round tries again
                log.warning("%s cannot be written: %s", self.path, error.strerror)
            self._has_failed = True
            raise StateError(f"the device cannot write its state file: {error.strerror}") from error
        self._written, self._has_failed = dict(entries), False


def offline_name(name: str, run_id: int) -> str:
    """Return the name of the file of a device's sum in a run, of windows without a link."""
    return f"{name}-{run_id}.offline"


def local_file(path: Path, *, is_durable: bool = True) -> LocalStore:
    """Return the store of the parameters that stay on a device: a file that only its owner reads.

    Each write replaces it as a whole, and forces it to disk if ``is_durable``.
    """

    def load() -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def save(data: bytes) -> None:
        make_private_folder(path.parent)
        write_atomically(path, data, mode=OWNER_ONLY, is_durable=is_durable)

    return LocalStore(str(path), load, save)
