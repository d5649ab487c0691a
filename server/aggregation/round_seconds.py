"""A round's seconds as its clients see them: download, computation, upload, and waiting for others.

The figures are means over the clients that answered, and add up to the round's own seconds. On a
simulator's virtual clock they follow from each link's rate and from the bytes. On a server the
transport measures both transfers, and a client says how long it computed; a claim of more than the
round's time is cut to it. With masks a client says nothing, and the server's own clock counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from headwater.common.messages import ReadyReport
from headwater.server.aggregation.round_reports import Floats, ReportColumns
from headwater.server.planning.vitals_columns import VitalsColumns

DOWN, COMPUTE, UP, WAIT = "down", "compute", "up", "wait"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSeconds:
    """A client's seconds on its link: while the model was sent to it, and while its vector came."""

    down: float = 0.0
    up: float = 0.0


def virtual_split(
    columns: Sequence[ReportColumns],
    ready: Iterable[ReadyReport],
    *,
    download_bytes: int,
    upload_bytes: int,
) -> dict[str, float]:
    """Return the mean seconds of each part on the virtual clock; they sum to the slowest client's.

    A simulated client's seconds contain its transfers. What is left of them is computation.
    """
    ready = list(ready)
    seconds = [*chain.from_iterable(part.seconds.tolist() for part in columns)]
    seconds += [one.seconds or 0.0 for one in ready]
    vitals = [*(part.vitals for part in columns), VitalsColumns.of(one.vitals for one in ready)]
    mean, number = math.fsum(seconds) / len(seconds), len(seconds)
    down = _seconds(download_bytes, [one.download_bytes_per_second for one in vitals]) / number
    up = _seconds(upload_bytes, [one.upload_bytes_per_second for one in vitals]) / number
    return {
        DOWN: down,
        COMPUTE: max(mean - down - up, 0.0),
        UP: up,
        WAIT: max(max(seconds) - mean, 0.0),
    }


def _seconds(num_bytes: int, rates: Sequence[Floats]) -> float:
    """Return the sum of the seconds in which so many bytes pass, where a rate is known."""
    known = np.concatenate(rates)
    return math.fsum((num_bytes / known[known > 0]).tolist())


def measured_split(
    columns: Sequence[ReportColumns],
    ready: Iterable[ReadyReport],
    links: Mapping[str, LinkSeconds],
    *,
    round_seconds: float,
) -> dict[str, float]:
    """Return the mean seconds of each part on real clocks; they sum to ``round_seconds``.

    Without ``links``, as on Flower's own engines, down and up are unknown, and counted as waiting.
    """
    clients = [
        *chain.from_iterable(
            zip(part.names, part.seconds.tolist(), strict=True) for part in columns
        )
    ]
    masked = {one.name: one.seconds or 0.0 for one in ready}
    clients += masked.items()
    sums = dict.fromkeys((DOWN, COMPUTE, UP, WAIT), 0.0)
    for name, seconds in clients:
        link, left = links.get(name, LinkSeconds()), round_seconds
        computed = seconds - link.down if name in masked else seconds
        for part, spent in ((DOWN, link.down), (UP, link.up), (COMPUTE, computed)):
            taken = min(max(spent, 0.0), left)
            sums[part] += taken
            left -= taken
        sums[WAIT] += left
    if not links:
        del sums[DOWN], sums[UP]
    return {part: total / len(clients) for part, total in sums.items()}
