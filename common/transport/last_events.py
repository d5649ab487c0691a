"""Waits for the last events of an event loop's gRPC calls before the loop is closed.

grpc.aio has one queue of events for all loops of a process: an event of a closed loop may be taken
from it by another thread's loop, which then logs an error and leaves the queue as it is.
"""

from __future__ import annotations

import asyncio

WAIT_SECONDS = 1.0


async def last_events() -> None:
    """Wait until the other tasks of this loop, which are to have been ended, have ended.

    A call that is cancelled has a task that ends with the call's last event. What takes longer
    than ``WAIT_SECONDS`` is left to the loop's end.
    """
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    if rest:
        await asyncio.wait(rest, timeout=WAIT_SECONDS)
