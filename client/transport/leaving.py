"""How a device leaves its stream in good order: what was summed is sent first, exactly weighted.

It leaves for good when it is asked to stop, and for a while when its owner's settings keep it away
(``headwater.client.device.hardware.availability``).
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from headwater.client.device.availability import Availability, AwayPeriod
from headwater.client.flower.node import Node
from headwater.client.transport.exchange import Exchange
from headwater.common.transport.wire_pb2 import Leave, ServerFrame

STOP_GRACE_SECONDS = 30.0
SESSION_POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
# While away: the wall clock may be set, and a laptop that slept wakes up late.
LONGEST_WAIT_SECONDS = 30.0


class LeavePolicy:
    """When a device is to leave, and what is to be done before."""

    def __init__(self, node: Node, work: Exchange, absence: Availability) -> None:
        self._node = node
        self._work = work
        self._absence = absence

    def keeps_away(self) -> AwayPeriod | None:
        """Return why a device that is not connected should not be; None if it may connect."""
        lead = self._absence.lead_seconds(self._node.link.upload_bytes_per_second)
        by_hours = self._absence.by_hours(lead=lead)
        return by_hours or self._absence.by_bytes(self._absence.round_bytes)

    def wait_seconds(self, away: AwayPeriod) -> float:
        """Return how long to wait before the clock is looked at again."""
        left = self._absence.seconds_until(away.until)
        return min(left, LONGEST_WAIT_SECONDS)

    async def due(self) -> AwayPeriod:
        """Wait until the device is to leave for a while, and return why.

        In the middle of a round that is when its hours are about to end, or no byte of the day is
        left; between two also when the bytes do not suffice for another.
        """
        while True:
            if self._work.is_idle and not self._node.awaits_session:
                away = self.keeps_away()
            else:
                lead = self._absence.lead_seconds(self._node.link.upload_bytes_per_second)
                away = self._absence.by_hours(lead=lead) or self._absence.by_bytes(1)
            if away is not None:
                return away
            self._work.went_idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.went_idle.wait(), LOOK_SECONDS)

    def declines(self, frame: ServerFrame) -> AwayPeriod | None:
        """Return why what a frame begins is not to be begun: the day's bytes do not suffice."""
        match frame.WhichOneof("kind"):
            case "image":
                return self._absence.by_bytes(self._absence.round_bytes)
            case "instruction" if frame.small_image:
                return self._absence.by_bytes(self._absence.round_bytes)
            case "instruction" if frame.instruction.message_type == "train":
                return self._absence.by_bytes(self._absence.update_bytes)
            case _:
                return None

    async def finish_for_good(self) -> None:
        """Wait for the work to end and its update to arrive, for as long as each may take.

        One that is to be masked arrives in a secure session, which is waited for as long.
        """
        await self._finish(STOP_GRACE_SECONDS)

    async def finish_until(self, away: AwayPeriod) -> Leave:
        """Stop summing, and wait likewise, but no longer than to the moment at which it is away."""
        self._node.interrupt()
        seconds = self._absence.seconds_until(away.since)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._finish(seconds)
        return leave_frame(away)

    async def _finish(self, grace_seconds: float) -> None:
        await self._work.finish(grace_seconds)
        end = time.monotonic() + grace_seconds
        while self._node.awaits_session and time.monotonic() < end:
            await asyncio.sleep(SESSION_POLL_SECONDS)
        await self._work.finish(grace_seconds)


def leave_frame(away: AwayPeriod) -> Leave:
    """Return the frame by which the server hears why a device leaves for a while."""
    return Leave(code=away.error.code, text=away.error.message)
