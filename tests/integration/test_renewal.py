"""A device's certificate is renewed over its stream."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cryptography import x509

from headwater.client.enrolment.renewal import Renewal
from headwater.common.transport.certificates import Key, key_pem, new_key, signing_request
from headwater.common.transport.tls import Credentials, read_credentials
from headwater.common.transport.wire_pb2 import Certificate
from headwater.common.transport.wire_pb2 import Renewal as RenewalFrame
from tests.attacks.raw import RawDevice
from tests.certificates import (
    credentials_of,
    enrol,
    make_folder,
    tls_of,
)
from tests.enrolment import stream_server

OLD = (-100.0, 10.0)  # days: in the last third of its life


async def renewed(device: RawDevice, request: bytes) -> Certificate:
    await device.send(renewal=RenewalFrame(signing_request=request))
    return (await device.next_of("certificate")).certificate


def with_key(certs: Path, pem: bytes, key: Key) -> Credentials:
    return Credentials(ca=(certs / "ca.pem").read_bytes(), certificate=pem, key=key_pem(key))


async def test_the_first_use_of_a_renewed_certificate_revokes_the_old_one(tmp_path: Path) -> None:
    certs = make_folder(tmp_path)
    enrol(certs, "0", days=OLD)
    old, key = credentials_of(certs, "0"), new_key()
    async with (
        stream_server(certs) as run,
        RawDevice(run.port, "0", credentials=old) as first,
    ):
        await first.enter()
        answer = await renewed(first, signing_request("0", key))
        assert x509.load_pem_x509_certificate(answer.pem)
        fresh = with_key(certs, answer.pem, key)
        async with RawDevice(run.port, "0", credentials=fresh) as second:
            await second.hello()
            assert (await second.next_of("welcome")).welcome.has_displaced
            assert await first.refused() == "IdentityRefused"
            async with RawDevice(run.port, "0", credentials=old) as late:
                await late.hello()
                assert await late.refused() == "CertificateRevoked"


@pytest.mark.parametrize(
    ("days", "name", "reason"),
    [
        ((-1.0, 100.0), "0", "first half of its lifetime"),
        (OLD, "1", "the request is for"),
        (OLD, None, "signing request"),
    ],
    ids=["too early", "other name", "no request"],
)
async def test_an_early_or_foreign_renewal_is_refused_and_the_stream_continues(
    days: tuple[float, float], name: str | None, reason: str, tmp_path: Path
) -> None:
    certs = make_folder(tmp_path, "1")
    enrol(certs, "0", days=days)
    request = b"nonsense" if name is None else signing_request(name, new_key())
    own = credentials_of(certs, "0")
    async with (
        stream_server(certs) as run,
        RawDevice(run.port, "0", credentials=own) as device,
    ):
        await device.enter()
        answer = await renewed(device, request)
        assert reason in answer.refusal
        assert not answer.pem
        run.begin()
        await device.describe()
        await device.update(await device.plan())
        await run.end()


async def test_repeated_renewal_requests_are_refused_without_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certs = make_folder(tmp_path)
    enrol(certs, "0", days=OLD)
    async with (
        stream_server(certs) as run,
        RawDevice(run.port, "0", credentials=credentials_of(certs, "0")) as device,
    ):
        await device.enter()
        answers = [await renewed(device, signing_request("0", new_key())) for _ in range(5)]
        assert [bool(answer.pem) for answer in answers] == [True] + [False] * 4
    assert caplog.text.count("its certificate is") == 1


def test_without_the_authoritys_key_both_sides_are_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certs = make_folder(tmp_path)
    enrol(certs, "0", days=OLD)
    (certs / "ca-key.pem").unlink()
    tls = tls_of(certs, "0")
    own = read_credentials(tls)
    assert own is not None
    renewal = Renewal(tls, own)
    assert renewal.due_seconds() == 0.0
    request = renewal.request()
    assert request is not None

    async def play() -> Certificate:
        async with (
            stream_server(certs) as run,
            RawDevice(run.port, "0", credentials=own) as device,
        ):
            await device.enter()
            return await renewed(device, request)

    renewal.take(asyncio.run(play()))
    assert "no device can join, and certificates are not renewed" in caplog.text
    assert "0: its certificate is not renewed: the authority's key is not" in caplog.text
    assert "the server does not renew it: the authority's key is not" in caplog.text
    assert renewal.credentials is own


def test_a_device_accepts_a_renewed_certificate_only_for_its_own_key(tmp_path: Path) -> None:
    certs = make_folder(tmp_path)
    enrol(certs, "0", days=OLD)
    tls = tls_of(certs, "0")
    own = read_credentials(tls)
    assert own is not None
    before = (certs / "0.pem").read_bytes()
    renewal = Renewal(tls, own)
    renewal.take(Certificate(pem=own.certificate))  # never asked for
    renewal.request()
    enrol(certs, "1")
    renewal.take(Certificate(pem=credentials_of(certs, "1").certificate))
    assert (certs / "0.pem").read_bytes() == before
    assert renewal.credentials is own


def test_a_certificate_and_a_key_in_two_files_are_not_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certs = make_folder(tmp_path)
    key = enrol(certs, "0", days=OLD)
    (certs / "0-key.pem").touch(0o600)
    (certs / "0-key.pem").write_bytes(key_pem(key))
    tls = tls_of(certs, "0").model_copy(update={"key": certs / "0-key.pem"})
    own = read_credentials(tls)
    assert own is not None
    assert Renewal(tls, own).request() is None
    assert "join again" in caplog.text
