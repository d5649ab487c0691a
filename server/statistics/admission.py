"""Checks one device's statistics as they arrive: of several together nobody could say whose lie."""

from __future__ import annotations

from weakref import WeakValueDictionary

from headwater.common.errors import CorruptUpdate
from headwater.common.messages import Update
from headwater.common.statistics.columns import Columns
from headwater.common.statistics.terms import COUNTS, MOMENTS, StatisticsTerms
from headwater.common.sums.encoded_vector import Vector
from headwater.common.terms import Terms

MEASURED: WeakValueDictionary[str, Columns] = WeakValueDictionary()
"""What the runs of this process measure, by digest; an aggregator's process has no run."""


def admit(update: Update, terms: Terms) -> Vector:
    """Return the vector of an update whose statistics some examples have.

    Raises:
        CorruptUpdate: no examples have such sums.
    """
    assert isinstance(terms, StatisticsTerms)
    columns = MEASURED.get(terms.columns)
    has_noise = terms.scale_bits is not None
    if terms.asks_model or has_noise or columns is None:
        return update.vector
    sums = [update.sums[key].tolist() if key in update.sums else [] for key in (COUNTS, MOMENTS)]
    try:
        columns.check(*sums)
    except CorruptUpdate as error:
        raise CorruptUpdate(f"{update.name}: {error.message}") from error
    return update.vector
