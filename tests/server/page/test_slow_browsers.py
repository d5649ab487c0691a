"""Browsers that stop reading or vanish: the rounds and the other browsers do not wait for them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from headwater.common.messages import DeviceReport
from headwater.common.settings.schema import Settings
from headwater.server.page import hub
from headwater.server.page.page_server import page_of
from headwater.server.page.run_view import RunView
from tests.round_rows import row

pytestmark = pytest.mark.slow

WAIT_SECONDS = 120
NAMES = [f"device-{n}" for n in range(1000)]


class Watched:
    """Whether a page is open, as the run learns it."""

    def __init__(self) -> None:
        self.has_opened, self.has_closed = threading.Event(), threading.Event()

    def __call__(self, is_watched: bool) -> None:
        (self.has_opened if is_watched else self.has_closed).set()


@contextmanager
def browser_that_reads_nothing(link: str) -> Iterator[socket.socket]:
    """Ask for the stream of changes with the smallest buffer, and leave what comes unread."""
    address = urlsplit(link)
    with socket.socket() as browser:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        browser.connect((address.hostname, address.port))
        browser.sendall(f"GET /changes HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
        yield browser


def view_of(watched: Watched) -> RunView:
    view = RunView(Settings(), watch=watched)
    view.begun(1, {n: DeviceReport(name=n, num_examples=5, layout_digest="x") for n in NAMES})
    return view


def test_rounds_and_other_browsers_go_on_beside_one_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "TICK_SECONDS", 0.01)
    watched = Watched()
    view = view_of(watched)
    with page_of(view, "127.0.0.1:0") as link, browser_that_reads_nothing(link):
        assert watched.has_opened.wait(WAIT_SECONDS)
        with httpx.stream("GET", f"{link}changes", timeout=WAIT_SECONDS) as reader:
            lines = reader.iter_lines()
            for number in range(1, 31):  # each is some 300 kB for the browser that does not read
                view.on_round(row(number, *NAMES))
                while number != shown_round(lines):
                    pass


def shown_round(lines: Iterator[str]) -> int:
    """Return the round of the next state that a browser is sent."""
    text = next(line for line in lines if line.startswith("data: "))
    found: int = json.loads(text.removeprefix("data: "))["status"]["round"]
    return found


def test_a_browser_that_vanishes_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TICK_SECONDS", 0.01)
    watched = Watched()
    with page_of(view_of(watched), "127.0.0.1:0") as link:
        with browser_that_reads_nothing(link) as browser:
            assert watched.has_opened.wait(WAIT_SECONDS)
            browser.recv(1)
        assert watched.has_closed.wait(WAIT_SECONDS)
