"""Where memory limits K: the largest micro-batches that fit in the clients' memories.

K = ceil(quota / micro-batch size) follows from them. The device itself has the last word
(``headwater.client.training.fitting``).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from headwater.common.settings import schema as settings
from headwater.server.planning.device_estimates import EstimateColumns
from headwater.server.planning.vitals_columns import Floats, Ints

if TYPE_CHECKING:
    from headwater.server.planning.target_batch import Demand

MIN_BYTES = 1e-3  # per example


class SizeBound(Enum):
    """The limit that a micro-batch's size is at."""

    SET = "as set"
    MAXIMUM = "at its maximum"
    FASTEST = "fastest measured"
    DATA = "all its examples"
    STEP = "a whole local step"
    MEMORY = "what fits in memory"


SIZE_BOUNDS = tuple(SizeBound)


def micro_batch_sizes(
    known: EstimateColumns, chosen: settings.PlanSettings, demand: Demand | None = None
) -> tuple[Ints, Ints]:
    """Return the largest micro-batches that fit in the clients' memories, and what bound each.

    base + size x bytes per example must stay within ``memory_fraction`` of the limit; one example
    is assigned in any case, as the device itself decides in the end. Where no size is set, it is at
    most what the device measured to be the fastest, and the examples that it owns. The bounds are
    indices of SIZE_BOUNDS.
    """
    held = 0 if demand is None else demand.held_bytes
    fitting = _fitting_sizes(known, chosen.memory_fraction, held_bytes=held)
    if chosen.micro_batch_size is not None or chosen.accumulation_steps is not None:
        largest = chosen.micro_batch_size or chosen.set_micro_batch_size
        kinds = [SizeBound.SET, SizeBound.MEMORY]
        limits = [np.full_like(fitting, largest), fitting]
    else:
        kinds = [SizeBound.MAXIMUM, SizeBound.FASTEST, SizeBound.DATA, SizeBound.MEMORY]
        fastest = known.fastest_micro_batch_size
        fastest = np.where(fastest > 0, fastest, np.inf)
        owned = known.num_examples.astype(np.float64)
        limits = [np.full_like(fitting, chosen.max_micro_batch_size), fastest, owned, fitting]
    if demand is not None:
        kinds.append(SizeBound.STEP)
        limits.append(np.full_like(fitting, demand.step_examples))
    rows = np.stack(limits)
    first = rows.argmin(axis=0)  # of equal limits the first
    indices = np.array([SIZE_BOUNDS.index(kind) for kind in kinds])
    return rows.min(axis=0).astype(np.int64), indices[first]


def _fitting_sizes(known: EstimateColumns, fraction: float, *, held_bytes: int = 0) -> Floats:
    """Return the largest micro-batches that fit in memory; 2^40 where that is unknown.

    ``held_bytes`` are those of a demand, which no measured peak contains.
    """
    vitals = known.vitals
    limit, slope = vitals.memory_limit_bytes, vitals.bytes_per_example
    is_known = (limit >= 0) & (slope > 0)
    base = np.where(np.isnan(vitals.base_bytes), 0.0, vitals.base_bytes)
    room = np.where(is_known, np.maximum(limit * fraction - base - held_bytes, 0.0), np.inf)
    sizes = room / np.where(is_known, np.maximum(slope, MIN_BYTES), 1.0)
    fitting: Floats = np.maximum(np.floor(np.minimum(sizes, 2.0**40)), 1.0)
    return fitting
