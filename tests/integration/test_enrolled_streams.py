"""Which streams the server accepts: TLS, revoked devices, unknown certificates, other keys."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from tests.attacks.raw import RawDevice, serving
from tests.certificates import (
    credentials_of,
    enrol,
    make_folder,
    put_signed,
    revoke,
)
from tests.enrolment import stream_server, tls_to


def test_streams_use_tls_1_3_or_1_2_with_authenticated_encryption(tmp_path: Path) -> None:
    certs = make_folder(tmp_path, "0")
    own = certs / "0.pem"

    async def play() -> None:
        async with stream_server(certs) as run:
            here = ("127.0.0.1", run.port)

            def shake(version: ssl.TLSVersion | None, ciphers: str | None) -> str:
                with tls_to(here, version=version, ciphers=ciphers, own=own) as secure:
                    return str(secure.version())

            async def shaken(version: ssl.TLSVersion | None, ciphers: str | None = None) -> str:
                return await asyncio.to_thread(shake, version, ciphers)

            assert await shaken(None) == "TLSv1.3"
            assert (
                await shaken(ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-GCM-SHA256") == "TLSv1.2"
            )
            for weak in ("ECDHE-ECDSA-AES128-SHA256", "ECDHE-ECDSA-AES256-SHA384", "AES128-SHA"):
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await shaken(ssl.TLSVersion.TLSv1_2, weak)

    asyncio.run(play())


def test_a_device_uses_tls_1_3_with_a_server_that_requires_it(tmp_path: Path) -> None:
    certs = make_folder(tmp_path, "0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certs / "server.pem", certs / "server-key.pem")
    context.set_alpn_protocols(["h2"])

    async def play() -> str:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(20)

            def accept() -> str:
                plain, _ = listener.accept()
                with plain, context.wrap_socket(plain, server_side=True) as secure:
                    return str(secure.version())

            port = listener.getsockname()[1]
            async with RawDevice(port, "0", credentials=credentials_of(certs, "0")) as device:
                hello = asyncio.create_task(device.hello())
                version = await asyncio.to_thread(accept)
                hello.cancel()
                await asyncio.wait([hello])
                return version

    assert asyncio.run(play()) == "TLSv1.3"


async def test_revoking_ends_a_live_stream_and_the_old_certificate_stays_refused(
    tmp_path: Path,
) -> None:
    certs = make_folder(tmp_path, "0")
    old = credentials_of(certs, "0")
    async with stream_server(certs) as run:
        async with RawDevice(run.port, "0", credentials=old) as device:
            await device.enter()
            revoke(certs, "0")
            assert await device.refused() == "CertificateRevoked"
            assert run.servicer.connected() == []
        async with RawDevice(run.port, "0", credentials=old) as device:
            await device.hello()
            assert await device.refused() == "CertificateRevoked"
        enrol(certs, "0")
        async with RawDevice(run.port, "0", credentials=credentials_of(certs, "0")) as device:
            await device.enter()
        assert run.refusals["CertificateRevoked"] == 2


async def test_the_server_answers_for_a_revoked_device(tmp_path: Path) -> None:
    certs = make_folder(tmp_path, "0", "1")
    async with (
        stream_server(certs, min_clients=1, reconnect_seconds=600.0) as run,
        RawDevice(run.port, "0", credentials=credentials_of(certs, "0")) as stays,
        RawDevice(run.port, "1", credentials=credentials_of(certs, "1")) as goes,
    ):
        await stays.enter()
        await goes.enter()
        run.begin()
        await asyncio.gather(stays.describe(), goes.describe())
        plans = await asyncio.gather(stays.plan(), goes.plan())
        await stays.update(plans[0])
        revoke(certs, "1")
        await run.end()
        assert [row.num_clients for row in run.rows] == [1]


async def test_a_certificate_unknown_to_the_registry_is_refused(tmp_path: Path) -> None:
    certs = make_folder(tmp_path)
    put_signed(certs, "0", days=(-1, 9))
    own = credentials_of(certs, "0")
    async with (
        stream_server(certs) as run,
        RawDevice(run.port, "0", credentials=own) as device,
    ):
        await device.hello()
        fault = await device.fault()
        assert fault.code == "IdentityRefused"
        assert "not in the server's registry" in fault.text


async def test_another_key_under_the_same_name_displaces_nobody(tmp_path: Path) -> None:
    certs = make_folder(tmp_path)
    put_signed(certs, "0", days=(-1, 9))
    first_own = credentials_of(certs, "0")
    put_signed(certs, "0", days=(-1, 9))
    second_own = credentials_of(certs, "0")
    async with (  # without a registry the authority's signature is all there is
        serving(credentials=credentials_of(certs, "server")) as run,
        RawDevice(run.port, "0", credentials=first_own) as first,
        RawDevice(run.port, "0", credentials=second_own) as second,
    ):
        await first.enter()
        await second.hello()
        fault = await second.fault()
        assert (fault.code, "another key" in fault.text) == ("IdentityRefused", True)
        run.begin()
        await first.describe()
        await first.update(await first.plan())
        await run.end()
