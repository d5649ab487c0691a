"""Numbers of a run's secure sessions: strictly increasing, and stored before they are used.

A device refuses a session number that it has seen, because its masks would repeat.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from headwater.common.errors import CheckpointCorrupt, StateError
from headwater.common.parsed_text import json_of
from headwater.common.secagg.protocol import SessionNumber, next_number
from headwater.common.system.atomic_file import write_atomically

SESSION_FILE = "session.json"
MAX_ROUNDS = 10_000  # devices refuse the repeated number of a session of a round before these


class SessionNumbers:
    """Issues session numbers; without a folder they are not stored."""

    def __init__(
        self, folder: Path | None, *, run_id: int, publish: Callable[[], None] = lambda: None
    ) -> None:
        """Continue after the last number stored for this run, if any.

        ``publish`` is called with each number, after it is stored and before it is used.

        Raises:
            CheckpointCorrupt: the file cannot be read.
        """
        self._path = None if folder is None else folder / SESSION_FILE
        self._run_id = run_id
        self._publish = publish
        self._restored: SessionNumber | None = None
        """The highest number of an earlier server, and of this one up to its round."""
        self._highest: SessionNumber | None = None
        self._last: dict[int, SessionNumber] = {}
        """The last number of each round; of the newest ``MAX_ROUNDS`` rounds that had sessions."""
        if self._path is not None and self._path.exists():
            try:
                fields = json_of(self._path.read_text(encoding="utf-8"))
                if fields["run_id"] == run_id:
                    self._restored = SessionNumber(int(fields["round"]), int(fields["attempt"]))
                    self._highest = self._restored
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointCorrupt(
                    f"{self._path} does not hold the last secure session's number: {error}",
                    remedy="start another run: devices refuse a session number that they have seen",
                ) from error

    def next(self, round_number: int) -> SessionNumber:
        """Store and return the number of the next session of updates whose plans are of a round.

        In asynchronous rounds that may be an earlier round than the last one. The file has the
        highest number alone: a server that starts again accepts no updates of earlier rounds.

        Raises:
            StateError: it cannot be stored.
        """
        restored = self._restored
        if restored is not None and round_number <= restored.round:
            # Also where the checkpoint is some rounds older than the file: all of these rounds go
            # on from the one number, so that none of them repeats another's.
            number = self._restored = next_number(restored, round_number=round_number)
        else:
            number = next_number(self._last.get(round_number), round_number=round_number)
            self._last[round_number] = number
        highest = number if self._highest is None else max(self._highest, number)
        if self._path is not None:
            row = {"run_id": self._run_id, "round": highest.round, "attempt": highest.attempt}
            try:
                write_atomically(self._path, json.dumps(row).encode())
            except OSError as error:
                raise StateError(f"cannot write {self._path}: {error.strerror}") from error
            self._publish()
        self._highest = highest
        if len(self._last) > MAX_ROUNDS:
            del self._last[min(self._last)]
        return number
