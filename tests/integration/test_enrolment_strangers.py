"""Strangers at the enrolment port."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from pathlib import Path

import pytest

from headwater.client.enrolment.join import PATIENCE_SECONDS, WAIT_SECONDS, join
from headwater.common.errors import PortInUse, TooManyAttempts
from headwater.server.enrolment.enrolment_port import EnrolmentPort
from tests.certificates import (
    make_folder,
)
from tests.enrolment import enrolment, tls_to, token_at
from tests.processes import (
    until,
)


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
        until(lambda: port.refusals.total() >= before + 5, what=lambda: "refusals")
        assert set(port.refusals) == {"ProtocolMismatch"}
        assert join(token, tmp_path / "device").name == "pi"


def test_an_address_that_connects_too_often_gets_no_handshake(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        token_at(certs, port.port)

        def is_refused() -> bool:
            with socket.create_connection(("127.0.0.1", port.port), 20):
                return port.refusals["TooManyAttempts"] >= 5

        until(is_refused, what=lambda: str(port.refusals))


@pytest.mark.slow
def test_a_join_that_is_turned_away_with_others_of_its_address_waits_and_joins(
    tmp_path: Path,
) -> None:
    certs, waits = make_folder(tmp_path / "certs"), list[float]()
    with enrolment(certs) as port:
        token = token_at(certs, port.port)

        def is_refused() -> bool:
            with socket.create_connection(("127.0.0.1", port.port), 20):
                return port.refusals["TooManyAttempts"] >= 1

        def wait(seconds: float) -> None:
            waits.append(seconds)
            time.sleep(0.5)  # the port takes one more connection every two seconds

        until(is_refused, what=lambda: str(port.refusals))
        assert join(token, tmp_path / "device", wait=wait).name == "pi"
    assert waits


def test_a_join_that_is_turned_away_for_good_gives_up(tmp_path: Path) -> None:
    certs, waits = make_folder(tmp_path / "certs"), list[float]()
    with enrolment(certs) as port:
        token = token_at(certs, port.port)

        def connect_more(seconds: float) -> None:
            waits.append(seconds)
            for _ in range(4):
                socket.create_connection(("127.0.0.1", port.port), 20).close()

        while port.refusals["TooManyAttempts"] < 5:
            socket.create_connection(("127.0.0.1", port.port), 20).close()
        with pytest.raises(TooManyAttempts):
            join(token, tmp_path / "device", wait=connect_more)
    assert PATIENCE_SECONDS <= sum(waits) < PATIENCE_SECONDS + WAIT_SECONDS[1]


def test_the_enrolment_port_requires_tls_1_3(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        token_at(certs, port.port)
        here = ("127.0.0.1", port.port)
        with pytest.raises(ssl.SSLError):
            tls_to(here, version=ssl.TLSVersion.TLSv1_2)
        with tls_to(here) as secure:
            assert secure.version() == "TLSv1.3"


def test_a_port_in_use_is_named_at_once(tmp_path: Path) -> None:
    certs = make_folder(tmp_path / "certs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = EnrolmentPort(certs, f"127.0.0.1:{taken.getsockname()[1]}", stream_port=1)
        with pytest.raises(PortInUse):
            port.start()
        port.stop()
