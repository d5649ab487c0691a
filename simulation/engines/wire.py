"""A message's content as it would arrive: through the wire's frames, encoded and decoded."""

from __future__ import annotations

import hashlib

from flwr.app import RecordDict

from headwater.common.errors import CorruptUpdate
from headwater.common.flower import records
from headwater.common.transport.limits import CHUNK_BYTES
from headwater.common.transport.wire_pb2 import Chunk, Reply

ID = "simulated"


def through_wire(content: RecordDict) -> RecordDict:
    """Return what the other end would read of a message of ours; another app's stays as it is.

    Head and vector are those of a ``Reply`` and its chunks; a plan travels in frames of the same
    make.

    Raises:
        CorruptUpdate: what came out is not what went in.
    """
    if records.HEAD not in content:
        return content
    found = records.vector(content)
    vector = memoryview(found or b"").cast("B")
    frame = Reply(
        message_id=ID,
        head_json=records.head_json(content),
        num_bytes=len(vector),
        sha256=hashlib.sha256(vector).digest(),
    )
    told = Reply.FromString(frame.SerializeToString())
    if found is None:
        return records.content_with_head(told.head_json, None)
    arrived = bytearray(told.num_bytes)
    for offset in range(0, len(vector), CHUNK_BYTES):
        data = bytes(vector[offset : offset + CHUNK_BYTES])
        sent = Chunk(transfer_id=ID, offset=offset, data=data).SerializeToString()
        chunk = Chunk.FromString(sent)
        arrived[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
    if hashlib.sha256(arrived).digest() != told.sha256:
        raise CorruptUpdate("a vector changed on its way through the wire's frames")
    dtype = records.dtype_of(content)
    return records.content_with_head(
        told.head_json, records.flat_array(memoryview(arrived), dtype=dtype)
    )
