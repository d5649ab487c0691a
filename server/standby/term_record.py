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
from dataclasses import asdict, field, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from headwater.common.errors import CheckpointCorrupt
from headwater.common.parsed_text import json_of

NAME = "term"
STORED = re.compile(r"[0-9]{1,20}-[0-9]{1,20}-[^/\\\0]{1,1000}")
"""A name in the store, as ``SharedFiles`` gives it."""
CODE = (".py", ".pyc", ".pyo", ".pyd", ".pyw", ".so", ".dll", ".dylib", ".pth", ".egg", ".zip")
"""The ends of names of what Python would run: no run has such a file to share."""

CHECKED = ConfigDict(strict=True, extra="forbid")
Stands = Literal["serving", "free", "drained", "failed", "finished"]
"""free: the server has ended so that another may continue; the last three: none should."""
Number = Annotated[int, Field(ge=0, lt=2**53)]
Text = Annotated[str, Field(max_length=2000)]


@pydantic_dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class TermRecord:
    """The record; the names are the keys in its file."""

    term: Number = 0
    holder: Text = ""
    """The server's name, unique to its process."""
    stands: Stands = "free"
    reason: Text = ""
    """Why it failed."""
    beat: Number = 0
    """Counts the record's replacements, so that each is different from all others."""
    term_seconds: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """How long the record may stay unchanged before another server takes over."""
    round: Number = 0
    """The last committed round, for the log alone."""
    files: dict[str, str] = field(default_factory=dict)
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
                remedy="put back the newest copy: devices that have met a later term refuse an "
                "older one. If it is lost, begin a new run with another --shared-state",
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
        if any(is_code(part) for part in parts):
            raise ValueError("a file has the name of code")

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


def is_code(name: str) -> bool:
    """Return whether Python could run a file of this name, or what is in a folder of it."""
    return name.lower().endswith(CODE) or name == "__pycache__"


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
