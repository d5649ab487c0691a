"""Unwanted peers at the devices' port: each is refused, counted, and costs next to nothing.

``test_device_sends.py`` tests the updates of admitted devices, and
``tests/integration/test_enrolment_strangers.py`` unwanted peers at the enrolment port.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest

from headwater.common.transport.limits import PROTOCOL_VERSION, STREAM_METHOD
from headwater.common.transport.tls import Credentials
from headwater.common.transport.wire_pb2 import Chunk, ClientFrame, Leave
from headwater.server.enrolment.registry_verifier import RegistryVerifier
from headwater.server.flower import registration
from headwater.server.transport import listener as port_module
from headwater.server.transport.listener import UnidentifiedConnections
from headwater.server.transport.rate_limit import BURST, FRAMES
from tests.attacks.raw import LIMITLESS, WAIT_SECONDS, RawDevice, Run, cohort, serving
from tests.attacks.socket_bytes import is_served, record, send_bytes
from tests.certificates import credentials_of, make_folder, put_signed, revoke, tls_of

TLS_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(32)
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")
HALF_A_HEADERS_FRAME = bytes.fromhex("0000400104") + b"\x00"


async def until(claim: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not claim():
            await asyncio.sleep(0.02)


# At the door: TCP, TLS and HTTP/2.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the port's limits of ten and sixty seconds to one second."""
    monkeypatch.setattr(port_module, "HANDSHAKE_SECONDS", 1)
    monkeypatch.setattr(port_module, "IDLE_SECONDS", 1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"G",
        TLS_HELLO,
        HTTP2_PREFACE[:10],
        HTTP2_PREFACE,
        HTTP2_PREFACE + SETTINGS,
        HTTP2_PREFACE + SETTINGS + HALF_A_HEADERS_FRAME,
    ],
    ids=[
        "nothing",
        "a letter",
        "half a TLS hello",
        "half a preface",
        "a preface",
        "settings, no stream",
        "half a frame of headers",
    ],
)
async def test_a_connection_that_delays_its_stream_is_closed(said: bytes) -> None:
    """Slow-loris: the server closes a connection that sends a little and then nothing."""
    async with serving() as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        writer.write(said)
        async with asyncio.timeout(WAIT_SECONDS):
            with contextlib.suppress(ConnectionError):
                while await reader.read(4096):
                    pass
        writer.close()
        assert await is_served(run.port)


@pytest.mark.usefixtures("impatient")
async def test_slow_bytes_do_not_keep_a_connection_open(tmp_path: Path) -> None:
    """One byte at a time: the handshake as a whole has one deadline."""
    certs = make_folder(tmp_path)
    async with serving(credentials=credentials_of(certs, "server")) as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and time.monotonic() < begun + WAIT_SECONDS:
                writer.write(b"\x16")
                await writer.drain()
                await asyncio.sleep(0.1)
        assert reader.at_eof() or reader.exception() is not None
        writer.close()


@pytest.mark.usefixtures("impatient")
async def test_peers_without_valid_certificates_get_no_stream_and_are_counted(
    tmp_path: Path,
) -> None:
    certs, others = make_folder(tmp_path / "ours", "0"), make_folder(tmp_path / "theirs", "0")
    put_signed(certs, "late", days=(-3, -1))
    server = credentials_of(certs, "server")
    ours = credentials_of(certs, "0")
    theirs = credentials_of(others, "0")
    shown = {
        "an expired certificate": credentials_of(certs, "late"),
        "another authority's": Credentials(
            ca=ours.ca, certificate=theirs.certificate, key=theirs.key
        ),
    }

    async def open_stream(channel: grpc.aio.Channel) -> grpc.StatusCode:
        async with channel:
            call = channel.stream_stream(STREAM_METHOD)()
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call.read()
            return refusal.value.code()

    async with serving(credentials=server) as run:
        here = f"127.0.0.1:{run.port}"
        nothing_shown = grpc.ssl_channel_credentials(ours.ca)
        codes = [
            await open_stream(grpc.aio.insecure_channel(here)),
            await open_stream(grpc.aio.secure_channel(here, nothing_shown)),
        ]
        for stranger in shown.values():
            async with RawDevice(run.port, "0", credentials=stranger) as device:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await device.enter()
                codes.append(refusal.value.code())
        assert codes == [grpc.StatusCode.UNAVAILABLE] * 4
        assert run.servicer.connected() == []
        async with RawDevice(run.port, "0", credentials=ours) as device:
            await device.enter()
            # gRPC tries again by itself, so there may be more of them than we sent.
            await until(lambda: run.refusals["NoStream"] >= 4)
            await device.send(leave=Leave())
            await device.end()


def test_an_unidentified_connection_is_one_without_a_stream_in_time() -> None:
    strangers = UnidentifiedConnections()
    for second in range(5):
        strangers.note_connection(float(second))
    for peer in ("ipv4:192.0.2.1:1", "ipv4:192.0.2.1:2", "ipv4:192.0.2.1:1"):
        strangers.note_call(peer)
    late = 5.0 + port_module.HANDSHAKE_SECONDS
    assert strangers.count(2.0) == 0
    assert strangers.count(late) == 3
    strangers.note_connection(late)
    strangers.note_call("ipv4:192.0.2.1:3")
    assert strangers.count(late) == 3
    assert strangers.count(2 * late) == 3


