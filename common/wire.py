"""Versions, sizes and bounds of the stream; the frames themselves are in ``wire.proto``.

A vector of n bytes travels in chunks of 1 MiB, so the frames around it add less than 0.1 %.
"""

from __future__ import annotations

PROTOCOL_VERSION = 1
METHOD = "/headwater.Stream/Connect"
CHUNK_BYTES = 1 << 20
MAX_FRAME_BYTES = CHUNK_BYTES + (1 << 16)
MAX_HEAD_BYTES = 1 << 20
MAX_REPLY_HEAD_BYTES = 1 << 20

# protobuf's tags and lengths and gRPC's five bytes, for a chunk with its 36-character id.
CHUNK_OVERHEAD_BYTES = 64


def framed_bytes(head_bytes: int, vector_bytes: int) -> int:
    """Return about how many bytes a head and a vector take on the wire."""
    num_chunks = -(-vector_bytes // CHUNK_BYTES)
    return head_bytes + vector_bytes + CHUNK_OVERHEAD_BYTES * (num_chunks + 1)
