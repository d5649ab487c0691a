"""An upload in pieces that fit the link: one that breaks every few seconds still gets through."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

from headwater.client.flower.node import Node
from headwater.client.node_features import NodeAnswer
from headwater.client.operations.activity import Activity
from headwater.client.operations.counters import Counters
from headwater.client.training.progress import TrainingProgress
from headwater.client.transport.upload import (
    LEAST_CHUNK_BYTES,
    StreamBroken,
    Upload,
    next_chunk_bytes,
)
from headwater.common.transport.limits import CHUNK_BYTES
from headwater.common.transport.wire_pb2 import ClientFrame, Receipt

VECTOR = bytes(3 << 20)


class Link:
    """A link with a rate, and a server behind it that keeps what came whole."""

    def __init__(self, bytes_per_second: float, *, breaks_after: float = float("inf")) -> None:
        self.now = 0.0
        self.num_kept = 0
        self.sizes: list[int] = []
        self._rate, self._breaks_after = bytes_per_second, breaks_after

    def clock(self) -> float:
        return self.now

    async def upload(self) -> bool:
        """Upload over one stream; return whether all has arrived."""
        upload, end = Upload(answer(), clock=self.clock), self.now + self._breaks_after

        async def write(frame: ClientFrame) -> None:
            if frame.WhichOneof("kind") == "reply":
                receipt = Receipt(message_id="m", next_offset=self.num_kept)
                upload.receipts.put_nowait(receipt)
                return
            size = len(frame.chunk.data)
            if self.now + size / self._rate > end:
                self.now = end
                raise StreamBroken("the link is gone")
            self.now += size / self._rate
            self.sizes.append(size)
            assert frame.chunk.offset == self.num_kept
            self.num_kept += size
            if self.num_kept == len(VECTOR):
                upload.receipts.put_nowait(Receipt(message_id="m", is_done=True))

        try:
            await upload.send(write, cast(Node, Sender()))
        except StreamBroken:
            return False
        return True


class Sender:
    """What an upload needs of a device's node."""

    def __init__(self) -> None:
        self.activity = Activity(Counters(), TrainingProgress())
        self.link: Any = self

    def sent(self, num_bytes: int, seconds: float) -> Sender:
        return self


def answer() -> NodeAnswer:
    return NodeAnswer(message_id="m", head_json="{}", vector=memoryview(VECTOR))


def streams(link: Link) -> Iterator[bool]:
    while True:
        yield asyncio.run(link.upload())


def test_an_upload_over_a_link_that_breaks_every_15_s_arrives() -> None:
    """At 50 KB/s no chunk of 1 MiB would ever arrive, and the server keeps whole chunks."""
    link = Link(50e3, breaks_after=15.0)
    at_streams = streams(link)
    kept = [0]
    while not next(at_streams):
        kept.append(link.num_kept)
        assert kept[-1] > kept[-2]
    assert link.num_kept == len(VECTOR)
    assert len(kept) < 8  # 3 MiB are 63 s of the link: more than half of what it carries is kept


def test_a_fast_link_soon_carries_the_largest_chunks() -> None:
    link = Link(100e6)
    assert asyncio.run(link.upload())
    assert link.sizes[4] == CHUNK_BYTES


def test_a_slow_link_gets_no_more_frames_than_one_a_second() -> None:
    link = Link(20e3)
    assert asyncio.run(link.upload())
    assert len(link.sizes) < link.now


def test_a_chunk_s_size_stays_within_its_bounds() -> None:
    assert next_chunk_bytes(CHUNK_BYTES, 0.0) == CHUNK_BYTES
    assert next_chunk_bytes(LEAST_CHUNK_BYTES, 100.0) == LEAST_CHUNK_BYTES
    assert next_chunk_bytes(CHUNK_BYTES, 5.0) == CHUNK_BYTES // 2
    assert next_chunk_bytes(CHUNK_BYTES, 2.0) == CHUNK_BYTES