def test_a_device_that_comes_back_from_its_old_port_is_no_stranger() -> None:
    strangers, peer = UnidentifiedConnections(), "ipv4:192.0.2.1:1"
    for second in range(3):
        strangers.note_connection(float(second))
        strangers.note_call(peer)
        strangers.note_end(peer)
    assert strangers.count(3.0 + port_module.HANDSHAKE_SECONDS) == 0


@pytest.mark.usefixtures("impatient")
async def test_a_health_check_with_a_certificate_is_no_stranger(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "ours", "0")
    ours = credentials_of(certs, "0")
    async with serving(credentials=credentials_of(certs, "server")) as run:
        shown = grpc.ssl_channel_credentials(ours.ca, ours.key, ours.certificate)
        async with grpc.aio.secure_channel(f"127.0.0.1:{run.port}", shown) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            for _ in range(2):
                await check(b"")
        _, stranger = await asyncio.open_connection("127.0.0.1", run.port)
        await until(lambda: run.refusals["NoStream"] >= 1)
        stranger.close()
        assert run.refusals["NoStream"] == 1


async def test_idle_connections_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Descriptors remain for the checkpoint, however many connections strangers open."""
    monkeypatch.setattr(port_module, "MAX_DESCRIPTORS", port_module.RESERVED_DESCRIPTORS + 20)
    async with serving() as run:
        before = psutil.Process().num_fds()
        writers = []
        for _ in range(60):
            _, writer = await asyncio.open_connection("127.0.0.1", run.port)
            writers.append(writer)
        await asyncio.sleep(0.5)
        # Both ends are in this process: 60 of ours, and at the most 20 of the server's.
        assert psutil.Process().num_fds() - before <= 60 + 20 + 5
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.5)
        assert await is_served(run.port)


async def test_a_request_that_crashes_grpcs_server_costs_no_stream_and_the_port_reopens() -> None:
    """A path that is not UTF-8; the fuzzer found it."""
    async with cohort("honest") as (run, honest):
        await honest.describe()
        plan = await honest.plan()
        recorded = await record(run.port)
        crashing = recorded.replace(STREAM_METHOD.encode(), STREAM_METHOD.encode()[:-1] + b"\xff")
        assert crashing != recorded
        port = run.servicer._listener
        assert port is not None
        for times in (1, 2):
            await send_bytes(run.port, crashing)
            await until(lambda times=times: port.num_restarts == times)  # type: ignore[misc]
            assert await is_served(run.port)
        await honest.update(plan)
        await run.end()
        assert [row.num_clients for row in run.rows] == [1]


# Admitted peers.


async def test_a_compressed_frame_is_refused_however_small() -> None:
    """A decompression bomb: 5 MB of zeros are 5 KB on the wire."""
    async with serving() as run:
        channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{run.port}", options=LIMITLESS, compression=grpc.Compression.Gzip
        )
        async with channel:
            call = channel.stream_stream(STREAM_METHOD)()
            bomb = ClientFrame(chunk=Chunk(data=bytes(5_000_000)))
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(bomb.SerializeToString())
            # "gzip is disabled", or a reset that has overtaken these words.
            assert await call.code() in (
                grpc.StatusCode.UNIMPLEMENTED,
                grpc.StatusCode.INTERNAL,
            )
        assert run.servicer.bytes_up == 0
        assert await is_served(run.port)


async def test_a_million_tiny_frames_end_their_stream_and_delay_no_other() -> None:
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        await attacker.plan()
        plan = await honest.plan()
        tiny = ClientFrame(chunk=Chunk(transfer_id="none")).SerializeToString()
        num_sent = 0
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while num_sent < 1_000_000:
                await attacker.send_bytes(tiny)
                num_sent += 1
        await attacker.end()
        assert run.refusals["ProtocolMismatch"] == 1
        # The limit, and the frames in flight when the stream ended.
        assert FRAMES <= num_sent < 100_000
        async with RawDevice(run.port, "attacker") as again:
            await again.enter()
            await again.send(leave=Leave())
            await honest.update(plan)
            await run.end()
        assert [client.name for client in run.rows[0].clients] == ["honest"]


async def exceed_rate_limit(run: Run, *, credentials: Credentials | None = None) -> None:
    """Send an invalid version more often than the rate limit allows."""
    for _ in range(int(BURST) + 5):
        async with RawDevice(run.port, "0", credentials=credentials) as device:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await device.hello(protocol_version=PROTOCOL_VERSION + 1)
            await device.end()


@pytest.fixture
def no_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the rate limit's refill, so that a slow machine gets the same result."""
    monkeypatch.setattr("headwater.server.transport.rate_limit.PER_SECOND", 0.0)


@pytest.mark.usefixtures("no_refill")
async def test_a_repeatedly_refused_peer_is_closed_silently() -> None:
    async with serving() as run:
        await exceed_rate_limit(run)
        assert run.refusals == {"ProtocolMismatch": BURST, "TooManyAttempts": 5}


