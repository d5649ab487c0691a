"""The devices that cannot take part, and why: like reasons share one line of the log.

A fault of the task, or a flag that is missing, keeps a whole fleet out with the same words, but for
the devices' names and numbers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from headwater.common.errors import HeadwaterError
from headwater.common.wording import counted

log = logging.getLogger(__name__)

MAX_LINES, MAX_NAMES = 10, 5
NUMBERS = re.compile(r"\d[\d.,]*")


class RefusedDevices:
    """Collects refusals until they are logged, and forgets them then."""

    def __init__(self) -> None:
        self._by_reason: dict[str, list[tuple[str | None, HeadwaterError]]] = {}

    def add(self, name: str | None, error: HeadwaterError) -> None:
        """Note why a device is refused; ``name`` is None if it is not known."""
        is_word = name is not None and not name.isdecimal()  # a number is replaced as any other
        words = NUMBERS.sub(
            "0", error.message.replace(name or "", "") if is_word else error.message
        )
        reason = f"{error.code}: {' '.join(words.split())}"
        self._by_reason.setdefault(reason, []).append((name, error))

    def log(self) -> None:
        """Log each reason in one line, with the devices that have it."""
        by_reason, self._by_reason = self._by_reason, {}
        for refused in list(by_reason.values())[:MAX_LINES]:
            (_, first), names = refused[0], [name for name, _ in refused]
            log.warning("%s refused: %s: %s", _named(names), first.code, _in_one_line(first))
        if len(by_reason) > MAX_LINES:
            rest = [one for refused in list(by_reason.values())[MAX_LINES:] for one in refused]
            others = _named([name for name, _ in rest])
            log.warning("%s refused, each for another reason", others)

    def take_error(self) -> HeadwaterError | None:
        """Return the first error, which ends the run and is shown; log all if reasons differ."""
        if not self._by_reason:
            return None
        _, error = next(iter(self._by_reason.values()))[0]
        if len(self._by_reason) > 1:
            self.log()
        self._by_reason = {}
        return error


def _in_one_line(error: HeadwaterError) -> str:
    """Return the error's message; of a traceback only the last place."""
    first, *rest = error.message.splitlines() or [""]
    places = [line.strip() for line in rest if line.lstrip().startswith("File ")]
    return f"{first} ({places[-1]})" if places else " ".join(error.message.split())


def _named(names: Sequence[str | None]) -> str:
    known = [name for name in names if name is not None]
    if len(names) == 1:
        return f"device {known[0]} is" if known else "a device is"
    more = ", ..." if len(known) > MAX_NAMES else ""
    listed = f" ({', '.join(known[:MAX_NAMES])}{more})" if known else ""
    return f"{counted(len(names), 'device')}{listed} are"
