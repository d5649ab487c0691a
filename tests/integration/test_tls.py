"""Mutual TLS: who is let in, who is not, and what each of them is told."""

from __future__ import annotations

import stat
from pathlib import Path

import grpc
import grpc.aio
import pytest

from headwater.common.errors import CertificateProblem, SettingsError
from headwater.common.transport import tls
from headwater.common.transport.tls import read_credentials
from headwater.server.enrolment.authority import make_authority
from tests.attacks.raw import RawDevice, serving
from tests.certificates import (
    HOSTS,
    credentials_of,
    files,
    make_folder,
    put_signed,
    tls_of,
)
from tests.processes import Process, Processes, assert_tidy, port_of, write_task

SHORT = ("--patience", 1.5)


def assert_refused(process: Process, code: str) -> None:
    """Hold that a device ended by a named error."""
    assert process.wait() in (1, 2), process.text()
    assert f"{code}: " in process.text()
    assert_tidy(process)


@pytest.mark.slow
def test_only_the_device_that_a_certificate_was_made_for_is_let_in(tmp_path: Path) -> None:
    certs, others, task = tmp_path / "certs", tmp_path / "others", write_task(tmp_path).spec
    make_folder(certs, "0", "1")
    make_folder(others, "0")
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
        assert "the server may want TLS: --tls-ca" in plain.text()
        assert_refused(borrowed, "IdentityRefused")
        assert "the certificate is for '1', not for '0'" in borrowed.text()
        assert_refused(wrong_kind, "ConnectionLost")
        assert server.poll() is None
        processes.client(port, 0, *files(certs, "0"), task=task).succeed()
        assert server.wait() == 0
        assert_tidy(server)


@pytest.mark.slow
def test_a_server_of_another_authority_or_without_tls_is_not_trusted(tmp_path: Path) -> None:
    certs, others, task = tmp_path / "certs", tmp_path / "others", write_task(tmp_path).spec
    make_folder(certs, "0")
    make_folder(others)
    make_folder(tmp_path / "elsewhere", "0", hosts=["example.org"])
    with Processes(tmp_path) as processes:
        server = processes.server(*files(others, "server"), task=task)
        misled = processes.client(port_of(server), 0, *SHORT, *files(certs, "0"), task=task)
        elsewhere = tmp_path / "elsewhere"
        named = processes.server(
            *files(elsewhere, "server"), "--out", tmp_path / "second", task=task
        )
        wrong = processes.client(port_of(named), 0, *SHORT, *files(elsewhere, "0"), task=task)
        open_to_all = processes.server("--out", tmp_path / "third", task=task)
        secured = processes.client(port_of(open_to_all), 0, *SHORT, *files(certs, "0"), task=task)
        assert_refused(misled, "ConnectionLost")
        assert_refused(wrong, "ConnectionLost")
        assert_refused(secured, "ConnectionLost")
        assert "the server may be without TLS" in secured.text()


async def test_a_second_connection_with_the_same_certificate_displaces_the_first(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path, "0")
    own = credentials_of(tmp_path, "0")
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


async def test_the_server_lets_no_expired_certificate_in(tmp_path: Path) -> None:
    make_folder(tmp_path)
    put_signed(tmp_path, "0", days=(-3, -1))
    async with serving(credentials=credentials_of(tmp_path, "server")) as run:
        expired = credentials_of(tmp_path, "0")
        async with RawDevice(run.port, "0", credentials=expired) as device:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await device.enter()
        assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
        assert run.servicer.connected() == []


def test_keys_are_for_their_owners_eyes_only(tmp_path: Path) -> None:
    (tmp_path / "server-key.pem").write_text("left here by somebody")
    (tmp_path / "server-key.pem").chmod(0o644)
    make_folder(tmp_path, "0")
    private = ("ca-key.pem", "server-key.pem", "0.pem", "registry.sqlite")
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in private}
    assert modes == dict.fromkeys(private, 0o600)


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    make_authority(tmp_path, hosts=HOSTS)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert make_authority(tmp_path, hosts=HOSTS) == []
    assert {path: path.read_bytes() for path in before} == before