@pytest.mark.usefixtures("no_refill")
async def test_a_revoked_device_that_retries_does_not_block_other_devices(
    tmp_path: Path,
) -> None:
    certs = make_folder(tmp_path, "0", "1")
    server, revoked = credentials_of(certs, "server"), credentials_of(certs, "0")
    verifier = RegistryVerifier.of(tls_of(certs, "server"), server)
    revoke(certs, "0")
    async with serving(credentials=server, verifier=verifier) as run:
        async with RawDevice(run.port, "0", credentials=revoked) as device:
            await device.hello()
            assert await device.refused() == "CertificateRevoked"
        await exceed_rate_limit(run, credentials=revoked)
        assert run.refusals["TooManyAttempts"] == 6
        other = credentials_of(certs, "1")
        async with RawDevice(run.port, "1", credentials=other) as device:
            await device.enter()


# Let in, and up to no good.


async def test_an_enrolled_device_cannot_act_as_another_or_read_its_plan(tmp_path: Path) -> None:
    certs = make_folder(tmp_path, "attacker", "honest")
    own = credentials_of(certs, "attacker")
    server = credentials_of(certs, "server")
    verifier = RegistryVerifier.of(tls_of(certs, "server"), server)
    async with (
        serving(credentials=server, verifier=verifier, min_clients=2) as run,
        RawDevice(run.port, "attacker", credentials=own) as attacker,
        RawDevice(run.port, "honest", credentials=credentials_of(certs, "honest")) as honest,
    ):
        await attacker.enter()
        await honest.hello()
        session = (await honest.next_of("welcome")).welcome.session
        run.begin()
        await attacker.describe()
        await honest.describe()
        plans = await asyncio.gather(attacker.plan(), honest.plan())
        # Under the other's name, and with its session, which it cannot know.
        async with RawDevice(run.port, "honest", credentials=own) as thief:
            await thief.hello(session=session)
            fault = await thief.next()
            assert fault.fault.code == "IdentityRefused"
            with pytest.raises(EOFError):
                await thief.next()
        # With the other's message, which it cannot know either.
        await attacker.update(plans[1])
        assert (await attacker.fault()).code == "UnexpectedUpdate"
        await attacker.update(plans[0])
        await honest.update(plans[1])
        await run.end()
        assert [client.name for client in run.rows[0].clients] == ["attacker", "honest"]
        assert run.rows[0].weight == 16


async def says_nothing(device: RawDevice) -> None:
    await asyncio.sleep(3600)


async def never_answers_its_plan(device: RawDevice) -> None:
    await device.describe()
    await device.plan()
    await asyncio.sleep(3600)


async def announces_and_sends_nothing(device: RawDevice) -> None:
    await device.describe()
    plan = await device.plan()
    await device.reply(plan, "{}", b"", num_bytes=44, sha256=bytes(32))
    await asyncio.sleep(3600)


async def sends_a_byte_now_and_then(device: RawDevice) -> None:
    await device.describe()
    plan = await device.plan()
    await device.reply(plan, "{}", b"", num_bytes=44, sha256=bytes(32))
    for offset in range(44):
        await device.chunk(plan, offset, b"\0")
        await asyncio.sleep(0.3)


STALLS: tuple[Callable[[RawDevice], Awaitable[None]], ...] = (
    says_nothing,
    never_answers_its_plan,
    announces_and_sends_nothing,
    sends_a_byte_now_and_then,
)


@pytest.mark.slow
async def test_stalled_devices_cannot_stop_a_round_with_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "PATIENCE_SECONDS", 1.0)
    names = [stall.__name__ for stall in STALLS]
    how: dict[str, Any] = {"deadline": 2.0, "rounds": 2}
    async with cohort("honest", *names, **how) as (run, honest, *attackers):
        stalling = [
            asyncio.ensure_future(stall(device))
            for stall, device in zip(STALLS, attackers, strict=True)
        ]
        await honest.describe()
        for _ in range(2):
            await honest.update(await honest.plan())
        await run.end()
        for one in stalling:
            one.cancel()
        await asyncio.gather(*stalling, return_exceptions=True)
        assert [[client.name for client in row.clients] for row in run.rows] == [
            ["honest"],
            ["honest"],
        ]
        assert run.servicer.staged_bytes == 0


SHAPES = {
    "an update of 2^62 bytes": {"num_bytes": 2**62},
    "an update of 2^64 - 1 bytes": {"num_bytes": 2**64 - 1},
}


@pytest.mark.parametrize("announced", SHAPES.values(), ids=SHAPES.keys())
async def test_a_shape_bomb_is_refused_before_any_memory_is_allocated(
    announced: dict[str, int],
) -> None:
    async with cohort("attacker", "honest") as (run, attacker, honest):
        await attacker.describe()
        await honest.describe()
        await attacker.reply(await attacker.plan(), "{}", b"", **announced)
        assert (await attacker.fault()).code == "OversizeUpdate"
        assert run.servicer.staged_bytes == 0
        await honest.update(await honest.plan())
        await run.end()
