"""The bytes that a round moves for a device, from a run's settings; they do not depend on data."""

from __future__ import annotations

from headwater.common.compression_terms import update_bytes
from headwater.common.settings.schema import Settings


def upload_bytes(settings: Settings, num_values: int) -> int:
    """Return the bytes of a device's update of so many coordinates, masked or not."""
    if settings.secure.aggregation != "off":
        return num_values * settings.secure.ring_bits // 8
    return update_bytes(settings.compression.terms, num_values)
