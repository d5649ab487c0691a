"""Devices behind an HTTP proxy: tinyproxy, as a company's network may have one.

The server listens at an address of this machine that is not loopback.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import http_proxy
from tests.processes import Processes, port_of, write_task

pytestmark = pytest.mark.slow


def own_address() -> str:
    """Return an address of this machine that is not loopback, or skip."""
    found = http_proxy.own_address()
    if found is None:
        pytest.skip("this machine has no address but loopback")
    return found


@contextlib.contextmanager
def tinyproxy(folder: Path, *, ports: str = "") -> Iterator[tuple[str, Path]]:
    """Run the proxy; yield its URL and its log. ``ports`` are the only ones to CONNECT to."""
    if http_proxy.program() is None:
        pytest.skip("apt-get install tinyproxy")
    proxy = http_proxy.HttpProxy(folder)
    proxy.start(ports)
    try:
        yield proxy.url, proxy.log
    finally:
        proxy.kill()


def test_a_device_takes_part_through_a_proxy(tmp_path: Path) -> None:
    task, host = write_task(tmp_path).spec, own_address()
    with (
        tinyproxy(tmp_path) as (url, log),
        Processes(tmp_path, http_proxy=url, no_proxy="") as processes,
    ):
        open_to_all = ("--plain-text", "--listen", f"{host}:0")
        server = processes.server(*open_to_all, "--min-clients", 1, "--rounds", 2, task=task)
        address = f"{host}:{port_of(server)}"
        client = processes.client(1, 0, "--server", address, "--plain-text", task=task)
        assert server.wait() == 0, server.text()
        assert client.wait() == 0, client.text()
    assert f"CONNECT {address}" in log.read_text()


def test_a_device_connects_to_its_own_machine_without_the_proxy(tmp_path: Path) -> None:
    task = write_task(tmp_path).spec
    with Processes(tmp_path, http_proxy="http://127.0.0.1:1") as processes:
        server = processes.server("--min-clients", 1, "--rounds", 1, task=task)
        client = processes.client(port_of(server), 0, task=task)
        assert server.wait() == 0, server.text()
        assert client.wait() == 0, client.text()


def test_doctor_and_the_client_name_the_variable_of_a_proxy_that_refuses(tmp_path: Path) -> None:
    task, host = write_task(tmp_path).spec, own_address()
    with (
        socket.create_server((host, 0)) as server,
        tinyproxy(tmp_path, ports="ConnectPort 443") as (url, _),
        Processes(tmp_path, http_proxy=url, no_proxy="") as processes,
    ):
        to = ("--server", f"{host}:{server.getsockname()[1]}", "--plain-text")
        doctor = processes.start("client", "doctor", *to, "--task", task)
        client = processes.client(1, 0, *to, "--patience", 0.2, task=task)
        assert doctor.wait() == 1, doctor.text()
        assert client.wait() == 1, client.text()
    for spoken in (doctor.text(), client.text()):
        assert "(http_proxy)" in spoken
        assert f"no_proxy={host}" in spoken
