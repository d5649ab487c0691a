"""Strangers at the port of the metrics: slow ones, and sites of other names."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from headwater.common.system import metrics_server
from headwater.common.system.metrics_server import PATH, MetricsServer

pytestmark = pytest.mark.slow

WAIT_SECONDS = 30.0


@pytest.fixture
def port() -> Iterator[int]:
    server = MetricsServer("127.0.0.1:0", CollectorRegistry())
    yield server.port
    server.close()


@contextlib.contextmanager
def dripping(port: int) -> Iterator[socket.socket]:
    """Send a request that never ends, a byte at a time."""
    must_end = threading.Event()
    with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as connection:

        def drip() -> None:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET ")
                while not must_end.wait(0.05):
                    connection.sendall(b"/")

        thread = threading.Thread(target=drip)
        thread.start()
        yield connection
        must_end.set()
        thread.join()


def status(port: int, host: str = "localhost") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", PATH, headers={"Host": host})
        return connection.getresponse().status


def test_a_request_that_drips_stops_no_scrape(port: int) -> None:
    with dripping(port):
        assert status(port) == 200


def test_requests_that_drip_hold_few_connections_and_end(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(dripping(port)) for _ in range(metrics_server.MAX_REQUESTS)]
        with dripping(port) as one_more, contextlib.suppress(ConnectionError):
            assert one_more.recv(1) == b""
        for connection in held:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
        assert status(port) == 200


def test_on_loopback_another_site_s_name_is_refused(port: int) -> None:
    """A web site that resolves its own name to 127.0.0.1 could read the metrics."""
    assert [status(port, host) for host in ("evil.example", "127.0.0.1.evil.example:80")] == [
        400
    ] * 2
    assert {status(port, host) for host in ("localhost", "127.0.0.1:9464", "[::1]")} == {200}
