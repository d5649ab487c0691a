"""A stream keeps no frame that it has taken."""

from __future__ import annotations

import gc

import pytest

from headwater.common.transport.wire_pb2 import ClientFrame
from tests.attacks.raw import RawDevice, serving

pytestmark = pytest.mark.slow  # sockets


def num_chunks_held() -> int:
    """Return how many chunks of uploads are objects of this process."""
    held = (one for one in gc.get_objects() if type(one) is ClientFrame)
    return sum(one.WhichOneof("kind") == "chunk" for one in held)


async def test_an_uploads_last_chunk_is_freed_while_its_device_says_nothing_more() -> None:
    gc.collect()  # what other tests left
    before = num_chunks_held()
    async with serving(rounds=2) as run, RawDevice(run.port, "device") as device:
        await device.enter()
        run.begin()
        await device.describe()
        await device.update(await device.plan())
        await device.plan()  # of the second round: the first one's update has been taken
        assert num_chunks_held() == before
