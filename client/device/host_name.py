"""The name of this machine, as a device's name must be."""

from __future__ import annotations

import re
import socket

from headwater.common.transport.limits import MAX_NAME


def host_name() -> str:
    """Return the host's name, with dashes for characters that a device's name must not have."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return name.lstrip("._-")[:MAX_NAME] or "device"
