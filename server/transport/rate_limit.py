"""How often strangers may knock, and how much a device may say: token buckets."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

from headwater.common.transport.limits import CHUNK_BYTES

# Of one address (of IPv6 its /64): a join makes two connections.
BURST, PER_SECOND, MAX_ADDRESSES = 20.0, 0.5, 4096

# Of one stream. An honest device sends a handful of frames for each ask beside its update's chunks,
# and may be in the midst of an update when it hears that it was refused.
FRAMES, FRAMES_PER_ASK, FRAMES_PER_SECOND = 1000.0, 32.0, 1.0


class RateLimit:
    """How many connections, or refusals, each address may still have."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def is_left(self, address: str, now: float) -> bool:
        """Tell whether ``take`` would find one."""
        left, before = self._left.get(address, (BURST, now))
        return left + (now - before) * PER_SECOND >= 1

    def take(self, address: str, now: float) -> bool:
        """Take one if there is one; addresses that were quiet for longest are forgotten first."""
        left, before = self._left.pop(address, (BURST, now))
        left = min(left + (now - before) * PER_SECOND, BURST)
        may = left >= 1
        self._left[address] = (left - 1 if may else left, now)
        if len(self._left) > MAX_ADDRESSES:
            self._left.popitem(last=False)
        return may


@dataclass(kw_only=True, slots=True)
class FrameLimit:
    """How many frames a stream may still send: tiny ones cost the server as much as large ones."""

    left: float = FRAMES
    at: float = 0.0

    def asked(self, reply_bytes: int) -> None:
        """Grant what a reply of so many bytes may take, twice."""
        grant = FRAMES_PER_ASK + 2 * -(-reply_bytes // CHUNK_BYTES)
        self.left = min(self.left + grant, FRAMES + grant)

    def take(self, now: float) -> bool:
        """Take one if there is one."""
        if self.left < FRAMES:
            self.left = min(self.left + (now - self.at) * FRAMES_PER_SECOND, FRAMES)
        self.at = now
        may = self.left >= 1
        self.left -= may
        return may


def subscriber(address: str) -> str:
    """Return what one subscriber has: an IPv4 address, or the first 64 bits of an IPv6 one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address
