"""One message of a run at a time on a SuperNode, which starts a process for each, side by side.

Each process reads what the device remembers, decides by it, and writes it at its end. Of two that
overlapped, the second would decide by what was there before the first: so a server that lies could
have a device answer two survivor sets. With the lock the second reads what the first has written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.client.flower.request import DeviceRequest
from headwater.common.errors import DeviceBusy, StateError
from headwater.common.system.atomic_file import NO_FOLLOW, OWNER_ONLY, make_private_folder
from headwater.common.system.file_lock import try_lock

PATIENCE_SECONDS = 30.0
LOOK_SECONDS = 0.02


@contextmanager
def one_message(request: DeviceRequest) -> Iterator[None]:
    """Wait until no other process answers a message of the run for this device, and keep it so.

    Raises:
        DeviceBusy: another process answers one, as where training goes on behind a deadline.
        StateError: the lock's file cannot be opened.
    """
    path = request.state_folder / f"{request.identity.name}-{request.context.run_id}.lock"
    try:
        make_private_folder(path.parent)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, OWNER_ONLY)
    except OSError as error:
        raise StateError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        end = time.monotonic() + PATIENCE_SECONDS
        while not try_lock(lock):
            if time.monotonic() >= end:
                raise DeviceBusy(f"{request.identity.name} answers another message of this run")
            time.sleep(LOOK_SECONDS)
        yield
    finally:
        os.close(lock)
