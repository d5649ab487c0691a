"""Metrics by label: the devices of each label whose means may be told, as they betray no few."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.common.messages import EvaluateReport

LEAST_DEVICES = 3  # of a label that has metrics of its own, as in a secure session


def by_label(reports: Sequence[EvaluateReport]) -> dict[str, list[EvaluateReport]]:
    """Return the reports of the devices of each label, where that betrays no few of them.

    A label is left out if a sum or difference of what this returns would be of fewer than
    ``LEAST_DEVICES``: of all devices, of a label, or of several labels. So is one that all devices
    have. Labels come in the order of their names.
    """
    rows_of: dict[str, set[int]] = {}
    for row, report in enumerate(reports):
        for label in report.labels.split(",") if report.labels else ():
            rows_of.setdefault(label, set()).add(row)
    cells = [set(range(len(reports)))]  # devices that no told label tells apart
    found = {}
    for label, rows in sorted(rows_of.items()):
        parts = [part for cell in cells for part in (cell & rows, cell - rows) if part]
        if len(rows) < len(reports) and min(map(len, parts)) >= LEAST_DEVICES:
            cells, found[label] = parts, [reports[row] for row in sorted(rows)]
    return found
