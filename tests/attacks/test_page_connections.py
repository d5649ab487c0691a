"""Strangers at the page's port, and foreign sites in the operator's browser."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from headwater.common.settings.schema import Settings
from headwater.server.enrolment.authority import make_authority
from headwater.server.page import connections, hub
from headwater.server.page.page_server import page_of, serving
from headwater.server.page.run_view import RunView
from tests.certificates import credentials_of
from tests.round_rows import row

pytestmark = pytest.mark.slow

WAIT_SECONDS = 60
SILENT_SECONDS = 1.0  # far more than an honest browser needs, even on a busy machine
NUM_LARGE_BYTES = 30 * 2**20


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


def test_one_address_holds_a_part_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_OF_ADDRESS", 3)
    monkeypatch.setattr(connections, "SILENT_SECONDS", 2.0 * WAIT_SECONDS)
    with page_of(RunView(Settings()), "127.0.0.1:0") as link, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(stranger(link))
        assert is_hung_up(stack.enter_context(stranger(link)))
        port = urlsplit(link).port or 0
        own = HTTPConnection("127.0.0.1", port, WAIT_SECONDS, source_address=("127.0.0.2", 0))
        with closing(own):
            own.request("GET", "/state")
            assert own.getresponse().status == 200


def test_pages_that_open_at_once_are_counted_before_any_is_answered() -> None:
    """Twenty at once passed a limit of 16, which counted those that were already answered."""
    num_pages = hub.MAX_LISTENERS + 4

    async def play(link: str) -> list[int]:
        async with httpx.AsyncClient(timeout=WAIT_SECONDS) as client, AsyncExitStack() as stack:

            async def open_page() -> int:
                answer = await stack.enter_async_context(client.stream("GET", f"{link}changes"))
                return answer.status_code

            return await asyncio.gather(*(open_page() for _ in range(num_pages)))

    with page_of(RunView(Settings()), "127.0.0.1:0") as link:
        answers = Counter(asyncio.run(play(link)))
    assert answers == {200: hub.MAX_LISTENERS, 503: 4}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=lambda headers: " ".join(*headers.items()),
)
def test_a_foreign_site_opens_no_stream_of_the_page(headers: dict[str, str]) -> None:
    """With 16 of them the operator got 503."""
    with page_of(RunView(Settings()), "127.0.0.1:0") as link:
        with httpx.stream("GET", f"{link}changes", headers=headers) as answer:
            assert answer.status_code == 403
            assert answer.read().startswith(b"another site")
        own = {"Origin": link.rstrip("/"), "Sec-Fetch-Site": "same-origin"}
        assert httpx.get(f"{link}state", headers=own).status_code == 200
        assert httpx.get(link, headers=headers).status_code == 200, "a link to the page"


def test_who_asks_for_nothing_is_hung_up_on_and_an_open_page_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", SILENT_SECONDS)
    monkeypatch.setattr(hub, "TICK_SECONDS", 0.01)
    view = RunView(Settings())
    with (
        page_of(view, "127.0.0.1:0") as link,
        httpx.stream("GET", f"{link}changes", timeout=WAIT_SECONDS) as page,
    ):
        lines = page.iter_lines()
        assert next(lines) == "event: all"
        for number in range(1, 4):
            with stranger(link) as silent, stranger(link) as slow:
                slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
                assert is_hung_up(silent)
                assert is_hung_up(slow)
            view.on_round(row(number))
            while f'"num_points":{number}' not in next(lines):
                pass


async def large_answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with more than the kernel buffers of a connection hold."""
    await PlainTextResponse(bytes(NUM_LARGE_BYTES))(scope, receive, send)


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_slow_reader_gets_the_whole_of_an_answer(
    has_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", SILENT_SECONDS)
    make_authority(tmp_path, hosts=["127.0.0.1"])
    credentials = credentials_of(tmp_path, "server") if has_tls else None
    own = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    num_bytes = 0
    with (
        serving(large_answer, "127.0.0.1:0", credentials) as link,
        httpx.stream("GET", link, timeout=WAIT_SECONDS, verify=own) as answer,
    ):
        for piece in answer.iter_bytes(NUM_LARGE_BYTES // 30):
            num_bytes += len(piece)
            time.sleep(SILENT_SECONDS / 10)  # a slow line, for three times the limit
    assert num_bytes == NUM_LARGE_BYTES


def test_who_never_reads_an_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", SILENT_SECONDS)
    num_bytes = 0
    with serving(large_answer, "127.0.0.1:0", None) as link, stranger(link) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(3):  # the browser's time is over before the third of these is hung up on
            with stranger(link) as later:
                assert is_hung_up(later)
        with suppress(ConnectionError):
            while piece := browser.recv(2**20):
                num_bytes += len(piece)
    assert num_bytes < NUM_LARGE_BYTES


def test_a_connection_in_use_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", SILENT_SECONDS)
    with page_of(RunView(Settings()), "127.0.0.1:0") as link:
        browser = HTTPConnection(urlsplit(link).netloc, timeout=WAIT_SECONDS)
        browser.connect()
        browser.auto_open = 0  # a connection that is lost is an error
        with closing(browser):
            for _ in range(30):
                browser.request("GET", "/state")
                assert browser.getresponse().read()
                time.sleep(SILENT_SECONDS / 10)  # use for three times the limit


def test_no_connection_is_accepted_once_the_end_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", 2.0 * WAIT_SECONDS)
    has_request, may_answer = threading.Event(), threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/long":
            has_request.set()
            await asyncio.to_thread(may_answer.wait, WAIT_SECONDS)
        await PlainTextResponse("done")(scope, receive, send)

    page = ExitStack()
    link = page.enter_context(serving(app, "127.0.0.1:0", None))
    end = threading.Thread(target=page.close)
    with stranger(link) as idle, stranger(link) as busy:
        busy.sendall(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert has_request.wait(WAIT_SECONDS)
        end.start()
        assert is_hung_up(idle), "the end has begun"
        with stranger(link) as late:
            late.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            may_answer.set()
            assert is_hung_up(late)
    end.join()
