"""The bytes that a round moves for a device, from a run's settings; they do not depend on data."""

from __future__ import annotations

from headwater.common.compression.model_difference import difference_bytes
from headwater.common.compression_terms import update_bytes
from headwater.common.settings.schema import Settings


def download_bytes(settings: Settings, num_values: int) -> int:
    """Return the bytes of the model for a device that was in the round before.

    If only some devices are in a round, most hold an older version and are sent the whole model.
    """
    method = settings.compression.down
    if method == "off" or settings.cohort.size is not None:
        return 4 * num_values
    return difference_bytes(method, num_values)


def upload_bytes(settings: Settings, num_values: int) -> int:
    """Return the bytes of a device's update of so many coordinates, masked or not."""
    if settings.secure.aggregation != "off":
        return num_values * settings.secure.ring_bits // 8
    return update_bytes(settings.compression.terms, num_values)
