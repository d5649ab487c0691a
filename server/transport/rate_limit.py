"""Token buckets that limit connections per address and frames per stream."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

from headwater.common.transport.limits import CHUNK_BYTES

# Per address (per /64 for IPv6). One join makes two connections.
BURST, PER_SECOND, MAX_ADDRESSES = 20.0, 0.5, 4096

# Per stream. An honest device sends a handful of frames per instruction in addition to its update's
# chunks, and may be in the middle of an update when it learns that the update was refused.
FRAMES, FRAMES_PER_INSTRUCTION, FRAMES_PER_SECOND = 1000.0, 32.0, 1.0


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
    """Limits the frames of one stream: a tiny frame costs the server as much as a large one."""

    tokens: float = FRAMES
    at: float = 0.0

    def grant_reply(self, reply_bytes: int) -> None:
        """Grant twice the frames that a reply of ``reply_bytes`` needs."""
        grant = FRAMES_PER_INSTRUCTION + 2 * -(-reply_bytes // CHUNK_BYTES)
        self.tokens = min(self.tokens + grant, FRAMES + grant)

    def take(self, now: float) -> bool:
        """Take a token if there is one."""
        if self.tokens < FRAMES:
            self.tokens = min(self.tokens + (now - self.at) * FRAMES_PER_SECOND, FRAMES)
        self.at = now
        is_allowed = self.tokens >= 1
        self.tokens -= is_allowed
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
