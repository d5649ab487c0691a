"""Versions, sizes and bounds of the stream; the frames themselves are in ``wire.proto``.

A vector of n bytes travels in chunks of 1 MiB, so the frames around it add less than 0.1 %.
"""

from __future__ import annotations

PROTOCOL_VERSION = 1
METHOD = "/headwater.Stream/Connect"
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"

CHUNK_BYTES = 1 << 20
# A model below this comes in its plan's own frame: a frame costs a server more than its bytes do.
SMALL_IMAGE_BYTES = 64 << 10
RECEIPT_EVERY_BYTES = 8 << 20
MAX_REPLY_HEAD_BYTES = 1 << 20
# The longest frame is a chunk, or a reply's head.
MAX_FRAME_BYTES = max(CHUNK_BYTES, MAX_REPLY_HEAD_BYTES) + (1 << 16)

# gRPC's own, before each frame.
FRAME_BYTES = 5

HELLO_SECONDS = 10.0

# Both sides ask the other for a sign of life: a laptop that was shut is noticed in a minute.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Nothing compressed: a frame of a megabyte could be a gigabyte of zeros.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
)

# A device's channel: each makes a connection of its own, where gRPC would give it that of another,
# on which a server that has fallen meanwhile answers nothing.
CHANNEL = (*KEEPALIVE, ("grpc.use_local_subchannel_pool", 1))

# protobuf's tags and lengths and gRPC's five bytes, for a chunk with its 36-character id.
CHUNK_OVERHEAD_BYTES = 64


def framed_bytes(head_bytes: int, vector_bytes: int) -> int:
    """Return about how many bytes a head and a vector take on the wire."""
    num_chunks = -(-vector_bytes // CHUNK_BYTES)
    return head_bytes + vector_bytes + CHUNK_OVERHEAD_BYTES * (num_chunks + 1)
