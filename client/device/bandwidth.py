"""The device's link as it was seen: bytes per second of models that came and updates that went.

A download is timed from the announcement of the model to its last chunk, an upload from the turn
that the server grants to the last byte that it acknowledges, so the wait for the turn is not in it.
What is believed is a moving average of the seconds per byte: those add up, rates do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Less than this fits in buffers on the way, and its seconds say nothing of the link.
TIMED_BYTES = 64 << 10

# A clock may not have moved; no link is faster than this.
MIN_SECONDS_PER_BYTE = 1e-12

# How much the last transfer counts.
LATEST = 0.5

UPLOAD, DOWNLOAD = "upload-bytes-per-second", "download-bytes-per-second"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Bytes per second each way; None before anything that can be timed has passed."""

    upload_bytes_per_second: float | None = None
    download_bytes_per_second: float | None = None

    def sent(self, num_bytes: int, seconds: float) -> Bandwidth:
        """Return the link as seen after an upload."""
        rate = _seen(self.upload_bytes_per_second, num_bytes, seconds)
        return Bandwidth(
            upload_bytes_per_second=rate, download_bytes_per_second=self.download_bytes_per_second
        )

    def received(self, num_bytes: int, seconds: float) -> Bandwidth:
        """Return the link as seen after a download."""
        rate = _seen(self.download_bytes_per_second, num_bytes, seconds)
        return Bandwidth(
            upload_bytes_per_second=self.upload_bytes_per_second, download_bytes_per_second=rate
        )

    def as_config(self) -> dict[str, float]:
        """Return what is known, for a node's configuration."""
        rates = {UPLOAD: self.upload_bytes_per_second, DOWNLOAD: self.download_bytes_per_second}
        return {name: rate for name, rate in rates.items() if rate is not None}


def read_bandwidth(node_config: Mapping[str, object]) -> Bandwidth:
    """Read a link from a node's configuration; where there is none, or no rate, it is unknown."""
    rates = (node_config.get(name) for name in (UPLOAD, DOWNLOAD))
    up, down = (
        rate if isinstance(rate, float) and 0 < rate <= 1 / MIN_SECONDS_PER_BYTE else None
        for rate in rates
    )
    return Bandwidth(upload_bytes_per_second=up, download_bytes_per_second=down)


def _seen(believed: float | None, num_bytes: int, seconds: float) -> float | None:
    if num_bytes < TIMED_BYTES or not 0 <= seconds < math.inf:
        return believed
    each = max(seconds / num_bytes, MIN_SECONDS_PER_BYTE)
    if believed is not None:
        each = LATEST * each + (1 - LATEST) / believed
    return 1 / each
