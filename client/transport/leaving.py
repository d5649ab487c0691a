"""Decides when a device leaves its stream, and finishes its work before it does.

A device leaves for good when it is asked to stop, and for a while when its owner's settings
(``client.device.owner_limits``) keep it away. It first ends the training after the current
micro-batch and sends that partial sum with its exact weight.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc.aio

from headwater.client.device.owner_limits import AwayPeriod, OwnerLimits
from headwater.client.flower.node import Node
from headwater.client.transport.exchange import Exchange
from headwater.common.errors import TaskBundleRefused
from headwater.common.transport.wire_pb2 import ClientFrame, Leave, ServerFrame

STOP_GRACE_SECONDS = 30.0
REFUSAL_SECONDS = 5.0
SESSION_POLL_SECONDS = 0.1
LIMITS_POLL_SECONDS = 1.0
# While away: the wall clock may be set, and a laptop that slept wakes up late.
MAX_WAIT_SECONDS = 30.0


class LeavePolicy:
    """One device's rules for leaving and for staying away."""

    def __init__(self, node: Node, exchange: Exchange, limits: OwnerLimits) -> None:
        self._node = node
        self._exchange = exchange
        self._limits = limits

    def reason_to_stay_away(self) -> AwayPeriod | None:
        """Return why a device between two rounds should not be connected; None if it may be."""
        return self._reason_to_leave(is_idle=True)

    def wait_seconds(self, away: AwayPeriod) -> float:
        """Return how long to wait before checking the limits again."""
        return min(self._limits.seconds_until(away.until), MAX_WAIT_SECONDS)

    async def wait_until_due(self) -> AwayPeriod:
        """Wait until the device must leave for a while, and return why."""
        while True:
            is_idle = self._exchange.is_idle and not self._node.is_waiting
            if (away := self._reason_to_leave(is_idle=is_idle)) is not None:
                return away
            self._exchange.became_idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exchange.became_idle.wait(), LIMITS_POLL_SECONDS)

    def reason_to_decline(self, frame: ServerFrame) -> AwayPeriod | None:
        """Return why the device may not take the transfer or round that a frame begins."""
        return self._limits.reason_to_decline(frame, self._node.update_bytes)

    async def finish_for_good(self) -> None:
        """Wait for the training to end, the update to arrive and its secure session to end.

        Each may take up to ``STOP_GRACE_SECONDS``.
        """
        await self._finish(STOP_GRACE_SECONDS)

    async def finish_until(self, away: AwayPeriod) -> Leave:
        """Interrupt the training and finish, at the latest when the away period begins."""
        self._node.interrupt()
        seconds = self._limits.seconds_until(away.since)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._finish(seconds)
        return leave_frame(away)

    async def _finish(self, grace_seconds: float) -> None:
        await self._exchange.finish(grace_seconds)
        end = time.monotonic() + grace_seconds
        while self._node.is_waiting and time.monotonic() < end:
            await asyncio.sleep(SESSION_POLL_SECONDS)
        await self._exchange.finish(grace_seconds)

    def _reason_to_leave(self, *, is_idle: bool) -> AwayPeriod | None:
        rate = self._node.link.upload_bytes_per_second
        return self._limits.reason_to_leave(rate, is_idle=is_idle)


async def say_refusal(call: Any, error: TaskBundleRefused) -> None:
    """Tell the server why this device refuses its task, and wait until the server has read it.

    An earlier server ends the stream without reading; that is no error.
    """
    leave = Leave(code=error.code, text=str(error))
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(REFUSAL_SECONDS):
            await call.write(ClientFrame(leave=leave).SerializeToString())
            while await call.read() is not grpc.aio.EOF:
                pass


def leave_frame(away: AwayPeriod) -> Leave:
    """Return the frame that tells the server why the device leaves for a while."""
    return Leave(code=away.error.code, text=away.error.message)
