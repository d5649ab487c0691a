"""The devices' part of a deadline leaves time for the sum's way to the server above."""

from __future__ import annotations

import pytest

from headwater.aggregator.branch import (
    LEAST_SHARE,
    MOST_SHARE,
    UNKNOWN_SHARE,
    UPLOAD_FACTOR,
    devices_share,
)


@pytest.mark.parametrize(
    ("num_bytes", "rate", "share"),
    [
        (8_000_000, None, UNKNOWN_SHARE),
        (8_000_000, 1e6, 1 - UPLOAD_FACTOR * 8 / 100),
        (8_000, 1e9, MOST_SHARE),
        (8_000_000_000, 1e6, LEAST_SHARE),  # it cannot arrive: half of the time is the devices'
    ],
)
def test_the_upload_s_time_is_left_of_the_deadline(
    num_bytes: int, rate: float | None, share: float
) -> None:
    found = devices_share(100.0, upload_bytes=num_bytes, bytes_per_second=rate)
    assert found == pytest.approx(share)
