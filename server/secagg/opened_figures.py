"""Which figures of an opened sum are believed: one member's false number must end no run.

A masked update is what its member masked, and so are its loss and metrics: one member may mask an
accuracy of 10^15, and the masks hide which. Such a figure moves no model, but it would end a run
(``--stop-when``) or choose its best round (``--best``). As in plain rounds
(``aggregation.believed_figures``), but within less, as all members together move less, a mean
counts

* up to a hundred times the median of the last five that counted, and in any case up to 1, a loss up
  to 100;
* if it is a part of the examples by its name (accuracy, recall ...), up to 2, or 200 where it is
  told in percent; in the first round too.

A figure beyond is in no row. The sums for the noise scale follow the same bound.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.common.data.metric_direction import is_part
from headwater.server.aggregation.believed_figures import LEAST, LEAST_LOSS, MOST_PART
from headwater.server.aggregation.round_reports import RoundSum

log = logging.getLogger(__name__)

NUM_RECENT, MULTIPLE = 5, 100.0
LOSS, NOISE = "loss", ("noise variance", "noise squared gradient")
MOST_PERCENT = 100 * MOST_PART


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedFigures:
    """The last means of each figure that counted."""

    recent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @staticmethod
    def of_json(row: Mapping[str, Any]) -> OpenedFigures:
        """Return the figures of a checkpoint; none yet from an empty row."""
        recent = row.get("recent", {})
        return OpenedFigures(recent={name: tuple(means) for name, means in recent.items()})

    def believed(self, done: RoundSum) -> tuple[RoundSum, OpenedFigures]:
        """Return an opened sum without the figures beyond belief, and the figures after it."""
        means = dict(_means(done))
        false = {name for name, mean in means.items() if abs(mean) > self._limit(name)}
        recent = dict(self.recent)
        for name in means.keys() - false:
            recent[name] = (*recent.get(name, ()), abs(means[name]))[-NUM_RECENT:]
        if false:
            log.warning(
                "an opened sum has figures that no sum before came near to (%s): they are in no "
                "row; a client masked a false number, or the training diverges",
                ", ".join(f"{name} {means[name]:.3g}" for name in sorted(false)),
            )
        metrics = {name: value for name, value in done.metric_sums.items() if name not in false}
        return (
            replace(
                done,
                metric_sums=metrics,
                loss_sum=math.nan if LOSS in false else done.loss_sum,
                noise=None if false.intersection(NOISE) else done.noise,
            ),
            OpenedFigures(recent=recent),
        )

    def _limit(self, name: str) -> float:
        """Return the largest mean of a figure that is believed."""
        recent = self.recent.get(name)
        if name in NOISE:
            return math.inf if recent is None else MULTIPLE * max(recent)
        if name != LOSS and is_part(name):
            is_percent = recent is None or statistics.median(recent) > MOST_PART
            return MOST_PERCENT if is_percent else MOST_PART
        if recent is None:
            return math.inf
        return max(MULTIPLE * statistics.median(recent), LEAST_LOSS if name == LOSS else LEAST)


def _means(done: RoundSum) -> Iterator[tuple[str, float]]:
    yield LOSS, done.loss_sum / done.weight
    for name, value in done.metric_sums.items():
        yield name, value / done.weight
    if done.noise is not None and done.noise.measured_weight > 0:
        weight = done.noise.measured_weight
        yield NOISE[0], done.noise.variance / weight
        yield NOISE[1], done.noise.squared_gradient / weight
