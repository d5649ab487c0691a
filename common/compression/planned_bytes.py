"""The bytes that a round moves for a device, as planned from a run's settings alone."""

from __future__ import annotations

from headwater.common.compression.terms import planned_difference_bytes, terms_of, update_bytes
from headwater.common.settings.schema import Settings


def download_bytes(settings: Settings, num_values: int) -> int:
    """Return the bytes of the model for a device that has been in a round, or about.

    If only some devices are in a round, most hold an older version: the differences of two rounds
    in bfloat16 are as long as the model.
    """
    method = settings.compression.down
    if method == "off" or (method == "bfloat16" and settings.cohort.size is not None):
        return 4 * num_values
    return planned_difference_bytes(method, num_values)


def upload_bytes(settings: Settings, num_values: int) -> int:
    """Return the bytes of a device's update of so many coordinates, masked or not."""
    if settings.secure.aggregation != "off":
        terms = terms_of(settings.compression)
        num_sent = num_values if terms is None else terms.num_sent(num_values)
        return num_sent * settings.secure.ring_bits // 8
    return update_bytes(terms_of(settings.compression), num_values)
