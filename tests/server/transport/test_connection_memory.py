"""The memory that a connection leaves in the server once its device has sent an update."""

import pytest

from benchmarks.server_memory import Case, peaks

pytestmark = pytest.mark.slow  # a server's process, and one with its devices

FORTY_DEVICES = Case(1_000_000, 40, "sgd")
# With gRPC's own defaults the server takes 102 to 108 MB beyond its start. With bounded reads it
# takes 49 to 51: three models of 4 MB, 8 MiB of staged uploads, and what a first round loads.
LIMIT_BYTES = 75_000_000


def test_forty_devices_leave_no_read_buffers_of_their_uploads_in_the_server() -> None:
    found = peaks(FORTY_DEVICES, staging_bytes=8 << 20)
    assert found["anonymous"] - found["anonymous_at_start"] < LIMIT_BYTES
