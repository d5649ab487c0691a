"""Token buckets that limit connections per address, and frames and bytes per stream."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

from headwater.common.transport.limits import CHUNK_BYTES, MAX_REPLY_HEAD_BYTES

# Per address (per /64 for IPv6). One join makes two connections.
BURST, PER_SECOND, MAX_ADDRESSES = 20.0, 0.5, 4096

# Per stream. An honest device sends a handful of frames per instruction in addition to its update's
# chunks, and may be in the middle of an update when it learns that the update was refused.
FRAMES, FRAMES_PER_INSTRUCTION, FRAMES_PER_SECOND = 1000.0, 32.0, 1.0
# Bytes that no instruction asks for: faults, renewals, and a reply that crosses its cancellation.
UNASKED_BYTES, UNASKED_BYTES_PER_SECOND = 4.0 * CHUNK_BYTES, 65_536.0
# A reply without an instruction costs as much as this many frames: an honest device sends few.
UNASKED_REPLY_FRAMES = 50


class RateLimit:
    """Limits the connections, or refusals, of each address."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def has_capacity(self, address: str, now: float) -> bool:
        """Return whether ``take`` would succeed."""
        tokens, before = self._buckets.get(address, (BURST, now))
        return tokens + (now - before) * PER_SECOND >= 1

    def take(self, address: str, now: float) -> bool:
        """Take a token if there is one; the address that was idle longest is forgotten first."""
        tokens, before = self._buckets.pop(address, (BURST, now))
        tokens = min(tokens + (now - before) * PER_SECOND, BURST)
        is_allowed = tokens >= 1
        self._buckets[address] = (tokens - 1 if is_allowed else tokens, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return is_allowed


@dataclass(kw_only=True, slots=True)
class FrameLimit:
    """Limits the frames of one stream, and their bytes.

    A tiny frame costs the server as much as a large one; large ones that nothing asks for would
    occupy its memory and the time of its event loop.
    """

    tokens: float = FRAMES
    num_bytes: float = UNASKED_BYTES
    at: float = 0.0

    def grant_reply(self, reply_bytes: int) -> None:
        """Grant twice the frames and bytes that a reply of ``reply_bytes`` needs."""
        grant = FRAMES_PER_INSTRUCTION + 2 * -(-reply_bytes // CHUNK_BYTES)
        self.tokens = min(self.tokens + grant, FRAMES + grant)
        asked = 2.0 * (reply_bytes + MAX_REPLY_HEAD_BYTES)
        self.num_bytes = min(self.num_bytes + asked, UNASKED_BYTES + asked)

    def take(self, now: float, *, num_bytes: int = 0, num_frames: int = 1) -> bool:
        """Take the tokens of a frame if there are enough."""
        seconds, self.at = now - self.at, now
        if self.tokens < FRAMES:
            self.tokens = min(self.tokens + seconds * FRAMES_PER_SECOND, FRAMES)
        if self.num_bytes < UNASKED_BYTES:
            refill = seconds * UNASKED_BYTES_PER_SECOND
            self.num_bytes = min(self.num_bytes + refill, UNASKED_BYTES)
        is_allowed = self.tokens >= num_frames and self.num_bytes >= num_bytes
        if is_allowed:
            self.tokens -= num_frames
            self.num_bytes -= num_bytes
        return is_allowed


def subscriber(address: str) -> str:
    """Return one subscriber's address range: an IPv4 address, or the /64 of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address
