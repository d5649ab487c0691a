"""How often strangers may knock: a token bucket for each address."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

# Of one address (of IPv6 its /64): a join makes two connections.
BURST, PER_SECOND, MAX_ADDRESSES = 20.0, 0.5, 4096


class Ration:
    """How many connections each address may still make."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str, now: float) -> bool:
        """Take one if there is one; addresses that were quiet for longest are forgotten first."""
        left, before = self._left.pop(address, (BURST, now))
        left = min(left + (now - before) * PER_SECOND, BURST)
        may = left >= 1
        self._left[address] = (left - 1 if may else left, now)
        if len(self._left) > MAX_ADDRESSES:
            self._left.popitem(last=False)
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
