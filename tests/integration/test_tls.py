"""Mutual TLS: who is let in, who is not, and what each of them is told."""

from __future__ import annotations

import asyncio
import datetime as dt
import stat
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from common import tls
from common.errors import CertificateProblem, SettingsError
from common.settings import Tls
from common.tls import Credentials, make_certificates, read_credentials
from tests.attacks.raw import RawDevice, serving
from tests.processes import Process, Processes, assert_tidy, port_of, write_task

HOSTS = ("localhost", "127.0.0.1")
SHORT = ("--patience", 1.5)


def files(folder: Path, name: str) -> tuple[object, ...]:
    """Return the flags that name a side's three files."""
    flags = ("--tls-ca", "--tls-certificate", "--tls-key")
    names = ("ca.pem", f"{name}.pem", f"{name}-key.pem")
    return tuple(
        part for flag, file in zip(flags, names, strict=True) for part in (flag, folder / file)
    )


def expire(folder: Path, name: str) -> None:
    """Put a certificate in the place of ``name``'s that the authority let end yesterday."""
    key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), password=None)
    own = serialization.load_pem_private_key((folder / f"{name}-key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(ca.subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=3))
        .not_valid_after(now - dt.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def assert_refused(process: Process, code: str) -> None:
    """Hold that a device ended by a named error."""
    assert process.wait(seconds=30) in (1, 2), process.text()
    assert f"{code}: " in process.text()
    assert_tidy(process)


@pytest.mark.slow
def test_a_run_with_certificates_that_init_made(tmp_path: Path) -> None:
    certs, task = tmp_path / "certs", write_task(tmp_path).spec
    with Processes(tmp_path) as processes:
        names = ("--client", "0", "--client", "1")
        processes.run("server", "init", "--folder", certs, *names).succeed()
        settings = ("--rounds", 2, "--min-clients", 2, *files(certs, "server"))
        server = processes.server(*settings, task=task)
        clients = [
            processes.client(port_of(server), i, *files(certs, str(i)), task=task) for i in range(2)
        ]
        for process in (server, *clients):
            process.succeed()
        assert "mutual TLS" in server.text()


@pytest.mark.slow
def test_only_the_device_that_a_certificate_was_made_for_is_let_in(tmp_path: Path) -> None:
    certs, others, task = tmp_path / "certs", tmp_path / "others", write_task(tmp_path).spec
    make_certificates(certs, hosts=HOSTS, clients=["0", "1"])
    make_certificates(others, hosts=HOSTS, clients=["0"])
    (others / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 1, *files(certs, "server"), task=task)
        port = port_of(server)
        foreign = processes.client(port, 0, *SHORT, *files(others, "0"), task=task)
        plain = processes.client(port, 0, *SHORT, task=task)
        borrowed = processes.client(port, 0, *SHORT, *files(certs, "1"), task=task)
        wrong_kind = processes.client(port, 0, *SHORT, *files(certs, "server"), task=task)
        assert_refused(foreign, "ConnectionLost")
        assert_refused(plain, "ConnectionLost")
        assert_refused(borrowed, "IdentityRefused")
        assert "the certificate is that of '1', not of '0'" in borrowed.text()
        assert_refused(wrong_kind, "ConnectionLost")
        assert server.poll() is None
        processes.client(port, 0, *files(certs, "0"), task=task).succeed()
        assert server.wait() == 0
        assert_tidy(server)


@pytest.mark.slow
def test_a_server_of_another_authority_is_not_trusted(tmp_path: Path) -> None:
    certs, others, task = tmp_path / "certs", tmp_path / "others", write_task(tmp_path).spec
    make_certificates(certs, hosts=HOSTS, clients=["0"])
    make_certificates(others, hosts=HOSTS, clients=[])
    make_certificates(tmp_path / "elsewhere", hosts=["example.org"], clients=["0"])
    with Processes(tmp_path) as processes:
        server = processes.server(*files(others, "server"), task=task)
        misled = processes.client(port_of(server), 0, *SHORT, *files(certs, "0"), task=task)
        elsewhere = tmp_path / "elsewhere"
        named = processes.server(
            *files(elsewhere, "server"), "--out", tmp_path / "second", task=task
        )
        wrong = processes.client(port_of(named), 0, *SHORT, *files(elsewhere, "0"), task=task)
        assert_refused(misled, "ConnectionLost")
        assert_refused(wrong, "ConnectionLost")


def credentials_of(folder: Path, name: str) -> Credentials:
    """Read a side's three files without a look at their dates."""
    ca, certificate, key = (folder / f for f in ("ca.pem", f"{name}.pem", f"{name}-key.pem"))
    return Credentials(
        ca=ca.read_bytes(), certificate=certificate.read_bytes(), key=key.read_bytes()
    )


def test_a_second_connection_with_the_same_certificate_displaces_the_first(tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=HOSTS, clients=["0"])
    own = credentials_of(tmp_path, "0")

    async def play() -> None:
        async with (
            serving(credentials=credentials_of(tmp_path, "server")) as run,
            RawDevice(run.port, "0", credentials=own) as first,
            RawDevice(run.port, "0", credentials=own) as second,
        ):
            await first.enter()
            await second.enter()
            assert await first.refused() == "IdentityRefused"
            run.begin()
            await second.describe()
            await second.update(await second.plan())
            await run.end()

    asyncio.run(play())


def test_the_server_lets_no_expired_certificate_in(tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=HOSTS, clients=["0"])
    expire(tmp_path, "0")

    async def play() -> None:
        async with serving(credentials=credentials_of(tmp_path, "server")) as run:
            expired = credentials_of(tmp_path, "0")
            async with RawDevice(run.port, "0", credentials=expired) as device:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await device.enter()
            assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
            assert run.intake.connected() == []

    asyncio.run(play())


def tls_of(folder: Path, name: str) -> Tls:
    return Tls(
        ca=folder / "ca.pem", certificate=folder / f"{name}.pem", key=folder / f"{name}-key.pem"
    )


def test_keys_are_for_their_owners_eyes_only(tmp_path: Path) -> None:
    (tmp_path / "0-key.pem").write_text("left here by somebody")
    (tmp_path / "0-key.pem").chmod(0o644)
    make_certificates(tmp_path, hosts=HOSTS, clients=["0"])
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.glob("*-key.pem")}
    assert modes == {"ca-key.pem": 0o600, "server-key.pem": 0o600, "0-key.pem": 0o600}


def test_devices_can_be_added_later_and_nobody_elses_files_change(tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=HOSTS, clients=["0"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    written = make_certificates(tmp_path, hosts=HOSTS, clients=["0", "1"])
    assert {path.name for path in written} == {"1.pem", "1-key.pem"}
    assert {path: path.read_bytes() for path in before} == before
    assert read_credentials(tls_of(tmp_path, "1")) is not None


def test_a_new_host_gets_the_server_a_new_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=HOSTS, clients=[])
    written = make_certificates(tmp_path, hosts=[*HOSTS, "10.0.0.7"], clients=[])
    assert {path.name for path in written} == {"server.pem", "server-key.pem"}
    assert read_credentials(tls_of(tmp_path, "server")) is not None


@pytest.mark.parametrize("name", ["ca", "server", "../0", "", "a b", "x" * 65, "ca-key"])
def test_a_name_that_would_overwrite_or_cannot_stand_in_a_certificate(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="name"):
        make_certificates(tmp_path / "certs", hosts=HOSTS, clients=[name])
    assert list(tmp_path.rglob("*.pem")) == []


def test_an_authority_whose_key_was_taken_away_is_not_replaced(tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=HOSTS, clients=[])
    (tmp_path / "ca-key.pem").unlink()
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(CertificateProblem, match=r"ca-key\.pem"):
        make_certificates(tmp_path, hosts=HOSTS, clients=["0"])
    assert (tmp_path / "ca.pem").read_bytes() == before


def test_an_expired_certificate_is_named_before_anything_is_connected(tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=HOSTS, clients=["0"])
    expire(tmp_path, "0")
    with pytest.raises(CertificateProblem, match="expired on"):
        read_credentials(tls_of(tmp_path, "0"))


def test_the_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=HOSTS, clients=["0", "1"])
    mixed = tls_of(tmp_path, "0").model_copy(update={"key": tmp_path / "1-key.pem"})
    with pytest.raises(CertificateProblem, match="is not the key of"):
        read_credentials(mixed)


@pytest.mark.parametrize("missing", ["ca", "certificate", "key"])
def test_one_tls_file_without_the_others_is_an_error(missing: str, tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=HOSTS, clients=["0"])
    partial = tls_of(tmp_path, "0").model_copy(update={missing: None})
    with pytest.raises(SettingsError, match=f"--tls-{missing} is missing"):
        read_credentials(partial)


@pytest.mark.parametrize("file", ["ca.pem", "0.pem", "0-key.pem"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"\xff\x00"])
def test_a_tls_file_that_cannot_be_read_is_named(
    file: str, content: bytes | None, tmp_path: Path
) -> None:
    make_certificates(tmp_path, hosts=HOSTS, clients=["0"])
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(CertificateProblem):
        read_credentials(tls_of(tmp_path, "0"))


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:65536", "h:-1"])
def test_an_address_must_be_host_and_port(address: str) -> None:
    with pytest.raises(SettingsError, match="HOST:PORT"):
        tls.split_address(address)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("127.0.0.1.example.org", False),
        ("localhost.example.org", False),
    ],
)
def test_loopback_is_this_machine_and_nothing_that_looks_like_it(host: str, expected: bool) -> None:
    assert tls.is_loopback(host) is expected
