"""Version, sizes, bounds and gRPC options of the stream; ``wire.proto`` defines the frames.

A vector of n bytes travels in chunks of 1 MiB, so its framing adds less than 0.1 %.
"""

from __future__ import annotations

import re

PROTOCOL_VERSION = 4
STREAM_METHOD = "/headwater.Stream/Connect"
MAX_NAME = 128  # characters of a device's name
NAME_PATTERN = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}"

CHUNK_BYTES = 1 << 20
# A smaller model is sent in its plan's frame: a frame costs the server more than its bytes do.
SMALL_IMAGE_BYTES = 64 << 10
RECEIPT_EVERY_BYTES = 8 << 20
MAX_REPLY_HEAD_BYTES = 1 << 20
MAX_MESSAGE_ID = 128  # characters; the server's own ids have 36
# The longest frame is a chunk, or a reply's head.
MAX_FRAME_BYTES = max(CHUNK_BYTES, MAX_REPLY_HEAD_BYTES) + (1 << 16)

# gRPC's own prefix of each frame.
FRAME_BYTES = 5

HELLO_SECONDS = 10.0

# Each side pings the other after 30 s of silence and waits 30 s for the answer. So a closed laptop,
# which says nothing more, is detected after 30 to 60 s; a process that ends is detected at once.
# gRPC also pings to measure the link while data flow, and sends no other ping until that one is
# answered or ping_timeout_ms have passed. Its default of 60 s made that 90 s.
GRPC_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # No compression: a compressed frame of a megabyte could expand to a gigabyte of zeros.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
)

# A device's channel uses its own connection. By default gRPC shares connections between channels,
# and a shared one to a server that has died in the meantime gets no answer.
CHANNEL_OPTIONS = (*GRPC_OPTIONS, ("grpc.use_local_subchannel_pool", 1))

# A device that could go on with a standby looks sooner whether its server still answers: after 8 s
# of silence, for 7 s. gRPC also pings to measure the link, and sends no other ping until that one
# is answered.
STANDBY_OPTIONS = {
    "grpc.keepalive_time_ms": 8_000,
    "grpc.keepalive_timeout_ms": 7_000,
    "grpc.http2.ping_timeout_ms": 7_000,
}


def is_version(text: str) -> bool:
    """Return whether the other side's word for its version of headwater is one."""
    return re.fullmatch(r"\d+(\.\d+){1,3}[a-z0-9.+-]{0,40}", text) is not None


def named_version(text: str) -> str:
    """Return the other side's version in brackets; empty if it tells none."""
    return f" (headwater {text})" if is_version(text) else ""


def same_version(text: str) -> str:
    """Return what makes a device's version that of the server."""
    if not is_version(text):
        return "install the server's version of headwater on the device"
    return (
        f"install headwater {text} on the device: its wheel, or `sh deploy/install-client.sh "
        "--upgrade` in its checkout"
    )


def channel_options(*, has_standby: bool) -> list[tuple[str, int]]:
    """Return the options of a device's channel; a stopped server is found out within 15 or 60 s."""
    return [*(dict(CHANNEL_OPTIONS) | (STANDBY_OPTIONS if has_standby else {})).items()]


# protobuf's tags and lengths and gRPC's five bytes, for a chunk with a 36-character id.
CHUNK_OVERHEAD_BYTES = 64


def wire_bytes(head_bytes: int, vector_bytes: int) -> int:
    """Return the approximate bytes of a head and a vector on the wire."""
    num_chunks = -(-vector_bytes // CHUNK_BYTES)
    return head_bytes + vector_bytes + CHUNK_OVERHEAD_BYTES * (num_chunks + 1)
