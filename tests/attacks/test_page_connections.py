"""Strangers at the page's port, without its token: they cost the run no file descriptors."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from headwater.common.settings.schema import Settings
from headwater.server.enrolment.authority import make_authority
from headwater.server.page import connections, hub
from headwater.server.page.page_server import page_of
from headwater.server.page.run_view import RunView
from tests.certificates import credentials_of
from tests.round_rows import row

pytestmark = pytest.mark.slow

WAIT_SECONDS = 60


def stranger(link: str) -> socket.socket:
    """Connect, and say nothing."""
    address = urlsplit(link)
    return socket.create_connection((address.hostname, address.port or 0), timeout=WAIT_SECONDS)


def is_hung_up(connection: socket.socket) -> bool:
    """Wait for the server to close a connection; False if it does not."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_strangers_hold_a_limited_number_of_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(connections, "SILENT_SECONDS", 2.0 * WAIT_SECONDS)
    make_authority(tmp_path, hosts=["127.0.0.1"])
    credentials = credentials_of(tmp_path, "server")
    with page_of(RunView(Settings()), "0.0.0.0:0", credentials) as link, ExitStack() as stack:
        link = link.replace("0.0.0.0", "127.0.0.1")
        for _ in range(3):
            stack.enter_context(stranger(link))
        assert is_hung_up(stack.enter_context(stranger(link)))


def test_who_asks_for_nothing_is_hung_up_on_and_an_open_page_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(hub, "TICK_SECONDS", 0.01)
    view = RunView(Settings())
    with (
        page_of(view, "127.0.0.1:0") as link,
        httpx.stream("GET", f"{link}changes", timeout=WAIT_SECONDS) as page,
    ):
        lines = page.iter_lines()
        assert next(lines) == "event: all"
        for number in range(1, 4):
            with stranger(link) as silent:
                assert is_hung_up(silent)
            with stranger(link) as slow:
                slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
                assert is_hung_up(slow)
            view.on_round(row(number))
            while f'"num_points":{number}' not in next(lines):
                pass
