"""The metrics server: which addresses are allowed, and what strangers can do."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from headwater.common.errors import InsecureAddress, PortInUse, SettingsError
from headwater.common.system import metrics_server
from headwater.common.system.metrics_server import MetricsServer, check_metrics_address


@pytest.fixture
def port() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("answer", "to all", registry=registry).set(42)
    opened = MetricsServer("127.0.0.1:0", registry)
    yield opened
    opened.close()


def get(port: MetricsServer, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port.port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.slow
def test_the_page_shows_the_registry(port: MetricsServer) -> None:
    status, page = get(port, "/metrics")
    assert status == 200
    assert "answer 42.0" in page.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/", "GET", 404), ("/metrics/../etc/passwd", "GET", 404), ("/metrics", "POST", 501)],
)
def test_other_paths_and_methods_are_refused(
    port: MetricsServer, path: str, method: str, status: int
) -> None:
    assert get(port, path, method)[0] == status


@pytest.mark.slow
def test_a_stalled_connection_is_closed_and_the_next_is_answered(
    port: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", port.port)) as connection:
        connection.sendall(b"GET /met")
        assert get(port, "/metrics")[0] == 200


@pytest.mark.slow
def test_a_port_in_use_is_named(port: MetricsServer) -> None:
    with pytest.raises(PortInUse, match=str(port.port)):
        MetricsServer(f"127.0.0.1:{port.port}", CollectorRegistry())


@pytest.mark.parametrize("address", ["0.0.0.0:9100", "192.168.3.4:9100", "[::]:9100"])
def test_metrics_on_another_address_than_loopback_need_public_metrics(address: str) -> None:
    with pytest.raises(InsecureAddress, match="plain text"):
        check_metrics_address(address, is_allowed=False)
    check_metrics_address(address, is_allowed=True)


def test_metrics_on_loopback_need_no_flag_and_an_invalid_address_is_refused() -> None:
    check_metrics_address("127.0.0.1:9100", is_allowed=False)
    with pytest.raises(SettingsError, match="HOST:PORT"):
        check_metrics_address("9100", is_allowed=True)
