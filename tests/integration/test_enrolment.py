"""Enrolment over real sockets: who gets a certificate, who keeps it, and who loses it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from client.join import join
from client.renewal import Renewal
from common.certificates import Key, key_pem, new_key, signing_request
from common.errors import (
    AuthorityMismatch,
    CertificateProblem,
    ClockWrong,
    ConnectionLost,
    EnrolmentClosed,
    JoinTokenExpired,
    JoinTokenUnknown,
    JoinTokenUsed,
    PortInUse,
    ProtocolMismatch,
)
from common.join_token import JoinToken
from common.tls import Credentials, read_credentials
from common.wire_pb2 import Certificate
from common.wire_pb2 import Renewal as RenewalFrame
from server.authority import Authority
from server.enrolment import EnrolmentPort
from server.identities import Identities
from server.ration import BURST, MAX_ADDRESSES, PER_SECOND, Ration, subscriber
from tests.attacks.raw import RawDevice, serving
from tests.certificates import (
    HOSTS,
    credentials_of,
    enrol,
    files,
    make_folder,
    put_signed,
    revoke,
    tls_of,
    token_for,
)
from tests.processes import (
    Process,
    Processes,
    assert_tidy,
    free_port,
    port_of,
    until,
    write_task,
)

STREAM_PORT = 4321


@contextlib.contextmanager
def enrolment(folder: Path) -> Iterator[EnrolmentPort]:
    """Serve the enrolment port of a folder."""
    port = EnrolmentPort(folder, "127.0.0.1:0", stream_port=STREAM_PORT)
    port.start()
    try:
        yield port
    finally:
        port.stop()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def token_at(folder: Path, port: int, name: str = "pi", *, valid: float = 60) -> JoinToken:
    """Make a token, and wait until the port is open for it."""
    token = token_for(folder, name, address=f"127.0.0.1:{port}", valid=valid)
    until(lambda: is_open(port), seconds=10, what=lambda: "the enrolment port")
    return token


# Joining.


def test_a_device_joins_with_a_key_that_it_made_and_keeps(tmp_path: Path) -> None:
    certs, device = make_folder(tmp_path / "certs"), tmp_path / "device"
    with enrolment(certs) as port:
        joined = join(token_at(certs, port.port), device)
    assert (joined.name, joined.server) == ("pi", f"127.0.0.1:{STREAM_PORT}")
    assert abs(joined.clock_off_seconds) < 5
    assert {path.name for path in device.iterdir()} == {"ca.pem", "device.pem", "client.toml"}
    assert stat.S_IMODE((device / "device.pem").stat().st_mode) == 0o600
    mine = Credentials(
        ca=(device / "ca.pem").read_bytes(),
        certificate=(device / "device.pem").read_bytes(),
        key=b"",
    )
    mine.leaf.verify_directly_issued_by(Authority.load(certs).certificate)
    key = (device / "device.pem").read_text().split("-----BEGIN PRIVATE KEY-----")[1]
    for path in certs.iterdir():
        assert key.split()[0].encode() not in path.read_bytes(), path


def test_the_port_is_closed_unless_a_token_is_out(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        assert not is_open(port.port)
        # Another server's token, as one of this server would open the port for a moment.
        others = token_for(make_folder(tmp_path / "others"), "pi", address=f"127.0.0.1:{port.port}")
        with pytest.raises(EnrolmentClosed):
            join(others, tmp_path / "device")
        token_at(certs, port.port)
        revoke(certs, "pi")
        until(lambda: not is_open(port.port), seconds=10, what=lambda: "the port to close")


def test_a_token_that_was_used_lets_in_nobody_else(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        token = token_at(certs, port.port)
        join(token, tmp_path / "first")
        with pytest.raises(JoinTokenUsed):
            join(token, tmp_path / "second")
    assert port.refusals["JoinTokenUsed"] == 1
    assert not (tmp_path / "second" / "device.pem").exists()


def test_a_join_whose_answer_was_lost_goes_on_with_the_same_key(tmp_path: Path) -> None:
    certs, device = make_folder(tmp_path / "certs"), tmp_path / "device"
    with enrolment(certs) as port:
        token = token_at(certs, port.port)
        (device / "client.toml").mkdir(parents=True)  # what came cannot be kept
        with pytest.raises(CertificateProblem):
            join(token, device)
        (device / "client.toml").rmdir()
        assert join(token, device).name == "pi"


def test_a_token_that_has_expired_is_named_so(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        late = token_for(certs, "pi", address=f"127.0.0.1:{port.port}", valid=-1)
        with pytest.raises(JoinTokenExpired, match="nobody listens"):
            join(late, tmp_path / "device")
        token_at(certs, port.port, "laptop")
        with pytest.raises(JoinTokenExpired, match="the join token of pi expired"):
            join(late, tmp_path / "device")


def test_a_token_is_no_good_for_another_name(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        token = token_at(certs, port.port)
        other = JoinToken(
            address=token.address,
            fingerprint=token.fingerprint,
            name="laptop",
            expires_at=token.expires_at,
            secret=token.secret,
        )
        with pytest.raises(JoinTokenUnknown):
            join(other, tmp_path / "device")


def test_a_server_of_another_authority_is_named_and_told_nothing(tmp_path: Path) -> None:
    certs, evil = make_folder(tmp_path / "certs"), make_folder(tmp_path / "evil")
    with enrolment(evil) as port:
        token_at(evil, port.port)
        mine = token_for(certs, "pi", address=f"127.0.0.1:{port.port}")
        with pytest.raises(AuthorityMismatch, match="the token names"):
            join(mine, tmp_path / "device")
    assert "JoinTokenUnknown" not in port.refusals


def test_who_shows_the_right_authority_without_a_certificate_of_it_learns_no_secret(
    tmp_path: Path,
) -> None:
    certs, evil = make_folder(tmp_path / "certs"), make_folder(tmp_path / "evil")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(evil / "server.pem", evil / "server-key.pem")
    heard: list[bytes] = []

    def impersonate(listener: socket.socket) -> None:
        answer = {"authority": (certs / "ca.pem").read_text(), "now": time.time()}
        for _ in range(2):
            with contextlib.suppress(OSError):
                plain, _ = listener.accept()
                with plain, context.wrap_socket(plain, server_side=True) as secure:
                    heard.append(secure.recv(8192))
                    secure.sendall(json.dumps(answer).encode() + b"\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impersonate, args=(listener,))
        thread.start()
        token = token_for(certs, "pi", address=f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(AuthorityMismatch):
            join(token, tmp_path / "device")
        thread.join()
    assert [json.loads(line)["want"] for line in heard] == ["authority"]


@pytest.mark.parametrize("days", [(5, 9), (-9, -5)], ids=["behind", "ahead"])
def test_a_clock_outside_of_the_servers_certificate_is_named(
    days: tuple[float, float], tmp_path: Path
) -> None:
    certs = make_folder(tmp_path / "certs")
    put_signed(certs, "server", days=days)
    (certs / "server-key.pem").write_bytes((certs / "server.pem").read_bytes())
    with enrolment(certs) as port, pytest.raises(ClockWrong, match="clock says"):
        join(token_at(certs, port.port), tmp_path / "device")


def test_a_server_certificate_for_another_host_is_named(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs", hosts=["example.org"])
    with enrolment(certs) as port, pytest.raises(CertificateProblem, match="made out"):
        join(token_at(certs, port.port), tmp_path / "device")


def test_what_is_no_enrolment_port_is_named(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")

    def chat(listener: socket.socket) -> None:
        plain, _ = listener.accept()
        with plain:
            plain.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            plain.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=chat, args=(listener,))
        thread.start()
        token = token_for(certs, "pi", address=f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ProtocolMismatch, match="TLS"):
            join(token, tmp_path / "device")
        thread.join()


def test_a_name_that_does_not_resolve_is_a_lost_connection(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with pytest.raises(ConnectionLost, match="not to be reached"):
        join(token_for(certs, "pi", address="nowhere.invalid:8501"), tmp_path / "device")


def test_a_folder_with_another_devices_files_is_left_alone(tmp_path: Path) -> None:
    certs, device = make_folder(tmp_path / "certs"), tmp_path / "device"
    with enrolment(certs) as port:
        join(token_at(certs, port.port, "pi"), device)
        before = (device / "device.pem").read_bytes()
        with pytest.raises(CertificateProblem, match="the certificate of pi"):
            join(token_at(certs, port.port, "laptop"), device)
    assert (device / "device.pem").read_bytes() == before


# Strangers at the enrolment port.


def test_strangers_are_refused_and_counted_and_the_next_device_joins(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        token = token_at(certs, port.port)
        here = ("127.0.0.1", port.port)
        before = port.refusals.total()
        with socket.create_connection(here, 20) as plain:  # not TLS at all
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(OSError):
                while plain.recv(1000):
                    pass
        for line in (
            b"x" * 100_000,
            b"{}\n",
            b'{"version": 1, "want": "all"}\n',
            b"[" * 8000 + b"\n",
        ):
            with contextlib.suppress(OSError), tls_to(here) as secure:
                secure.sendall(line)
                secure.recv(8192)
        until(lambda: port.refusals.total() >= before + 5, seconds=20, what=lambda: "refusals")
        assert set(port.refusals) == {"ProtocolMismatch"}
        assert join(token, tmp_path / "device").name == "pi"


def tls_to(
    address: tuple[str, int],
    *,
    version: ssl.TLSVersion | None = None,
    ciphers: str | None = None,
    own: Path | None = None,
) -> ssl.SSLSocket:
    """Open a TLS connection that trusts anybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if version is not None:
        context.minimum_version = context.maximum_version = version
    if ciphers is not None:
        context.set_ciphers(ciphers)
    if own is not None:
        context.load_cert_chain(own)
    return context.wrap_socket(socket.create_connection(address, 20))


