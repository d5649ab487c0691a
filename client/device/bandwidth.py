"""The device's link as measured: bytes per second of received models and of sent updates.

A download is timed from the announcement of the model to its last chunk; an upload from the
server's permission to send to the last byte that it acknowledges, so the wait for permission is
excluded. The estimate is a moving average of the seconds per byte: these can be averaged, rates
cannot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

# Smaller transfers fit in buffers on the way, and their duration says nothing about the link.
TIMED_BYTES = 64 << 10

# The clock may not have advanced; no link is faster than this.
MIN_SECONDS_PER_BYTE = 1e-12

# The weight of the latest transfer in the average.
LATEST = 0.5

UPLOAD, DOWNLOAD = "upload-bytes-per-second", "download-bytes-per-second"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Bytes per second in each direction; None until a transfer was timed."""

    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None

    def sent(self, num_bytes: int, seconds: float) -> Bandwidth:
        """Return the bandwidth after an upload."""
        rate = _averaged(self.upload_bytes_per_second, num_bytes, seconds)
        return replace(self, upload_bytes_per_second=rate)

    def received(self, num_bytes: int, seconds: float) -> Bandwidth:
        """Return the bandwidth after a download."""
        rate = _averaged(self.download_bytes_per_second, num_bytes, seconds)
        return replace(self, download_bytes_per_second=rate)

    def as_config(self) -> dict[str, float]:
        """Return the known rates for a node's configuration."""
        rates = {UPLOAD: self.upload_bytes_per_second, DOWNLOAD: self.download_bytes_per_second}
        return {name: rate for name, rate in rates.items() if rate is not None}


def read_bandwidth(node_config: Mapping[str, object]) -> Bandwidth:
    """Read the bandwidth from a node's configuration; a missing or invalid rate is None."""
    rates = (node_config.get(name) for name in (UPLOAD, DOWNLOAD))
    up, down = (
        rate if isinstance(rate, float) and 0 < rate <= 1 / MIN_SECONDS_PER_BYTE else None
        for rate in rates
    )
    return Bandwidth(upload_bytes_per_second=up, download_bytes_per_second=down)


def _averaged(rate: float | None, num_bytes: int, seconds: float) -> float | None:
    if num_bytes < TIMED_BYTES or not 0 <= seconds < math.inf:
        return rate
    each = max(seconds / num_bytes, MIN_SECONDS_PER_BYTE)
    if rate is not None:
        each = LATEST * each + (1 - LATEST) / rate
    return 1 / each
