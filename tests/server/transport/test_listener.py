"""The health service and the pause notice on the devices' port."""

from __future__ import annotations

import asyncio
import sys

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from headwater.common.transport.wire_pb2 import Notice
from tests.attacks.raw import RawDevice, serving
from tests.commands import python

pytestmark = pytest.mark.slow  # sockets

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING


async def check_health(port: int, service: str = "", method: str = "Check") -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            f"/grpc.health.v1.Health/{method}",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        answer = await call(HealthCheckRequest(service=service))
        return int(answer.status)


async def test_the_server_is_healthy_until_it_drains() -> None:
    async with serving() as run:
        assert await check_health(run.port) == SERVING
        assert await check_health(run.port, "headwater.Stream") == SERVING
        run.servicer.drain()
        assert await check_health(run.port) == NOT_SERVING


@pytest.mark.parametrize(
    ("service", "method", "code"),
    [
        ("another.Service", "Check", grpc.StatusCode.NOT_FOUND),
        ("", "Watch", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
async def test_an_unsupported_health_request_is_refused(
    service: str, method: str, code: grpc.StatusCode
) -> None:
    async with serving() as run:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check_health(run.port, service, method)
        assert caught.value.code() is code


async def test_connected_and_new_devices_are_notified_of_a_pause() -> None:
    async with serving() as run, RawDevice(run.port, "first") as first:
        await first.enter()
        run.servicer.pause(True)
        assert (await first.next()).notice == Notice(is_paused=True)
        run.servicer.pause(True)  # nothing new
        async with RawDevice(run.port, "second") as second:
            await second.enter()
            assert (await second.next()).notice == Notice(is_paused=True)
        run.servicer.pause(False)
        assert (await first.next()).notice == Notice(is_paused=False)


async def test_a_record_counts_a_devices_bytes_and_its_disconnection() -> None:
    async with serving() as run:
        async with RawDevice(run.port, "device") as device:
            await device.enter()
            (record,) = run.servicer.device_records.devices()
            assert record.is_connected
            run.servicer.pause(True)
            frame = await device.next()
            assert record.bytes_down >= frame.ByteSize()
        while record.is_connected:
            await asyncio.sleep(0.01)
        assert record.last_seen is not None


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of open files")
def test_more_devices_than_open_files_are_refused_with_the_limit_s_remedy() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))\n"
        "from headwater.server.transport.listener import check_descriptors\n"
        "check_descriptors(44)\n"
        "check_descriptors(45)\n"
    )
    found = python("-c", code, status=1)
    assert "SettingsError: 45 devices take a connection each" in found.stderr
    assert "leaves 44" in found.stderr
