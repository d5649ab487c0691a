"""Finds devices with the same data, parts of another division or another task, before they train.

A copy counts twice in each step, a part that no device has is never learned from, and a task with
the classes in another order unlearns: no loss or accuracy shows which. Devices that require masks
tell nothing of their data and are not compared; they refuse another task themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headwater.common.messages import DataShare, DeviceReport
from headwater.common.task import task_code
from headwater.common.user_code.task_spec import short_code
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.open_round import OpenRound

log = logging.getLogger(__name__)

MAX_NAMES = 3
MAX_KNOWN = 10_000  # clients that are remembered; a simulated population may have any size


class SameData(Observer):
    """Warns once of each group of clients with the same data or another task, as they enter."""

    def __init__(self, task: str | None) -> None:
        """``task`` is the server's own; None: it is not known."""
        self._own_code = None if task is None else task_code(task)
        self._codes: dict[str, str] = {}
        self._reports: Mapping[str, DeviceReport] = {}
        self._known: dict[str, DataShare | None] = {}
        self._said: set[str] = set()

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        self._reports = reports

    def asked(self, opened: OpenRound) -> None:
        new = [name for name in opened.plans if name not in self._known]
        for name in new[: MAX_KNOWN - len(self._known)]:
            report = self._reports.get(name)
            self._known[name] = None if report is None else report.data
            if report is not None and report.task is not None:
                self._codes[name] = report.task
        if new:
            if self._own_code is not None:
                self._say(other_tasks(self._codes, self._own_code))
            self._say(same_examples(self._known))
            self._say(other_divisions(self._known))

    def _say(self, found: Mapping[str, str]) -> None:
        """Log what was not said yet, by what it is about."""
        for about, text in found.items():
            if about not in self._said:
                self._said.add(about)
                log.warning(text)


def same_examples(shares: Mapping[str, DataShare | None]) -> dict[str, str]:
    """Return a text about each group of clients with the same digest, by their digest."""
    groups: dict[str, list[str]] = {}
    for name, share in shares.items():
        if share is not None and share.digest is not None:
            groups.setdefault(share.digest, []).append(name)
    found = {}
    for digest, names in groups.items():
        if len(names) > 1:
            parts = {share.part for name in names if (share := shares[name]) is not None}
            found[digest] = f"{_listed(names)} have the same examples: {_why(len(parts))}"
    return found


def _why(num_parts: int) -> str:
    counted = "each step counts them once for each device"
    if num_parts > 1:
        return (
            f"{counted}. Their parts differ, so let the task's train_examples use part and "
            "num_parts, or give each device a --data folder of its own"
        )
    return (
        f"{counted}. Give each device its own --part with the same --num-parts, or its own --data"
    )


def other_divisions(shares: Mapping[str, DataShare | None]) -> dict[str, str]:
    """Return a text about clients whose data is divided into another number of parts."""
    divisions: dict[int, list[str]] = {}
    for name, share in shares.items():
        if share is not None and share.num_parts > 1:
            divisions.setdefault(share.num_parts, []).append(name)
    if len(divisions) < 2:
        return {}
    one, other = list(divisions.items())[:2]
    text = (
        f"{_listed(one[1])} have parts of {one[0]}, and {_listed(other[1])} of {other[0]}: such "
        "parts overlap and leave examples out. Start all devices with the same --num-parts"
    )
    return {f"{one[0]} and {other[0]}": text}


def other_tasks(codes: Mapping[str, str], own: str) -> dict[str, str]:
    """Return a text about the clients with each other code of the task than the server's ``own``.

    ``codes`` are by name; each is a name and a digest.
    """
    groups: dict[str, list[str]] = {}
    for name, code in codes.items():
        if code.split()[-1] != own.split()[-1]:
            groups.setdefault(code, []).append(name)
    return {
        code: f"{_listed(names)}: the task there is {short_code(code)}, and the server's is "
        f"{short_code(own)}. Their models have one shape; if labels, loss or the order of columns "
        "differ, the sums mix what does not belong together. Start all with the same file, unless "
        "they differ on purpose"
        for code, names in groups.items()
    }


def _listed(names: list[str]) -> str:
    """Return names as text, at most three of them."""
    if len(names) > MAX_NAMES:
        return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