def test_a_new_host_gets_the_server_a_new_certificate_that_has_the_old_ones_too(
    tmp_path: Path,
) -> None:
    make_authority(tmp_path, hosts=HOSTS)
    written = make_authority(tmp_path, hosts=["10.0.0.7"])
    assert {path.name for path in written} == {"server.pem", "server-key.pem"}
    assert make_authority(tmp_path, hosts=[*HOSTS, "10.0.0.7"]) == []
    assert read_credentials(tls_of(tmp_path, "server")) is not None


def put_server_certificate(folder: Path, *, days: tuple[float, float]) -> None:
    """Put one in the server's place that differs from its own in its dates alone."""
    put_signed(folder, "server", days=days)
    both = (folder / "server.pem").read_bytes()
    (folder / "server-key.pem").write_bytes(both)


@pytest.mark.parametrize("days", [(-9, -1), (-500, 1)], ids=["expired", "in its last third"])
def test_init_makes_an_old_server_certificate_anew(
    days: tuple[float, float], tmp_path: Path
) -> None:
    make_authority(tmp_path, hosts=HOSTS)
    put_server_certificate(tmp_path, days=days)
    written = make_authority(tmp_path, hosts=[])
    assert {path.name for path in written} == {"server.pem", "server-key.pem"}
    assert read_credentials(tls_of(tmp_path, "server")) is not None


def test_a_young_server_certificate_is_kept(tmp_path: Path) -> None:
    make_authority(tmp_path, hosts=HOSTS)
    put_server_certificate(tmp_path, days=(-1, 500))
    assert make_authority(tmp_path, hosts=["127.0.0.1"]) == []


def test_a_server_certificate_of_another_authority_is_made_anew(tmp_path: Path) -> None:
    make_authority(tmp_path / "a", hosts=HOSTS)
    make_authority(tmp_path / "b", hosts=HOSTS)
    for name in ("server.pem", "server-key.pem"):
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    assert len(make_authority(tmp_path / "a", hosts=HOSTS)) == 2


def test_an_authority_whose_key_was_taken_away_is_not_replaced(tmp_path: Path) -> None:
    make_authority(tmp_path, hosts=HOSTS)
    (tmp_path / "ca-key.pem").unlink()
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(CertificateProblem, match=r"ca-key\.pem"):
        make_authority(tmp_path, hosts=HOSTS)
    assert (tmp_path / "ca.pem").read_bytes() == before


def test_an_expired_certificate_is_named_before_anything_is_connected(tmp_path: Path) -> None:
    make_folder(tmp_path)
    put_signed(tmp_path, "0", days=(-3, -1))
    with pytest.raises(CertificateProblem, match="expired on"):
        read_credentials(tls_of(tmp_path, "0"))


def test_the_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path, "0", "1")
    mixed = tls_of(tmp_path, "0").model_copy(update={"key": tmp_path / "1.pem"})
    with pytest.raises(CertificateProblem, match="is not the key of"):
        read_credentials(mixed)


@pytest.mark.parametrize("missing", ["ca", "certificate", "key"])
def test_one_tls_file_without_the_others_is_an_error(missing: str, tmp_path: Path) -> None:
    make_folder(tmp_path, "0")
    partial = tls_of(tmp_path, "0").model_copy(update={missing: None})
    with pytest.raises(SettingsError, match=f"--tls-{missing} is missing"):
        read_credentials(partial)


@pytest.mark.parametrize("file", ["ca.pem", "0.pem"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"\xff\x00"])
def test_a_tls_file_that_cannot_be_read_is_named(
    file: str, content: bytes | None, tmp_path: Path
) -> None:
    make_folder(tmp_path, "0")
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
    ("address", "remedy"),
    [
        (":::8500", "[::]:8500"),
        ("::1:8500", "[::1]:8500"),
        ("fd00::1:8500", "[fd00::1]:8500"),
        ("[::1]", "after the bracket"),
        ("http://river.example.org", "the host and the port alone"),
        ("http://river.example.org:8500", "the host and the port alone"),
        ("river.example.org", "river.example.org:8500"),
    ],
)
def test_an_address_in_another_form_is_refused_with_the_right_one(
    address: str, remedy: str
) -> None:
    with pytest.raises(SettingsError) as found:
        tls.split_address(address)
    assert remedy in found.value.remedy


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
