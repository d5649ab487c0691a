"""A device's first task, where its owner names none and trusts a signer: it asks the server."""

from __future__ import annotations

import asyncio
import logging

import grpc.aio

from headwater import __version__
from headwater.client.device.host_name import host_name
from headwater.client.operations.installed_tasks import NO_BUNDLE, task_in
from headwater.client.transport.lasting_connection import channel_to
from headwater.client.transport.leaving import say_refusal
from headwater.client.transport.retry_policy import ConnectionBroken, RetryPolicy
from headwater.common.errors import (
    ProtocolMismatch,
    TaskBundleRefused,
    TaskNotInstalled,
    error_of,
)
from headwater.common.settings.schema import Settings
from headwater.common.system.command_line import check_addresses
from headwater.common.transport.last_events import last_events
from headwater.common.transport.limits import HELLO_SECONDS, PROTOCOL_VERSION, STREAM_METHOD
from headwater.common.transport.tls import Credentials, split_addresses
from headwater.common.transport.wire_pb2 import ClientFrame, Hello, ServerFrame

log = logging.getLogger(__name__)


def first_task(settings: Settings) -> tuple[str, str]:
    """Return title and place of the signed task that the server hands out, once it is kept.

    Waits until a server is there.

    Raises:
        TaskBundleRefused, StateError: see ``task_in``; the server learns of a refusal.
        TaskNotInstalled: the server has a task that is no bundle.
        ConnectionLost: no server was there for the device's patience.
        HeadwaterError: the server refuses the device.
    """
    addresses = split_addresses(settings.client.server)
    credentials = check_addresses(settings, *addresses, metrics=None)
    return asyncio.run(_asked(settings, list(addresses), credentials))


async def _asked(
    settings: Settings, addresses: list[str], credentials: Credentials | None
) -> tuple[str, str]:
    device = settings.client
    patience = float("inf") if device.stay else device.patience_seconds
    retries = RetryPolicy(addresses, patience, has_tls=credentials is not None)
    try:
        while True:
            for address in addresses:
                try:
                    return await _ask(settings, address, credentials)
                except (grpc.aio.AioRpcError, TimeoutError) as error:
                    text = error.details() if isinstance(error, grpc.aio.AioRpcError) else ""
                    broken = ConnectionBroken(str(text or "no answer"), had_contact=False)
                seconds = retries.wait_seconds(broken)
                if retries.is_news(broken, str(broken)):
                    log.warning("%s: %s; trying again", address, broken)
                await asyncio.sleep(seconds)
    finally:
        await last_events()


async def _ask(
    settings: Settings, address: str, credentials: Credentials | None
) -> tuple[str, str]:
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        name=settings.client.name or host_name(),
        bundle=NO_BUNDLE,
        version=__version__,
    )
    async with channel_to(address, credentials, has_standby=False) as channel:
        call = channel.stream_stream(STREAM_METHOD)()
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await call.write(ClientFrame(hello=hello).SerializeToString())
                data = await call.read()
            if data is grpc.aio.EOF:
                raise TimeoutError
            frame = ServerFrame.FromString(data)
            if frame.WhichOneof("kind") == "other_task" and frame.other_task.bundle:
                return task_in(frame.other_task.bundle, settings)
        except TaskBundleRefused as error:
            await say_refusal(call, error)
            raise
        finally:
            call.cancel()
    if frame.WhichOneof("kind") == "fault" and frame.fault.code != "ModelMismatch":
        fault = frame.fault
        raise error_of(fault.code, fault.text, remedy=fault.remedy)
    if frame.WhichOneof("kind") in ("fault", "welcome"):
        raise TaskNotInstalled(
            f"the run of {address} has a task that was not published",
            remedy="start the server with the file that `headwater-server publish` writes, or this "
            "device with a --task of its own",
        )
    raise ProtocolMismatch("the server did not answer hello with a task")
