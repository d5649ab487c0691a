"""Serves the Prometheus metrics: GET /metrics over plain HTTP. Imported only with --metrics.

Each scrape has a thread and a deadline, and their number is limited, so that strangers can neither
use up memory nor stop the scrapes with a request that never ends.
``prometheus_client.start_http_server`` has no timeout and no limit: 200 connections that send
nothing held 200 threads. There is no TLS and no password: another address than loopback needs
--public-metrics, and should be behind a firewall, or a proxy that has both.
"""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from headwater.common.errors import InsecureAddress, PortInUse
from headwater.common.transport.tls import host_in, is_loopback, split_address

log = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
MAX_REQUESTS = 16  # at once
MAX_HEAD_BYTES = 8192
PATH = "/metrics"


def check_metrics_address(address: str, *, is_allowed: bool) -> None:
    """Check that the metrics address is loopback, or was allowed by --public-metrics.

    Raises:
        InsecureAddress: neither.
        SettingsError: not HOST:PORT.
    """
    host, _ = split_address(address)
    if not (is_allowed or is_loopback(host)):
        raise InsecureAddress(
            f"--metrics {address} is not a loopback address, and metrics are plain text",
            remedy="listen on 127.0.0.1, for an agent on this machine; or say --public-metrics if "
            "you accept that anyone who reaches the port may read devices' names and figures",
        )


class MetricsServer:
    """Serves a registry until ``close``."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Open the port; port 0 takes a free one.

        Raises:
            PortInUse: the port cannot be opened.
        """
        host, port = split_address(address)
        try:
            self._server = _Server((host, port), registry)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {address} for metrics: {error.strerror}",
                remedy="choose another port with --metrics HOST:PORT",
            ) from error
        self.port: int = self._server.server_address[1]
        url_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{url_host}:{self.port}{PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the port and wait for the thread to end."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry) -> None:
        self.registry = registry
        self.is_local = is_loopback(address[0])
        self._slots = threading.Semaphore(MAX_REQUESTS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._slots.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        """Read the request's head; the deadline holds for all of it, and for the answer."""
        super().setup()
        end, head = time.monotonic() + REQUEST_SECONDS, b""
        while b"\r\n\r\n" not in head and len(head) < MAX_HEAD_BYTES:
            self.connection.settimeout(max(end - time.monotonic(), 0.001))
            if not (piece := self.connection.recv(MAX_HEAD_BYTES)):
                break
            head += piece
        self.connection.settimeout(REQUEST_SECONDS)
        self.rfile = io.BytesIO(head)

    def do_GET(self) -> None:
        # A web site that resolves its own name to 127.0.0.1 must not read the metrics.
        if self.server.is_local and not is_loopback(host_in(self.headers.get("Host", ""))):
            self.send_error(HTTPStatus.BAD_REQUEST, "ask for the metrics by their own address")
            return
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"the metrics are at {PATH}")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        page = encode(self.server.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def version_string(self) -> str:
        return "headwater"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        log.debug(format, *args)
