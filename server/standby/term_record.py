"""The record of a shared run: which server's term it is, and which files are the run's state.

One small file of the store, replaced by compare and swap. A server that begins to serve adds one to
the term. Whatever it commits later replaces the record too, so a server whose term has ended, and
which does not know it yet, can commit nothing: the comparison fails. Time decides only when a
standby tries to take over, never whether a commit counts.

Sources: leases, Gray and Cheriton 1989; terms and fencing, Ongaro and Ousterhout 2014, section 5.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from headwater.common.errors import CheckpointCorrupt
from headwater.common.parsed_text import json_of

NAME = "term"
STORED = re.compile(r"\d{1,20}-\d{1,20}-[^/\\\0]{1,1000}")
"""A name in the store, as ``SharedFiles`` gives it."""

Stands = Literal["serving", "free", "drained", "failed", "finished"]
"""free: the server has ended so that another may continue; the last three: none should."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TermRecord:
    """The record; the names are the keys in its file."""

    term: int = 0
    holder: str = ""
    """The server's name, unique to its process."""
    stands: Stands = "free"
    reason: str = ""
    """Why it failed."""
    beat: int = 0
    """Counts the record's replacements, so that each is different from all others."""
    term_seconds: float = 0.0
    """How long the record may stay unchanged before another server takes over."""
    round: int = 0
    """The last committed round, for the log alone."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The run's files: path in the run's folder, and name in the store."""
    log_pieces: tuple[str, ...] = ()
    """The stored pieces of the run's log of rounds, in their order."""

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun."""
        return bool(self.files)

    def to_bytes(self) -> bytes:
        """Return the record as its file has it."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def of(content: bytes) -> TermRecord:
        """Read a file's content.

        Raises:
            CheckpointCorrupt: it is no record.
        """
        try:
            plain: dict[str, Any] = json_of(content)
            record = TermRecord(**{**plain, "log_pieces": tuple(plain["log_pieces"])})
            record._check_names()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointCorrupt(
                f"the shared state's record of terms cannot be read: {error}",
                remedy="name another --shared-state, or restore it from a backup",
            ) from error
        return record

    def _check_names(self) -> None:
        """Check that no name leads out of the run's folder, or of the store.

        Raises:
            ValueError: one does.
        """
        stored = [*self.files.values(), *self.log_pieces]
        parts = [part for path in self.files for part in path.split("/")]
        if not all(STORED.fullmatch(one) for one in stored):
            raise ValueError("a stored file has a name that no server gives")
        if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
            raise ValueError("a file has a name that leads out of the run's folder")

    def taken_by(self, holder: str, *, term_seconds: float) -> TermRecord:
        """Return the record of the next term."""
        return replace(
            self,
            term=self.term + 1,
            holder=holder,
            stands="serving",
            reason="",
            beat=self.beat + 1,
            term_seconds=term_seconds,
        )


def may_take_over(record: TermRecord, *, unchanged_seconds: float) -> bool:
    """Return whether a standby may take over from the record's holder.

    ``unchanged_seconds`` is how long this server has seen the record unchanged, by its own clock.

    | the record | may |
    | --- | --- |
    | serving, unchanged for less than its ``term_seconds`` | no |
    | serving, unchanged for that long | yes |
    | free | yes |
    | drained, failed or finished | no |
    """
    if record.stands == "serving":
        return unchanged_seconds >= record.term_seconds
    return record.stands == "free"
