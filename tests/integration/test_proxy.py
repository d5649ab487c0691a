"""Devices behind an HTTP proxy: tinyproxy, as a company's network may have one.

The server listens at an address of this machine that is not loopback.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Processes, free_port, port_of, until, write_task

pytestmark = pytest.mark.slow

SETTINGS = """
Port {port}
Listen 127.0.0.1
LogFile "{log}"
LogLevel Connect
PidFile "{folder}/tinyproxy.pid"
Allow 127.0.0.1
{ports}
"""


def own_address() -> str:
    """Return an address of this machine that is not loopback, or skip."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        try:
            plain.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(plain.getsockname()[0])


@contextlib.contextmanager
def tinyproxy(folder: Path, *, ports: str = "") -> Iterator[tuple[str, Path]]:
    """Run the proxy; yield its URL and its log. ``ports`` are the only ones to CONNECT to."""
    program = shutil.which("tinyproxy")
    if program is None:
        pytest.skip("apt-get install tinyproxy")
    port, log = free_port(), folder / "tinyproxy.log"
    settings = folder / "tinyproxy.conf"
    settings.write_text(SETTINGS.format(port=port, log=log, folder=folder, ports=ports))
    with subprocess.Popen([program, "-d", "-c", settings], stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: _answers(port), what=lambda: "tinyproxy")
            yield f"http://127.0.0.1:{port}", log
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with socket.socket() as plain:
        return plain.connect_ex(("127.0.0.1", port)) == 0


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