def test_an_address_that_comes_too_often_is_not_even_shaken_hands_with(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        token_at(certs, port.port)
        for _ in range(int(BURST) + 5):
            with socket.create_connection(("127.0.0.1", port.port), 20):
                pass
        until(
            lambda: port.refusals["TooManyAttempts"] >= 5,
            seconds=20,
            what=lambda: str(port.refusals),
        )


def test_a_ration_comes_back_with_time_and_forgets_addresses() -> None:
    ration = Ration()
    assert [ration.take("a", 0.0) for _ in range(int(BURST) + 1)] == [True] * int(BURST) + [False]
    assert ration.take("b", 0.0)
    assert ration.take("a", 1 / PER_SECOND)
    assert not ration.take("a", 1 / PER_SECOND)
    for number in range(MAX_ADDRESSES):
        ration.take(str(number), 3.0)
    assert ration.take("a", 3.0)


def test_a_subscriber_of_ipv6_has_64_bits() -> None:
    assert subscriber("2001:db8:1:2:3:4:5:6") == subscriber("2001:db8:1:2::1")
    assert subscriber("2001:db8:1:2::1") != subscriber("2001:db8:1:3::1")
    assert subscriber("192.0.2.1") != subscriber("192.0.2.2")


def test_the_enrolment_port_speaks_tls_1_3_alone(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        token_at(certs, port.port)
        here = ("127.0.0.1", port.port)
        with pytest.raises(ssl.SSLError):
            tls_to(here, version=ssl.TLSVersion.TLSv1_2)
        with tls_to(here) as secure:
            assert secure.version() == "TLSv1.3"


def test_a_port_that_is_taken_is_named_at_once(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = EnrolmentPort(certs, f"127.0.0.1:{taken.getsockname()[1]}", stream_port=1)
        with pytest.raises(PortInUse):
            port.start()
        port.stop()


# Streams.


@contextlib.asynccontextmanager
async def stream_server(folder: Path, **how: object):  # type: ignore[no-untyped-def]
    """Serve streams with the registry and the authority of a folder."""
    own = credentials_of(folder, "server")
    identities = Identities.of(tls_of(folder, "server"), own)
    try:
        async with serving(credentials=own, identities=identities, **how) as run:  # type: ignore[arg-type]
            yield run
    finally:
        identities.close()


def test_streams_speak_tls_1_3_or_1_2_with_authenticated_encryption(tmp_path: Path) -> None:
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


def test_a_device_speaks_tls_1_3_with_who_speaks_nothing_less(tmp_path: Path) -> None:
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


def test_revoking_ends_a_live_stream_and_the_old_certificate_stays_refused(tmp_path: Path) -> None:
    certs = make_folder(tmp_path, "0")
    old = credentials_of(certs, "0")

    async def play() -> None:
        async with stream_server(certs) as run:
            async with RawDevice(run.port, "0", credentials=old) as device:
                await device.enter()
                revoke(certs, "0")
                assert await device.refused() == "CertificateRevoked"
                assert run.intake.connected() == []
            async with RawDevice(run.port, "0", credentials=old) as device:
                await device.hello()
                assert await device.refused() == "CertificateRevoked"
            enrol(certs, "0")
            async with RawDevice(run.port, "0", credentials=credentials_of(certs, "0")) as device:
                await device.enter()
            assert run.refusals["CertificateRevoked"] == 2

    asyncio.run(play())


def test_what_a_revoked_device_was_asked_for_is_answered_for_it(tmp_path: Path) -> None:
    certs = make_folder(tmp_path, "0", "1")

    async def play() -> None:
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

    asyncio.run(play())


def test_a_certificate_that_the_registry_does_not_know_is_refused(tmp_path: Path) -> None:
    certs = make_folder(tmp_path)
    put_signed(certs, "0", days=(-1, 9))

    async def play() -> None:
        own = credentials_of(certs, "0")
        async with (
            stream_server(certs) as run,
            RawDevice(run.port, "0", credentials=own) as device,
        ):
            await device.hello()
            fault = await device.fault()
            assert fault.code == "IdentityRefused"
            assert "not in the server's registry" in fault.text

    asyncio.run(play())


def test_another_key_under_the_same_name_does_not_displace(tmp_path: Path) -> None:
    certs = make_folder(tmp_path)
    put_signed(certs, "0", days=(-1, 9))
    first_own = credentials_of(certs, "0")
    put_signed(certs, "0", days=(-1, 9))
    second_own = credentials_of(certs, "0")

    async def play() -> None:
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

    asyncio.run(play())


# Renewal.

OLD = (-100.0, 10.0)  # days: in the last third of its life


async def renewed(device: RawDevice, request: bytes) -> Certificate:
    await device.send(renewal=RenewalFrame(signing_request=request))
    return (await device.next_of("certificate")).certificate


def with_key(certs: Path, pem: bytes, key: Key) -> Credentials:
    return Credentials(ca=(certs / "ca.pem").read_bytes(), certificate=pem, key=key_pem(key))


def test_a_renewed_certificate_counts_and_ends_the_old_one_when_it_is_used(tmp_path: Path) -> None:
    certs = make_folder(tmp_path)
    enrol(certs, "0", days=OLD)
    old, key = credentials_of(certs, "0"), new_key()

    async def play() -> None:
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

    asyncio.run(play())


@pytest.mark.parametrize(
    ("days", "name", "reason"),
    [
        ((-1.0, 100.0), "0", "more than half"),
        (OLD, "1", "the request is for"),
        (OLD, None, "signing request"),
    ],
    ids=["too early", "other name", "no request"],
)
def test_a_renewal_that_is_not_due_or_for_another_is_refused_and_the_stream_goes_on(
    days: tuple[float, float], name: str | None, reason: str, tmp_path: Path
) -> None:
    certs = make_folder(tmp_path, "1")
    enrol(certs, "0", days=days)
    request = b"nonsense" if name is None else signing_request(name, new_key())

    async def play() -> None:
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

    asyncio.run(play())


def test_a_device_that_asks_again_and_again_is_put_off_without_a_word_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certs = make_folder(tmp_path)
    enrol(certs, "0", days=OLD)

    async def play() -> None:
        async with (
            stream_server(certs) as run,
            RawDevice(run.port, "0", credentials=credentials_of(certs, "0")) as device,
        ):
            await device.enter()
            answers = [await renewed(device, signing_request("0", new_key())) for _ in range(5)]
            assert [bool(answer.pem) for answer in answers] == [True] + [False] * 4

    asyncio.run(play())
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


def test_a_device_takes_a_renewed_certificate_for_its_own_key_alone(tmp_path: Path) -> None:
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


def test_a_certificate_and_a_key_in_two_files_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certs = make_folder(tmp_path)
    key = enrol(certs, "0", days=OLD)
    (certs / "0-key.pem").write_bytes(key_pem(key))
    tls = tls_of(certs, "0").model_copy(update={"key": certs / "0-key.pem"})
    own = read_credentials(tls)
    assert own is not None
    assert Renewal(tls, own).request() is None
    assert "join anew" in caplog.text


# Commands, in processes of their own.


def assert_named(process: Process, code: str) -> None:
    assert process.wait(seconds=30) in (1, 2), process.text()
    assert f"{code}: " in process.text()
    assert_tidy(process)


class Operator:
    """What an operator and the owners of devices type."""

    def __init__(self, processes: Processes, folder: Path, *, last: str = "90d") -> None:
        self.processes, self.folder, self.certs = processes, folder, folder / "certs"
        self.port = free_port()
        hosts = [part for host in HOSTS for part in ("--host", host)]
        processes.run(
            "server", "init", "--folder", self.certs, *hosts, "--certificates-last", last
        ).succeed()

    def server(self, *arguments: object, task: str) -> Process:
        listen = ("--enrolment-listen", f"127.0.0.1:{self.port}")
        server = self.processes.server(*listen, *files(self.certs, "server"), *arguments, task=task)
        server.wait_for("devices join at port")
        return server

    def token(self, name: str) -> str:
        address = f"127.0.0.1:{self.port}"
        made = self.processes.run(
            "server", "enroll", name, "--folder", self.certs, "--address", address
        )
        made.succeed()
        return next(line for line in made.text().splitlines() if line.startswith("headwater-join"))

    def join(self, name: str) -> Path:
        token = self.token(name)
        until(lambda: is_open(self.port), seconds=10, what=lambda: "the enrolment port")
        folder = self.folder / f"device-{name}"
        self.processes.run("client", "join", token, "--folder", folder).succeed()
        return folder / "client.toml"


@pytest.mark.slow
def test_from_init_to_a_run_with_a_device_revoked_in_its_midst(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=1)
    with Processes(tmp_path) as processes:
        operator = Operator(processes, tmp_path)
        server = operator.server(
            "--rounds",
            2,
            "--min-clients",
            1,
            "--accumulation-steps",
            2,
            "--micro-batch-size",
            8,
            task=task.spec,
        )
        port = port_of(server)
        stays, goes = operator.join("1"), operator.join("0")
        client = processes.client(port, 0, "--config", goes, task=task.spec)
        task.wait_until_reached()
        revoked = processes.run("server", "revoke", "0", "--folder", operator.certs)
        revoked.succeed()
        server.wait_for("the certificate of 0 was revoked", seconds=10)
        task.open()
        assert_named(client, "CertificateRevoked")
        again = processes.client(port, 0, "--config", goes, "--patience", 2, task=task.spec)
        assert_named(again, "CertificateRevoked")
        other = processes.client(
            port, 1, "--config", stays, "--name", "0", "--patience", 2, task=task.spec
        )
        assert_named(other, "IdentityRefused")
        processes.client(port, 1, "--config", stays, task=task.spec).succeed()
        assert server.wait() == 0, server.text()
        assert_tidy(server)


@pytest.mark.slow
def test_a_run_outlives_its_devices_certificate(tmp_path: Path) -> None:
    task = write_task(tmp_path, open_for=1)
    with Processes(tmp_path) as processes:
        operator = Operator(processes, tmp_path, last="8s")
        server = operator.server(
            "--rounds",
            1,
            "--min-clients",
            1,
            "--accumulation-steps",
            2,
            "--micro-batch-size",
            8,
            task=task.spec,
        )
        config = operator.join("0")
        before = (config.parent / "device.pem").read_bytes()
        client = processes.client(port_of(server), 0, "--config", config, task=task.spec)
        task.wait_until_reached()
        server.wait_for("0: its certificate is renewed")
        client.wait_for("this device's certificate was renewed")
        server.wait_for("0: its certificate has ended, and so does its stream")
        server.wait_for("0 came with its renewed certificate")
        assert (config.parent / "device.pem").read_bytes() != before
        task.open()
        assert client.wait() == 0, client.text()
        assert server.wait() == 0, server.text()
        assert_tidy(client)
        assert_tidy(server)
