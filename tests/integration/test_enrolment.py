"""headwater-client join over real sockets: which devices get a certificate, and which errors."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import stat
import threading
import time
from pathlib import Path

import pytest

from headwater.client.commands import join_with
from headwater.client.enrolment.join import TOKEN_FILE, join
from headwater.common.errors import (
    AuthorityMismatch,
    CertificateProblem,
    ClockWrong,
    ConnectionLost,
    EnrolmentClosed,
    JoinTokenExpired,
    JoinTokenUnknown,
    JoinTokenUsed,
    ProtocolMismatch,
)
from headwater.common.transport.join_token import JoinToken
from headwater.common.transport.tls import Credentials
from headwater.server.enrolment.authority import Authority
from tests.certificates import (
    make_folder,
    put_signed,
    revoke,
    token_for,
)
from tests.enrolment import STREAM_PORT, enrolment, is_open, token_at
from tests.processes import (
    until,
)
from tests.task_bundles.bundles import new_key


def test_a_device_joins_with_its_own_key(tmp_path: Path) -> None:
    certs, device = make_folder(tmp_path / "certs"), tmp_path / "device"
    with enrolment(certs) as port:
        joined = join(token_at(certs, port.port), device)
    assert joined.name == "pi"
    assert f"127.0.0.1:{STREAM_PORT}" in (device / "client.toml").read_text()
    assert abs(joined.clock_off_seconds) < 60
    files = {"ca.pem", "device.pem", "client.toml", TOKEN_FILE}
    assert {path.name for path in device.iterdir()} == files
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


def test_the_port_is_open_only_while_a_token_is_valid(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        assert not is_open(port.port)
        # Another server's token, as one of this server would open the port for a moment.
        others = token_for(make_folder(tmp_path / "others"), "pi", address=f"127.0.0.1:{port.port}")
        with pytest.raises(EnrolmentClosed):
            join(others, tmp_path / "device")
        token_at(certs, port.port)
        revoke(certs, "pi")
        until(lambda: not is_open(port.port), what=lambda: "the port to close")


def test_a_token_admits_one_device_only(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        token = token_at(certs, port.port)
        join(token, tmp_path / "first")
        with pytest.raises(JoinTokenUsed):
            join(token, tmp_path / "second")
    assert port.refusals["JoinTokenUsed"] == 1
    assert not (tmp_path / "second" / "device.pem").exists()


def test_a_device_that_repeats_its_join_is_told_and_alarms_nobody(tmp_path: Path) -> None:
    certs, device = make_folder(tmp_path / "certs"), tmp_path / "device"
    with enrolment(certs) as port:
        token = token_at(certs, port.port)
        first = join(token, device)
        again = join(token, device)
    assert (first.is_new, again.is_new) == (True, False)
    assert again.expires_at == first.expires_at
    assert "JoinTokenUsed" not in port.refusals


def test_a_repeated_join_says_that_it_writes_no_other_signer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs, device = make_folder(tmp_path / "certs"), tmp_path / "device"
    (_, first), (_, other) = (new_key(tmp_path / name) for name in ("first.key", "other.key"))
    with enrolment(certs) as port:
        (tmp_path / "token").write_text(token_at(certs, port.port).encode())
        for trust in (first, first, other):
            assert "is not written" not in "".join(capsys.readouterr())
            join_with(tmp_path / "token", device, trust=trust, has_argument=False)
    said = " ".join("".join(capsys.readouterr()).split())
    assert f"--trust is not written to {device / 'client.toml'}" in said
    assert first in (device / "client.toml").read_text()


def test_a_join_whose_answer_was_lost_continues_with_the_same_key(tmp_path: Path) -> None:
    certs, device = make_folder(tmp_path / "certs"), tmp_path / "device"
    with enrolment(certs) as port:
        token = token_at(certs, port.port)
        (device / "client.toml").mkdir(parents=True)  # what came cannot be kept
        with pytest.raises(CertificateProblem):
            join(token, device)
        (device / "client.toml").rmdir()
        assert join(token, device).name == "pi"


def test_an_expired_token_is_named(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        late = token_for(certs, "pi", address=f"127.0.0.1:{port.port}", valid=-1)
        with pytest.raises(JoinTokenExpired, match="no server listens"):
            join(late, tmp_path / "device")
        token_at(certs, port.port, "laptop")
        with pytest.raises(JoinTokenExpired, match="the join token of pi expired"):
            join(late, tmp_path / "device")


def test_a_token_is_valid_for_its_name_only(tmp_path: Path) -> None:
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


def test_a_server_of_another_authority_is_named_and_learns_nothing(tmp_path: Path) -> None:
    certs, evil = make_folder(tmp_path / "certs"), make_folder(tmp_path / "evil")
    with enrolment(evil) as port:
        token_at(evil, port.port)
        mine = token_for(certs, "pi", address=f"127.0.0.1:{port.port}")
        with pytest.raises(AuthorityMismatch, match="the token names"):
            join(mine, tmp_path / "device")
    assert "JoinTokenUnknown" not in port.refusals


def test_an_impostor_with_the_right_authority_certificate_learns_no_secret(
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
def test_a_clock_outside_the_server_certificates_dates_is_named(
    days: tuple[float, float], tmp_path: Path
) -> None:
    certs = make_folder(tmp_path / "certs")
    put_signed(certs, "server", days=days)
    (certs / "server-key.pem").write_bytes((certs / "server.pem").read_bytes())
    with enrolment(certs) as port, pytest.raises(ClockWrong, match=r"this machine.s clock"):
        join(token_at(certs, port.port), tmp_path / "device")


def test_a_server_certificate_for_another_host_is_named(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs", hosts=["example.org"])
    with (
        enrolment(certs) as port,
        pytest.raises(CertificateProblem, match=r"is for example\.org, not for"),
    ):
        join(token_at(certs, port.port), tmp_path / "device")


def test_another_kind_of_port_is_named(tmp_path: Path) -> None:
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


def test_an_unresolvable_name_is_a_lost_connection(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with pytest.raises(ConnectionLost, match="cannot be reached"):
        join(token_for(certs, "pi", address="nowhere.invalid:8501"), tmp_path / "device")


def test_a_folder_with_another_devices_files_is_not_changed(tmp_path: Path) -> None:
    certs, device = make_folder(tmp_path / "certs"), tmp_path / "device"
    with enrolment(certs) as port:
        join(token_at(certs, port.port, "pi"), device)
        before = (device / "device.pem").read_bytes()
        with pytest.raises(CertificateProblem, match="the certificate of pi"):
            join(token_at(certs, port.port, "laptop"), device)
    assert (device / "device.pem").read_bytes() == before
